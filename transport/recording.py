"""A fabric that writes down what goes through it: every one-sided write, every control message, both with their time.

It wraps any fabric and changes nothing: links and channels are the wrapped one's, with a note taken on the way. ``tools.wire``
reads the files and plays them back.
"""

from __future__ import annotations

from pathlib import Path

from afore.core.clock import Clock
from afore.core.errors import WireError
from afore.transport.api import (
    Buffer,
    Channel,
    ChannelHandler,
    Fabric,
    Lane,
    Link,
    MappedRegion,
    Region,
    RegionKey,
)
from afore.transport.bells import BellKind, decode
from afore.transport.ring_layout import RingLayout, read_header
from afore.transport.routed_names import ROUTED, RoutedKey
from afore.transport.wire_file import FILE_LIMIT, PAYLOAD_LIMIT, SUFFIX, WireWriter

RING = "ring"


class RecordingFabric:
    """A ``Fabric`` around ``inner``, which it owns. Records into ``<directory>/<member>.wire``."""

    def __init__(self, inner: Fabric, directory: str, member: str, clock: Clock, *, limit: int = FILE_LIMIT) -> None:
        """Raises ``HostError`` where the file cannot be made."""
        self._inner = inner
        self.log = WireWriter(
            Path(directory) / f"{member}{SUFFIX}", clock, member=member, address=inner.address, limit=limit
        )
        self._channels = 0
        self._ring: tuple[Region, RingLayout | None] | None = None
        self._announced = -1

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def maps_memory(self) -> bool:
        return self._inner.maps_memory

    def node_of(self, address: str) -> str:
        return self._inner.node_of(address)

    def register(self, nbytes: int, *, label: str) -> Region:
        region = self._inner.register(nbytes, label=label)
        self.log.add("region", label, [_plain(key) for key in _all_keys(region.key)])
        if label == RING:
            self._ring = region, None
        return region

    def resolve(self, key: RegionKey) -> RegionKey:
        return self._inner.resolve(key)

    def map(self, key: RegionKey, *, writable: bool = False) -> MappedRegion:
        return self._inner.map(key, writable=writable)

    async def connect(self, address: str, lane: Lane, *, timeout_us: float) -> Link:
        return _RecordingLink(await self._inner.connect(address, lane, timeout_us=timeout_us), self)

    async def listen(self, address: str, handler: ChannelHandler) -> None:
        async def handle(channel: Channel) -> None:
            await handler(self._recorded(channel))

        await self._inner.listen(address, handle)

    async def dial(self, address: str, *, timeout_us: float) -> Channel:
        return self._recorded(await self._inner.dial(address, timeout_us=timeout_us))

    def _recorded(self, channel: Channel) -> Channel:
        self._channels += 1
        return _RecordingChannel(channel, self.log, self._channels)

    def note_bell(self, immediate: int) -> None:
        """A plan is announced: its entry, which readers take out of mapped memory, would be in no write."""
        if self._ring is None or immediate >> 28 != BellKind.PLAN:
            return
        region, layout = self._ring
        if layout is None:
            layout = read_header(region.buffer).layout
            self._ring = region, layout
        sequence = decode(immediate).sequence(self._announced + 1)
        if sequence > self._announced:
            self._announced = sequence
            at = layout.entry_offset(sequence)
            self.log.add("entry", sequence, bytes(region.buffer[at : at + layout.entry_nbytes]))

    async def close(self) -> None:
        await self._inner.close()
        self.log.close()


def _plain(key: RegionKey) -> list[object]:
    return [key.fabric, key.address, key.region, key.nbytes, key.token]


def _all_keys(key: RegionKey) -> list[RegionKey]:
    """``key``, and by which keys writers know the region where there are several ways to it."""
    if key.fabric != ROUTED:
        return [key]
    try:
        routed = RoutedKey.parse(key, "shm")
    except WireError:
        return [key]
    return [key, routed.near, *routed.far.values()]


class _RecordingLink:
    """A ``Link`` that notes each write."""

    def __init__(self, inner: Link, fabric: RecordingFabric) -> None:
        self._inner = inner
        self._fabric = fabric

    @property
    def peer(self) -> str:
        return self._inner.peer

    @property
    def lane(self) -> Lane:
        return self._inner.lane

    async def write(
        self, remote: RegionKey, offset: int, data: Buffer, *, notify: int | None = None, timeout_us: float
    ) -> None:
        nbytes = len(data) if isinstance(data, bytes | bytearray) else data.nbytes
        kept = bytes(data) if nbytes <= PAYLOAD_LIMIT else None
        where = remote.address, remote.region, offset
        self._fabric.log.add("write", self.peer, int(self.lane), *where, kept, nbytes, notify)
        if notify is not None:
            self._fabric.note_bell(notify)
        await self._inner.write(remote, offset, data, notify=notify, timeout_us=timeout_us)

    async def read(self, remote: RegionKey, offset: int, into: memoryview, *, timeout_us: float) -> None:
        where = remote.address, remote.region, offset
        self._fabric.log.add("read", self.peer, int(self.lane), *where, into.nbytes)
        await self._inner.read(remote, offset, into, timeout_us=timeout_us)

    async def close(self) -> None:
        await self._inner.close()


class _RecordingChannel:
    """A ``Channel`` that notes each message."""

    def __init__(self, inner: Channel, log: WireWriter, number: int) -> None:
        self._inner = inner
        self._log = log
        self._number = number

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def send(self, message: dict[str, object], *, timeout_us: float) -> None:
        self._log.add("message", "out", self._number, self.peer, message)
        await self._inner.send(message, timeout_us=timeout_us)

    async def receive(self, *, timeout_us: float | None) -> dict[str, object]:
        message = await self._inner.receive(timeout_us=timeout_us)
        self._log.add("message", "in", self._number, self.peer, message)
        return message

    async def close(self) -> None:
        await self._inner.close()
