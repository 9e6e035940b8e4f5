"""What travels over a tcp link, as state machines without I/O: ``FrameReader`` at the owner, ``NewsReader`` at the writer.

Bytes go in as the network cuts them. Small frames are parsed out of a staging buffer, many to a read; what a large payload has
beyond it is received where it belongs, in the region's own memory. A notification is told after the last byte of its payload
lies there, and frames of a stream come in the order in which they were sent: that is all it takes for the promises on order.
"""

from __future__ import annotations

from typing import Protocol

from afore.core.errors import WireError
from afore.transport.api import Buffer
from afore.transport.records import (
    FRAME,
    FRAME_MAGIC,
    FRAME_NOTIFIES,
    FRAME_READS,
    NEWS,
    NEWS_CREDIT,
    NEWS_MAGIC,
    NEWS_READ,
    NEWS_REVOKED,
    NEWS_UNREAD,
    READ_LIMIT,
)

STAGING_BYTES = 16 << 10
"""Bytes of one read of frames."""
_SCRATCH_BYTES = 64 << 10
_FRAME_BYTES = FRAME.nbytes
_NEWS_BYTES = NEWS.nbytes
PAYLOAD_LIMIT = 1 << 48
_LIMITS = {0: PAYLOAD_LIMIT - 1, FRAME_NOTIFIES: PAYLOAD_LIMIT - 1, FRAME_READS: READ_LIMIT}
"""The flags that there are, and the most bytes of each."""


class Landing(Protocol):
    """Where frames land: the owner's side of a link."""

    def find(self, region: int, token: int) -> memoryview | None:
        """The region's memory; nothing where the write is to be dropped, of which the writer then is told."""
        ...

    def told(self, region: int, immediate: int) -> None:
        """A notification whose bytes are in place."""
        ...

    def dropped(self) -> None:
        """A notification of a write that was dropped: its credit goes back."""
        ...

    def asked(self, memory: memoryview | None, request: int) -> None:
        """The writer wants these bytes; nothing where the region is closed."""
        ...


class FrameReader:
    """The stream of one link, at the owner. Read into ``room()``, then say ``received``."""

    def __init__(self, peer: str, landing: Landing) -> None:
        self._peer = peer
        self._landing = landing
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._filled = 0
        self._region = 0
        self._immediate = -1
        """-1: none."""
        self._target: memoryview | None = None
        """Memory of the frame that is being received; nothing drops it."""
        self._at = 0
        self._left = 0
        """Bytes of payload that are to come."""
        self._scratch: memoryview | None = None

    @property
    def amid(self) -> bool:
        """Whether the stream would end inside a frame here."""
        return bool(self._left or self._filled)

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if not self._left:
            return self._staging[self._filled :]
        if self._target is not None:
            return self._target[self._at : self._at + self._left]
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        return self._scratch[: self._left]

    def received(self, nbytes: int) -> None:
        """``nbytes`` bytes were put into ``room()``. Raises ``WireError`` for what no writer of ours sends; the link ends then."""
        if self._left:
            self._at += nbytes
            self._left -= nbytes
            if not self._left:
                dropped, self._target = self._target is None, None
                if self._immediate >= 0:
                    self._tell(dropped, self._region, self._immediate)
            return
        staging = self._staging
        end = self._filled + nbytes
        begin = 0
        while end - begin >= _FRAME_BYTES:
            magic, flags, region, immediate, token, offset, size = FRAME.unpack_from(staging, begin)
            if magic != FRAME_MAGIC or flags not in _LIMITS or size > _LIMITS[flags]:
                raise WireError(self._peer, f"no frame (magic {magic:#x}, flags {flags:#x}, {size} bytes)")
            begin += _FRAME_BYTES
            target = self._landing.find(region, token)
            if target is not None and offset + size > len(target):
                raise WireError(
                    self._peer,
                    f"a write or read of {size} bytes at {offset} of region {region}, which has {len(target)}",
                )
            if flags == FRAME_READS:
                self._landing.asked(None if target is None else target[offset : offset + size], immediate)
                continue
            here = min(size, end - begin)
            if here and target is not None:
                target[offset : offset + here] = staging[begin : begin + here]
            begin += here
            if here == size:
                if flags:
                    self._tell(target is None, region, immediate)
                continue
            self._region, self._target = region, target
            self._at, self._left = offset + here, size - here
            self._immediate = immediate if flags else -1
        self._filled = end - begin
        if begin and self._filled:
            staging[: self._filled] = bytes(staging[begin:end])

    def revoke(self, region: int) -> None:
        """``region`` is closed: what is still to come for it is dropped, for its memory may serve something else."""
        if self._left and self._region == region:
            self._target = None

    def _tell(self, dropped: bool, region: int, immediate: int) -> None:
        if dropped:
            self._landing.dropped()
        else:
            self._landing.told(region, immediate)


class Told(Protocol):
    """Who hears an owner's news: the writer's side of a link."""

    def credit(self, count: int) -> None: ...

    def revoked(self, token: int) -> None: ...

    def answered(self, request: int) -> memoryview | None:
        """Where the bytes of the oldest request belong, all of it; nothing where nobody wants them any more, see ``wanted``."""
        ...

    def wanted(self) -> int:
        """Bytes that the oldest request asked for."""
        ...

    def filled(self) -> None:
        """They are all there."""
        ...

    def unread(self, request: int) -> None:
        """The oldest request asked a region that is closed."""
        ...


class NewsReader:
    """What the owner of regions tells their writer."""

    def __init__(self, peer: str, told: Told) -> None:
        self._peer = peer
        self._told = told
        self._partial = b""
        self._target: memoryview | None = None
        """Where the answer to a read goes; None: nobody wants it."""
        self._at = 0
        self._left = 0
        """Bytes of it that are to come."""

    def received(self, data: Buffer) -> None:
        """The next bytes. Raises ``WireError``."""
        view = memoryview(data)
        at = 0
        while at < len(view):
            if self._left:
                at += self._fill(view[at:])
                continue
            if self._partial or len(view) - at < _NEWS_BYTES:
                more = _NEWS_BYTES - len(self._partial)
                self._partial += view[at : at + more]
                at += more
                if len(self._partial) == _NEWS_BYTES:
                    record, self._partial = self._partial, b""
                    self._take(record, 0)
                continue
            self._take(view, at)
            at += _NEWS_BYTES

    def _fill(self, data: memoryview) -> int:
        """Bytes of an answer that are taken."""
        here = min(self._left, len(data))
        if self._target is not None:
            self._target[self._at : self._at + here] = data[:here]
        self._at += here
        self._left -= here
        if not self._left:
            self._target = None
            self._told.filled()
        return here

    def _take(self, data: bytes | memoryview, at: int) -> None:
        magic, kind, value = NEWS.unpack_from(data, at)
        if magic != NEWS_MAGIC:
            raise WireError(self._peer, f"no news (magic {magic:#x})")
        if kind == NEWS_CREDIT:
            self._told.credit(value)
        elif kind == NEWS_REVOKED:
            self._told.revoked(value)
        elif kind == NEWS_READ:
            self._target = self._told.answered(value)
            self._at, self._left = 0, self._told.wanted()
        elif kind == NEWS_UNREAD:
            self._told.unread(value)
        else:
            raise WireError(self._peer, f"news of an unknown kind {kind}")
