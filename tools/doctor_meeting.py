"""What two doctors say to each other: who they are, where they can be written to, and an echo of one-sided writes.

client → server   Meet: its endpoints, and a region on each
server → client   Met: the same of its own, and whether it could connect back
either way        one-sided writes with a notification; the server writes what came back to the client
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from afore.core.errors import AforeError, ConfigError, HostError, TransportError, WireError
from afore.core.record import record
from afore.core.wire import Codec
from afore.transport.api import Fabric, Lane, Link, Region, RegionKey
from afore.transport.tcp import TcpConfig, TcpFabric
from afore.transport.verbs.binding import load_binding
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.fabric import VerbsFabric
from afore.transport.verbs.table import read_table

REGION_BYTES = 64 << 10
STEP_US = 5e6
"""What one step may take."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """One fabric of one side. An empty endpoint: not there, and why not."""

    fabric: str
    endpoint: str
    region: int
    nbytes: int
    token: str
    why_not: str

    @property
    def key(self) -> RegionKey:
        """Of the region to write into."""
        return RegionKey(self.fabric, self.endpoint, self.region, self.nbytes, self.token)


@dataclass(frozen=True)
class Meet:
    """A client's first words."""

    machine: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Met:
    """The answer. ``ways_back``: for each place of the client, why the server could not connect to it; empty: it could."""

    machine: str
    places: tuple[Place, ...]
    ways_back: tuple[str, ...]


CODEC = Codec((Meet, Met))
Words = Meet | Met


def parse(message: dict[str, object], kind: type[Words], peer: str) -> Words:
    """Raises ``WireError`` for anything but a ``kind``."""
    words = CODEC.from_wire(message, peer=peer)
    if not isinstance(words, kind):
        raise WireError(peer, f"sent {type(words).__name__} where {kind.__name__} was due")
    return words


def problem_and_mend(error: AforeError) -> tuple[str, str]:
    """The two halves of an error's message, without whom it is about."""
    if isinstance(error, TransportError):
        return error.operation, error.hint
    if isinstance(error, ConfigError | HostError):
        return error.problem, error.remedy
    return str(error), ""


@record
class Stand:
    """One endpoint of one side, with its region; without an endpoint, why there is none."""

    place: Place
    fabric: Fabric | None
    region: Region | None


@contextlib.asynccontextmanager
async def stands(tcp: TcpFabric, host: str, secret: bytes) -> AsyncIterator[tuple[Stand, ...]]:
    """This side's places: over ``tcp``, which its owner closes, and over verbs where this machine can."""
    opened: list[Fabric] = []
    region = tcp.register(REGION_BYTES, label="doctor")
    found = [Stand(_place(tcp, region.key), tcp, region)]
    try:
        try:
            if not read_table():
                raise HostError("RDMA devices", "no RDMA device")
            load_binding("auto")
            verbs = VerbsFabric(VerbsConfig(listen=f"{_bracketed(host)}:0", secret=secret, label="doctor"))
            opened.append(verbs)
            rdma = verbs.register(REGION_BYTES, label="doctor")
            found.append(Stand(_place(verbs, rdma.key), verbs, rdma))
        except AforeError as error:
            found.append(Stand(Place("verbs", "", 0, 0, "", problem_and_mend(error)[0]), None, None))
        yield tuple(found)
    finally:
        region.close()
        for fabric in opened:
            await fabric.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _place(fabric: Fabric, key: RegionKey) -> Place:
    return Place(fabric.name, fabric.address, key.region, key.nbytes, key.token, "")


async def echo(region: Region, link: Link, key: RegionKey) -> None:
    """Writes back what comes: an immediate is the number of bytes. Until the region, the link or its task ends."""
    while True:
        for notification in await region.notified(timeout_us=None):
            nbytes = min(notification.immediate, REGION_BYTES)
            data = bytes(region.buffer[:nbytes])
            await link.write(key, 0, data, notify=nbytes, timeout_us=STEP_US)


async def open_links(mine: tuple[Stand, ...], theirs: tuple[Place, ...]) -> list[tuple[Stand, Place, Link | None, str]]:
    """A link for each fabric that both sides have, or why there is none."""
    by_name = {place.fabric: place for place in theirs}
    found: list[tuple[Stand, Place, Link | None, str]] = []
    for stand in mine:
        place = by_name.get(stand.place.fabric)
        if place is None or not place.endpoint or stand.fabric is None:
            continue
        try:
            link = await stand.fabric.connect(place.endpoint, Lane.DEMAND, timeout_us=STEP_US)
            found.append((stand, place, link, ""))
        except AforeError as error:
            found.append((stand, place, None, "; ".join(part for part in problem_and_mend(error) if part)))
    return found


def tcp_endpoint(listen: str, secret: bytes | None) -> TcpFabric:
    """An endpoint at ``HOST:PORT``. Raises ``ConfigError`` (beyond loopback without a secret), ``HostError``."""
    return TcpFabric(TcpConfig(listen=listen, secret=secret, label="doctor"))
