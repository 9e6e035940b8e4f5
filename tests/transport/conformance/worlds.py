"""What the conformance suite asks of a fabric under test. A new fabric joins with one class here and one line in ``conftest``."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from contextlib import suppress
from typing import Any, Protocol

from afore.core.clock import LoopClock
from afore.core.link_options import IdleOptions, TcpOptions
from afore.transport.api import Fabric
from afore.transport.handshake import Identity
from afore.transport.loopback import LoopbackFabric, LoopbackFaults, LoopbackNetwork
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.tcp import TcpConfig, TcpFabric
from afore.transport.tcp_sockets import connect_tcp
from afore.transport.unix_sockets import connect_unix
from tests.transport.conformance.weather import Weather

CREDITS = 64
"""Notifications that a link of every world carries before its writer has to wait."""
MESSAGE_LIMIT = 1 << 20
HASTY_US = 1e6


class World(Protocol):
    """One network in which endpoints meet, made anew for each test."""

    loops: tuple[str, ...]
    """Event loops that it works under."""
    networked: bool
    """Whether bytes cross a network: then it is a ``NetworkWorld``."""
    streams: bool
    """Whether its endpoints listen on sockets: then it is a ``StreamWorld``."""
    bulk: int
    """How many notifications a flood has here."""
    lives: int
    """How many endpoints come and go where leaks are counted."""
    maps: bool
    """Whether endpoints map each other's memory."""
    crosses_processes: bool
    """Whether endpoints of several processes meet here."""
    tells_late: bool
    """Whether an owner's news travel: a writer then hears of a closed region a little later."""

    def fabric(self, label: str) -> Fabric:
        """A new endpoint."""
        ...

    def channel_address(self, name: str) -> str:
        """Where a listener of that name listens."""
        ...

    def nowhere(self) -> str:
        """An endpoint's address at which nobody ever was."""
        ...

    def residue(self) -> list[str]:
        """What exists outside this process because of this world."""
        ...

    async def close(self) -> None: ...


class StreamWorld(World, Protocol):
    """A world whose endpoints listen on sockets, where other processes and strangers come in."""

    link_terms: tuple[int, int]
    """Bytes and descriptors that an owner gives at the end of a link's handshake."""

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


class NetworkWorld(StreamWorld, Protocol):
    """A world whose bytes cross a network, where weather happens to them."""

    def behind(self, weather: Weather, label: str) -> Fabric:
        """An endpoint whose peers reach it through ``weather`` only."""
        ...


class LoopbackWorld:
    """Everything inline."""

    loops: tuple[str, ...] = ("asyncio", "uvloop", "virtual")
    streams = False
    networked = False
    crosses_processes = False
    bulk = 100_000
    lives = 100
    maps = True
    tells_late = False

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

    def nowhere(self) -> str:
        return "nowhere"

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
    networked = False
    crosses_processes = True
    bulk = 100_000
    lives = 100
    maps = True
    tells_late = False
    link_terms = (4, 3)

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

    def nowhere(self) -> str:
        return self.channel_address("nowhere")

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


class SpinWorld(ShmWorld):
    """The same, where readers look for a while before they sleep: both are seen, for the while is shorter than some waits."""

    def config(self, label: str, **changes: Any) -> ShmConfig:
        idle = IdleOptions(strategy="spin-then-fd", spin_us=200, cpu_share=1)
        return super().config(label, **{"idle": idle, **changes})


def listeners() -> dict[int, str]:
    """The sockets on which this process listens for IPv4 connections, by inode: a port may be another's a moment later."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            status = os.stat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[status.st_ino] = f"listens at {sock.getsockname()}"
    return found


class TcpWorld:
    """Sockets of the loopback interface."""

    loops: tuple[str, ...] = ("asyncio", "uvloop")
    streams = True
    networked = True
    crosses_processes = True
    bulk = 10_000
    lives = 40
    maps = False
    tells_late = True
    link_terms = (4, 0)

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._fabrics: list[TcpFabric] = []
        self._reserved: dict[str, socket.socket] = {}
        # What listened in this process before this world was made is nothing that it left behind.
        self._strangers = listeners()

    def config(self, label: str, **changes: Any) -> TcpConfig:
        options: dict[str, Any] = {
            "secret": self._secret,
            "label": label,
            "credits": CREDITS,
            "message_limit": MESSAGE_LIMIT,
            "handshake_timeout_us": 20e6,
        }
        return TcpConfig(**options | {key: value for key, value in changes.items() if value is not None})

    def make(self, label: str, **changes: Any) -> TcpFabric:
        """An endpoint with another configuration."""
        fabric = TcpFabric(self.config(label, **changes))
        self._fabrics.append(fabric)
        return fabric

    def fabric(self, label: str) -> TcpFabric:
        return self.make(label)

    def behind(self, weather: Weather, label: str) -> TcpFabric:
        fabric = self.make(label, advertise=weather.address)
        weather.target = fabric.listens_at
        return fabric

    def hasty_fabric(self) -> Fabric:
        return self.make("hasty", handshake_timeout_us=HASTY_US)

    def odd_fabric(self, *, secret: bytes | None = None, version: int | None = None) -> Fabric:
        return self.make("odd", secret=secret, version=version)

    def identity(self, *, secret: bytes | None = None, version: int | None = None) -> Identity:
        config = self.config("stranger", secret=secret, version=version)
        return Identity(address="stranger", secret=config.shared_secret, version=config.version)

    def refusals(self, fabric: Fabric) -> dict[str, int]:
        assert isinstance(fabric, TcpFabric)
        return dict(fabric.refusals)

    async def stranger(self, address: str) -> socket.socket:
        return await connect_tcp(address, TcpOptions())

    def channel_address(self, name: str) -> str:
        if name not in self._reserved:
            # Bound and never listening: the kernel gives the port to nobody else, and whoever asks for it by number may listen.
            reserved = socket.socket()
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            self._reserved[name] = reserved
        return f"127.0.0.1:{self._reserved[name].getsockname()[1]}"

    def nowhere(self) -> str:
        return self.channel_address("nowhere")

    def puppet_spec(self, label: str) -> dict[str, Any]:
        return {"fabric": "tcp", "secret": self._secret.hex(), "label": label, "credits": CREDITS}

    def residue(self) -> list[str]:
        return sorted(name for inode, name in listeners().items() if inode not in self._strangers)

    async def close(self) -> None:
        for fabric in self._fabrics:
            await fabric.close()
        for reserved in self._reserved.values():
            reserved.close()
