"""Regions and links of the loopback fabric: memory of one process, shared by reference, written inline or after a flight."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn, Protocol

from afore.core.clock import Clock, deadline
from afore.core.errors import LinkClosed, PeerLost, RegionRevoked
from afore.transport.api import Buffer, Lane, Notification, RegionKey
from afore.transport.buffers import IMMEDIATE_LIMIT, flat, refuse_bounds, refuse_foreign, require_immediate, revoked
from afore.transport.loopback_faults import Wire
from afore.transport.loopback_sky import Airway, Sky
from afore.transport.queues import Heard, Inbox, Turnstile

ALIGNMENT = 64
"""Bytes to which a region's start is aligned, so that its views suit vector kernels as those of mapped memory do."""


class LoopbackRegion:
    """A ``Region`` of ordinary memory."""

    __slots__ = ("_forget", "_key", "_label", "inbox", "memory", "open")

    def __init__(self, key: RegionKey, label: str, forget: Callable[[LoopbackRegion], None]) -> None:
        self._key = key
        self._label = label
        self._forget = forget
        self.memory = _aligned(key.nbytes)
        self.inbox = Inbox(key.address, label)
        self.open = True

    @property
    def key(self) -> RegionKey:
        return self._key

    @property
    def nbytes(self) -> int:
        return self._key.nbytes

    @property
    def buffer(self) -> memoryview:
        if not self.open:
            raise RegionRevoked(self._key.address, f"region {self._label!r} is closed", "register a new one")
        return self.memory

    async def notified(self, *, timeout_us: float | None) -> list[Notification]:
        return await self.inbox.take(timeout_us)

    async def attend(self, heard: Heard) -> NoReturn:
        """See ``attend``: ``heard`` is called as notifications land, without a turn of the event loop between."""
        await self.inbox.attend(heard)

    def close(self) -> None:
        self.revoke("was closed")

    def revoke(self, reason: str) -> None:
        """Ends the region; views that readers hold stay valid, as mapped pages do."""
        if self.open:
            self.open = False
            self._forget(self)
            self.inbox.revoke(self._label, self._key.address, reason)

    def view(self, writable: bool) -> memoryview:
        return self.memory[:] if writable else self.memory.toreadonly()


class LoopbackMapping:
    """A ``MappedRegion``: a view of the owner's memory."""

    def __init__(self, view: memoryview, address: str, forget: Callable[[LoopbackMapping], None]) -> None:
        self._view: memoryview | None = view
        self._address = address
        self._forget = forget

    @property
    def buffer(self) -> memoryview:
        if self._view is None:
            raise RegionRevoked(self._address, "this mapping is closed", "map the region again")
        return self._view

    def close(self) -> None:
        self._view = None
        self._forget(self)


class Target(Protocol):
    """The endpoint at a link's other end."""

    @property
    def address(self) -> str: ...

    def region_of(self, key: RegionKey) -> LoopbackRegion:
        """The live region of ``key``. Raises ``RegionRevoked`` or ``AccessRefused``."""
        ...


class LoopbackLink(Airway):
    """A ``Link``. With a wire each write flies: its bytes are taken at once, and land with their notification later, in order."""

    # A target writes through a hundred links, and there are as many as pairs of workers: each is one object, without a dictionary.
    __slots__ = (
        "_calm_ns",
        "_clock",
        "_closed",
        "_credits",
        "_forget",
        "_key",
        "_lane",
        "_line",
        "_lost",
        "_nbytes",
        "_now_ns",
        "_region",
        "_source",
        "_target",
        "_turnstile",
        "_wire",
    )

    def __init__(
        self,
        source: str,
        target: Target,
        lane: Lane,
        *,
        clock: Clock,
        wire: Wire | None,
        sky: Sky,
        credits: int,
        forget: Callable[[LoopbackLink], None],
    ) -> None:
        self._source = source
        self._target = target
        self._lane = lane
        self._clock = clock
        self._now_ns = clock.now_ns
        self._wire = wire
        self._calm_ns = wire.latency_ns if wire is not None and wire.calm else None
        """How long every write flies; None where that differs, and where none does."""
        super().__init__(sky)
        self._credits = credits
        self._forget = forget
        self._turnstile = Turnstile()
        self._line = self._turnstile.line
        self._closed = False
        self._lost = ""
        self._key: RegionKey | None = None
        """The very key of the last write: most links write into one or two regions."""
        self._nbytes = 0
        """Of its region."""
        self._region: LoopbackRegion | None = None

    @property
    def peer(self) -> str:
        return self._target.address

    @property
    def lane(self) -> Lane:
        return self._lane

    def write_now(self, remote: RegionKey, offset: int, data: bytes | memoryview, notify: int | None = None) -> bool:
        """``write`` of plain bytes that need not wait and cannot be wrong, without the coroutine; False: nothing was done.

        ``data``: bytes, or a memoryview of them.
        """
        region = self._region
        if (
            region is None
            or remote is not self._key
            or not region.open
            or self._closed
            or self._lost
            or self._line
            or not 0 <= offset <= self._nbytes - len(data)
        ):
            return False
        if notify is not None:
            if not self._credits or not 0 <= notify < IMMEDIATE_LIMIT:
                return False
            self._credits -= 1
        if self._calm_ns is not None:
            now_ns = self._now_ns()
            self.fly(now_ns + self._calm_ns, now_ns, (region, offset, bytes(data), notify))
        elif self._wire is None:
            self.land((region, offset, data, notify))
        else:
            self._send(self._wire, region, offset, bytes(data), notify)
        return True

    async def write(
        self, remote: RegionKey, offset: int, data: Buffer, *, notify: int | None = None, timeout_us: float
    ) -> None:
        if type(data) is bytes and self.write_now(remote, offset, data, notify):
            return
        self._require_usable()
        region = self._region
        if region is None or remote is not self._key or not region.open:
            if remote.fabric != "loopback" or remote.address != self.peer:
                raise refuse_foreign(remote, self.peer, "is not this peer's")
            region = self._target.region_of(remote)
            self._key, self._nbytes, self._region = remote, remote.nbytes, region
        payload = flat(data, self.peer)
        if not 0 <= offset <= remote.nbytes - len(payload):
            raise refuse_bounds(remote, offset, len(payload))
        if notify is not None:
            require_immediate(notify, self.peer)
        if self._turnstile or (notify is not None and not self._credits):
            await self._turnstile.enter(
                (lambda: self._has_room(1)) if notify is not None else (lambda: self._has_room(0)),
                timeout_us,
                peer=self.peer,
                what=f"write to region {remote.region} on lane {self._lane.name.lower()}: no credit for a notification",
                hint="its owner does not take its notifications",
            )
            if not region.open:
                raise revoked(remote)
        if notify is not None:
            self._credits -= 1
        if self._wire is None:
            self.land((region, offset, payload, notify))
        else:
            self._send(self._wire, region, offset, bytes(payload), notify)

    async def read(self, remote: RegionKey, offset: int, into: memoryview, *, timeout_us: float) -> None:
        self._require_usable()
        if remote.fabric != "loopback" or remote.address != self.peer:
            raise refuse_foreign(remote, self.peer, "is not this peer's")
        region = self._target.region_of(remote)
        if not 0 <= offset <= remote.nbytes - len(into):
            raise refuse_bounds(remote, offset, len(into))
        if self._wire is not None:
            # The request flies behind what was written, and the bytes fly back.
            now_ns = self._clock.now_ns()
            there = self._wire.fly(now_ns, 0)
            back = self._wire.fly(there.lands_ns, len(into))
            async with deadline(timeout_us, peer=self.peer, operation=f"read of region {remote.region}"):
                await self._clock.sleep_us((back.lands_ns - now_ns) * 1e-3)
            self._require_usable()
            if not region.open:
                raise revoked(remote)
        into[:] = region.buffer[offset : offset + len(into)]

    def _send(self, wire: Wire, region: LoopbackRegion, offset: int, payload: bytes, notify: int | None) -> None:
        now_ns = self._clock.now_ns()
        flight = wire.fly(now_ns, len(payload))
        if flight.first_ns is not None:
            parts = [(offset, payload[: flight.split]), (offset + flight.split, payload[flight.split :])]
            first_offset, first = parts.pop(1 if flight.tail_first else 0)
            offset, payload = parts[0]
            self.fly(flight.first_ns, now_ns, (region, first_offset, first, None))
        self.fly(flight.lands_ns, now_ns, (region, offset, payload, notify))

    def land(self, flight: tuple[LoopbackRegion, int, Buffer, int | None]) -> None:
        """What was written, and where, lands; with its notification."""
        region, offset, payload, notify = flight
        if not region.open:
            if notify is not None:
                self.give_back(1)
            return
        if payload:
            region.memory[offset : offset + len(payload)] = payload
        if notify is not None:
            inbox = region.inbox
            if inbox.heard is None:
                inbox.put(Notification(self._source, notify), self)
                return
            self._credits += 1
            if self._line:
                self._turnstile.poke()
            inbox.tell([Notification(self._source, notify)])

    def give_back(self, count: int) -> None:
        """The owner took ``count`` notifications."""
        self._credits += count
        if self._line:
            self._turnstile.poke()

    async def close(self) -> None:
        self.shut()

    def shut(self) -> None:
        """Closes without waiting; what flies still lands. Idempotent."""
        if not self._closed:
            self._closed = True
            self._forget(self)
            self._turnstile.poke()

    def lose(self, reason: str) -> None:
        """The peer is gone: what still flies is lost with it."""
        self._lost = self._lost or reason
        self.cut()
        self._turnstile.poke()

    def _has_room(self, needed: int) -> bool:
        self._require_usable()
        return self._credits >= needed

    def _require_usable(self) -> None:
        if self._closed:
            raise LinkClosed(self.peer, "the link was closed on this side", "connect again")
        if self._lost:
            raise PeerLost(self.peer, self._lost, "wait for the next epoch and connect again")


def _aligned(nbytes: int) -> memoryview:
    storage = bytearray(nbytes + ALIGNMENT)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(storage)) % ALIGNMENT
    return memoryview(storage)[skip : skip + nbytes]
