"""One side of a pair that ``bench transport`` measures: what it offers the other side, a message out, messages in.

Fabrics are here; public peers, behind the same protocol, in ``transport_peers``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Protocol

from afore.core.clock import WallClock
from afore.core.link_options import IdleOptions, Strategy
from afore.transport.api import Fabric, Lane, Link, Region, RegionKey
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.tcp import TcpConfig, TcpFabric

TIMEOUT_US: Final = 60e6
LEAD, FOLLOW = "lead", "follow"
"""The side that writes first and takes the times of a round trip; the side that answers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both sides of a pair are told."""

    way: str
    """A fabric, or a public peer."""
    idle: Strategy = "fd"
    """How readers wait, on a fabric."""
    largest: int
    """Bytes of the largest message."""
    run: str
    """Names the pair's files: letters, digits, underscores."""
    secret: str
    """Hexadecimal, known to both."""
    folder: str
    """For sockets."""
    cores: tuple[int, ...] = ()
    """What the processes may run on; empty for every core that there is."""


class End(Protocol):
    """One side."""

    async def open(self) -> dict[str, Any]:
        """Comes into being; returns what the other side has to know, as plain JSON."""
        ...

    async def meet(self, other: Mapping[str, Any]) -> None:
        """Connects to the other side, which is open."""
        ...

    def prepare(self, nbytes: int) -> None:
        """Messages have this size from now on."""
        ...

    async def send(self, number: int) -> None:
        """One message."""
        ...

    async def receive(self) -> int:
        """Waits for messages of the other side; returns how many came, at least one."""
        ...

    async def close(self) -> None:
        """Frees everything."""
        ...


class FabricEnd:
    """A region to be written into, and a link into the other side's: a message is a write with its notification."""

    def __init__(self, make: Callable[[], Fabric], largest: int) -> None:
        self._make = make
        self._whole = bytes(max(1, largest))
        self._data = b""
        self._fabric: Fabric
        self._region: Region
        self._link: Link
        self._remote: RegionKey

    async def open(self) -> dict[str, Any]:
        self._fabric = self._make()
        self._region = self._fabric.register(len(self._whole), label="bench")
        return dataclasses.asdict(self._region.key)

    async def meet(self, other: Mapping[str, Any]) -> None:
        self._remote = self._fabric.resolve(RegionKey(**other))
        self._link = await self._fabric.connect(self._remote.address, Lane.DATA, timeout_us=TIMEOUT_US)

    def prepare(self, nbytes: int) -> None:
        self._data = self._whole[:nbytes]

    def send(self, number: int) -> Coroutine[Any, Any, None]:
        return self._link.write(self._remote, 0, self._data, notify=number, timeout_us=TIMEOUT_US)

    async def receive(self) -> int:
        # As roles wait, idle, and as the peers do: without a timer. Whoever leads the measurement has a deadline.
        return len(await self._region.notified(timeout_us=None))

    async def close(self) -> None:
        await self._fabric.close()


def fabric_ends(setting: Setting, sides: tuple[str, ...]) -> dict[str, End]:
    """The sides that live in this process, over the fabric of ``setting``. Raises ``HostError`` where it is not to be had."""
    network = LoopbackNetwork(WallClock())
    return {side: FabricEnd(partial(_endpoint, setting, side, network), setting.largest) for side in sides}


def _endpoint(setting: Setting, side: str, network: LoopbackNetwork) -> Fabric:
    secret = bytes.fromhex(setting.secret)
    # Without a budget: what looking brings and costs is what is measured.
    idle = IdleOptions(strategy=setting.idle, cpu_share=1.0)
    if setting.way == "loopback":
        return LoopbackFabric(network, side)
    if setting.way == "shm":
        return ShmFabric(ShmConfig(run_id=setting.run, label=side, secret=secret, idle=idle))
    if setting.way == "tcp":
        return TcpFabric(TcpConfig(label=side, secret=secret, idle=idle))
    # Only where it is asked for: the bindings are an extra.
    from afore.transport.verbs.config import VerbsConfig
    from afore.transport.verbs.fabric import VerbsFabric

    return VerbsFabric(VerbsConfig(label=side, secret=secret))
