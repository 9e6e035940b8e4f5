"""What the conformance suite asks of a fabric under test. A new fabric joins with one class here and one line in ``conftest``."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any, Protocol

from afore.core.clock import LoopClock
from afore.transport.api import Fabric
from afore.transport.handshake import Identity
from afore.transport.loopback import LoopbackFabric, LoopbackFaults, LoopbackNetwork
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.unix_sockets import connect_unix

CREDITS = 64
"""Notifications that a link of every world carries before its writer has to wait."""
MESSAGE_LIMIT = 1 << 20
HASTY_US = 1e6


class World(Protocol):
    """One network in which endpoints meet, made anew for each test."""

    loops: tuple[str, ...]
    """Event loops that it works under."""
    streams: bool
    """Whether its endpoints listen on sockets: then it is a ``StreamWorld``."""
    bulk: int
    """How many notifications a flood has here."""

    def fabric(self, label: str) -> Fabric:
        """A new endpoint."""
        ...

    def channel_address(self, name: str) -> str:
        """Where a listener of that name listens."""
        ...

    def residue(self) -> list[str]:
        """What exists outside this process because of this world."""
        ...

    async def close(self) -> None: ...


class StreamWorld(World, Protocol):
    """A world whose endpoints listen on sockets, where other processes and strangers come in."""

    def puppet_spec(self, label: str) -> dict[str, Any]:
        """What a puppet needs to make an endpoint of this world."""
        ...

    async def stranger(self, address: str) -> socket.socket:
        """A raw connection to whatever listens at ``address``."""
        ...

    def identity(self, *, secret: bytes | None = None, version: int | None = None) -> Identity:
        """Somebody who may talk to this world, unless told otherwise."""
        ...

    def hasty_fabric(self) -> Fabric:
        """An endpoint that gives a handshake ``HASTY_US``, where others are patient."""
        ...

    def refusals(self, fabric: Fabric) -> dict[str, int]:
        """How many connections ``fabric`` has refused, by the error's name."""
        ...

    def odd_fabric(self, *, secret: bytes | None = None, version: int | None = None) -> Fabric:
        """An endpoint that does not belong: another secret or wire version."""
        ...


class LoopbackWorld:
    """Everything inline."""

    loops: tuple[str, ...] = ("asyncio", "uvloop", "virtual")
    streams = False
    bulk = 100_000

    def __init__(self) -> None:
        self.network = self.make_network()
        self._fabrics: list[LoopbackFabric] = []

    def make_network(self) -> LoopbackNetwork:
        return LoopbackNetwork(LoopClock(), credits=CREDITS, message_limit=MESSAGE_LIMIT)

    def fabric(self, label: str) -> Fabric:
        fabric = LoopbackFabric(self.network, f"{label}-{len(self._fabrics)}")
        self._fabrics.append(fabric)
        return fabric

    def channel_address(self, name: str) -> str:
        return name

    def residue(self) -> list[str]:
        return sorted(self.network.endpoints) + sorted(self.network.listeners)

    async def close(self) -> None:
        for fabric in self._fabrics:
            await fabric.close()


class StormWorld(LoopbackWorld):
    """Latency, jitter, writes that overtake each other across links, and payloads that land in two parts."""

    loops = ("asyncio", "virtual")
    bulk = 5_000

    def make_network(self) -> LoopbackNetwork:
        faults = LoopbackFaults(jitter_us=40, overtake=0.1, overtake_us=200, torn=0.5, torn_us=20)
        return LoopbackNetwork(LoopClock(), 5, 100, seed=7, faults=faults, credits=CREDITS, message_limit=MESSAGE_LIMIT)


class ShmWorld:
    """Shared memory and Unix sockets of this host."""

    loops: tuple[str, ...] = ("asyncio", "uvloop")
    streams = True
    bulk = 100_000

    def __init__(self) -> None:
        self.run_id = f"test{secrets.token_hex(6)}"
        self._secret = secrets.token_bytes(32)
        self._fabrics: list[ShmFabric] = []

    def config(self, label: str, **changes: Any) -> ShmConfig:
        options: dict[str, Any] = {
            "run_id": self.run_id,
            "secret": self._secret,
            "label": label,
            "ring_slots": CREDITS,
            "message_limit": MESSAGE_LIMIT,
            "handshake_timeout_us": 20e6,
        }
        return ShmConfig(**options | {key: value for key, value in changes.items() if value is not None})

    def fabric(self, label: str) -> ShmFabric:
        fabric = ShmFabric(self.config(label))
        self._fabrics.append(fabric)
        return fabric

    def hasty_fabric(self) -> Fabric:
        fabric = ShmFabric(self.config("hasty", handshake_timeout_us=HASTY_US))
        self._fabrics.append(fabric)
        return fabric

    def odd_fabric(self, *, secret: bytes | None = None, version: int | None = None) -> Fabric:
        fabric = ShmFabric(self.config("odd", secret=secret, version=version))
        self._fabrics.append(fabric)
        return fabric

    def identity(self, *, secret: bytes | None = None, version: int | None = None) -> Identity:
        config = self.config("stranger", secret=secret, version=version)
        return Identity(address="stranger", secret=config.secret or b"", version=config.version)

    def refusals(self, fabric: Fabric) -> dict[str, int]:
        assert isinstance(fabric, ShmFabric)
        return dict(fabric.refusals)

    async def stranger(self, address: str) -> socket.socket:
        return await connect_unix(address)

    def channel_address(self, name: str) -> str:
        return f"{self.config(name).run_directory}/{name}"

    def puppet_spec(self, label: str) -> dict[str, Any]:
        return {
            "fabric": "shm",
            "run_id": self.run_id,
            "secret": self._secret.hex(),
            "label": label,
            "ring_slots": CREDITS,
        }

    def residue(self) -> list[str]:
        prefix = f"afore-{self.run_id}"
        return sorted(name for name in os.listdir("/dev/shm") if name.startswith(prefix))

    async def close(self) -> None:
        for fabric in self._fabrics:
            await fabric.close()
