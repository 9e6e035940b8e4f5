"""Links of the tcp fabric: ``TcpLink`` sends frames, ``TcpInbound`` is what the owner of the regions keeps for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from afore.core.clock import deadline
from afore.core.errors import LinkClosed, PeerLost, TransportError, WireError
from afore.transport.api import Buffer, Lane, Notification, RegionKey
from afore.transport.buffers import flat, refuse_bounds, refuse_foreign, require_immediate, revoked
from afore.transport.queues import Inbox, Turnstile
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
from afore.transport.tcp_frames import FrameReader, NewsReader
from afore.transport.tcp_reads import Reads
from afore.transport.tcp_stream import SendStream

LINGER_S = 1.0
"""How long ``close`` waits for the peer to take what was written."""
_READS_PER_WAKE = 16
"""Reads of one link before others have their turn."""
_NEWS_ROOM = 64 << 10
NEWS_LIMIT = 1 << 16
"""Pieces of news that a writer may leave unread beside what its kernel holds; one that keeps the rules stays far below."""
_REMEMBERED = 4096
"""Closed regions that a writer remembers."""


class Grant:
    """A region that a link may write into: the key, once it is proven genuine, and its token's number."""

    __slots__ = ("key", "number")

    def __init__(self, key: RegionKey, number: int) -> None:
        self.key = key
        self.number = number


class TcpLink:
    """A ``Link`` to the regions of another endpoint."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: str,
        lane: Lane,
        credits: int,
        unsent_limit: int,
        prove: Callable[[RegionKey, str], int],
        forget: Callable[[TcpLink], None],
    ) -> None:
        """Owns ``sock`` from now on. ``prove`` gives the number of a genuine key, or raises ``AccessRefused``."""
        self._peer = peer
        self._lane = lane
        self._credits = self._credit_limit = credits
        self._unsent_limit = unsent_limit
        self._prove = prove
        self._forget = forget
        self._grants: dict[str, Grant] = {}
        self._tokens: dict[int, str] = {}
        self._over: dict[int, None] = {}
        """Numbers of regions that there are no more: the latest, for the owner says it again to who asks for an older one."""
        self._turnstile = Turnstile()
        self._ending: Callable[[], TransportError] | None = None
        self._closed = False
        self._reads = Reads(peer, self._check)
        self._news = NewsReader(peer, self)
        self._room = memoryview(bytearray(_NEWS_ROOM))
        self._stream = SendStream(sock, peer, readable=self._on_readable, room=self._turnstile.poke)

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def lane(self) -> Lane:
        return self._lane

    async def write(
        self, remote: RegionKey, offset: int, data: Buffer, *, notify: int | None = None, timeout_us: float
    ) -> None:
        if self._ending is not None:
            raise self._ending()
        grant = self._grants.get(remote.token)
        if grant is None or (grant.key is not remote and grant.key != remote):
            grant = self._reach(remote)
        if type(data) is not bytes:
            data = flat(data, self._peer)
            if type(data) is memoryview and not data.c_contiguous:
                data = bytes(data)
        nbytes = len(data)
        if offset < 0 or offset + nbytes > remote.nbytes:
            raise refuse_bounds(remote, offset, nbytes)
        if notify is not None and notify >> 32:
            require_immediate(notify, self._peer)
        crowded = self._turnstile.line or self._stream.queued_bytes >= self._unsent_limit
        if crowded or (notify is not None and self._credits <= 0):
            await self._wait_turn(remote, grant, notify is not None, timeout_us)
        # From here on nothing suspends: the frame goes out whole, or the link ends.
        head = FRAME.pack(
            FRAME_MAGIC,
            0 if notify is None else FRAME_NOTIFIES,
            remote.region,
            notify or 0,
            grant.number,
            offset,
            nbytes,
        )
        self._send(head, data)
        if notify is not None:
            self._credits -= 1

    async def read(self, remote: RegionKey, offset: int, into: memoryview, *, timeout_us: float) -> None:
        if self._ending is not None:
            raise self._ending()
        grant = self._grants.get(remote.token)
        if grant is None or (grant.key is not remote and grant.key != remote):
            grant = self._reach(remote)
        if offset < 0 or offset + len(into) > remote.nbytes:
            raise refuse_bounds(remote, offset, len(into))
        number = grant.number

        def ask(at: int, nbytes: int, request: int) -> None:
            if number in self._over:
                raise revoked(remote)
            self._send(FRAME.pack(FRAME_MAGIC, FRAME_READS, remote.region, request, number, at, nbytes), b"")

        operation = f"read of region {remote.region} on lane {self._lane.name.lower()}"
        async with deadline(timeout_us, peer=self._peer, operation=operation, hint="its owner does not answer"):
            await self._reads.read(offset, into, ask, lambda: revoked(remote))

    def _check(self) -> None:
        if self._ending is not None:
            raise self._ending()

    def _send(self, head: bytes, data: Buffer) -> None:
        try:
            self._stream.send(head, data)
        except PeerLost as error:
            self._lose(error)
            raise

    def answered(self, request: int) -> memoryview | None:
        """As ``Told.answered``."""
        return self._reads.answered(request)

    def wanted(self) -> int:
        """As ``Told.wanted``."""
        return self._reads.wanted()

    def filled(self) -> None:
        """As ``Told.filled``."""
        self._reads.filled()

    def unread(self, request: int) -> None:
        """As ``Told.unread``."""
        self._reads.unread(request)

    def _may_go(self, needs_credit: bool) -> bool:
        if self._ending is not None:
            raise self._ending()
        return self._stream.queued_bytes < self._unsent_limit and (not needs_credit or self._credits > 0)

    async def _wait_turn(self, remote: RegionKey, grant: Grant, needs_credit: bool, timeout_us: float) -> None:
        def may_go() -> bool:
            room = self._may_go(needs_credit)
            if self._grants.get(remote.token) is not grant:
                raise revoked(remote)
            return room

        crowded = self._stream.queued_bytes >= self._unsent_limit
        why = "it does not read" if crowded else "no credit for a notification"
        await self._turnstile.enter(
            may_go,
            timeout_us,
            peer=self._peer,
            what=f"write to region {remote.region} on lane {self._lane.name.lower()}: {why}",
            hint="its owner stands still" if crowded else "its owner does not take its notifications",
        )

    def _reach(self, remote: RegionKey) -> Grant:
        """Proves a key that this link has not seen. Raises ``AccessRefused``, ``RegionRevoked``."""
        number = self._prove(remote, self._peer)
        if remote.token in self._grants:
            raise refuse_foreign(remote, self._peer, "does not match the key that was used before")
        if number in self._over:
            raise revoked(remote)
        grant = Grant(remote, number)
        self._grants[remote.token] = grant
        self._tokens[number] = remote.token
        return grant

    # What the owner tells

    def credit(self, count: int) -> None:
        """Notifications were taken."""
        if count > self._credit_limit - self._credits:
            raise WireError(self._peer, f"it gives back {count} credits of {self._credit_limit - self._credits}")
        self._credits += count

    def revoked(self, token: int) -> None:
        """A region was closed, or never was in this life of its owner."""
        self._over[token] = None
        if len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]
        text = self._tokens.pop(token, None)
        if text is not None:
            del self._grants[text]

    def _on_readable(self) -> None:
        try:
            received = self._stream.receive_into(self._room)
            if not received:
                return
            if not self._closed:
                self._news.received(self._room[:received])
        except TransportError as error:
            self._lose(error)
        self._turnstile.poke()

    def _lose(self, error: TransportError) -> None:
        if self._ending is None:
            self._ending = lambda: type(error)(error.peer, error.operation, error.hint)
        self._reads.ended()
        self._stream.close()
        self._turnstile.poke()

    # The end

    async def close(self) -> None:
        """Ends waiting writers; what was written arrives, where the peer takes it within ``LINGER_S``. Idempotent."""
        if not self._closed:
            self._closed = True
            self._ending = lambda: LinkClosed(self._peer, "the link was closed on this side", "connect again")
            self._turnstile.poke()
            self._reads.ended()
            self._grants.clear()
            self._tokens.clear()
            self._stream.finish()
        try:
            if self._stream.open:
                await asyncio.wait([self._stream.gone], timeout=LINGER_S)
        finally:
            self._stream.close()
            self._forget(self)


class Owned(Protocol):
    """A region of this endpoint, as an inbound link sees it."""

    number: int
    inbox: Inbox

    @property
    def memory(self) -> memoryview: ...


class TcpInbound:
    """The owner's side of one link: receives into regions, tells of credit and of regions that end."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: str,
        credits: int,
        regions: dict[int, Owned],
        forget: Callable[[TcpInbound, str], None],
    ) -> None:
        """Owns ``sock`` from now on. ``regions`` are the open ones of the endpoint, now and later."""
        self._peer = peer
        self._credits = credits
        self._regions = regions
        self._forget = forget
        self._out = 0
        """Notifications whose credit the writer does not have back."""
        self._many = -(-credits // 2)
        self._owed = 0
        """Those of them that were taken."""
        self._reader = FrameReader(peer, self)
        self._stream = SendStream(sock, peer, readable=self.look, room=lambda: None)

    @property
    def peer(self) -> str:
        """Address of the endpoint that writes."""
        return self._peer

    # What frames do

    def find(self, region: int, token: int) -> memoryview | None:
        """As ``Landing.find``. Raises ``WireError`` for a writer that never reads what it is told."""
        owned = self._regions.get(region)
        if owned is not None and owned.number == token:
            return owned.memory
        if self._stream.queued_pieces >= NEWS_LIMIT:
            raise WireError(self._peer, "it goes on with regions that are closed, and does not read that they are")
        self._tell(NEWS_REVOKED, token)
        return None

    def told(self, region: int, immediate: int) -> None:
        """As ``Landing.told``."""
        self._count_one()
        self._regions[region].inbox.put(Notification(self._peer, immediate), self)

    def dropped(self) -> None:
        """As ``Landing.dropped``."""
        self._count_one()
        self.give_back(1)

    def asked(self, memory: memoryview | None, request: int) -> None:
        """As ``Landing.asked``."""
        if memory is None:
            self._tell(NEWS_UNREAD, request)
        elif self._stream.open:
            if self._stream.queued_bytes > READ_LIMIT:
                raise WireError(self._peer, "it asks for more without taking what it was sent")
            with suppress(PeerLost):  # reading says so too, after what is still there
                self._stream.send(NEWS.pack(NEWS_MAGIC, NEWS_READ, request), memory)

    def _count_one(self) -> None:
        self._out += 1
        if self._out > self._credits:
            raise WireError(self._peer, f"it notifies without credit, having {self._credits}")

    def give_back(self, count: int) -> None:
        """Credit for what was taken: told at once to a writer that may be short of it, later to one that is not."""
        self._owed += count
        if self._out >= self._many:
            self._settle()

    def _settle(self) -> None:
        owed, self._owed = self._owed, 0
        self._out -= owed
        self._tell(NEWS_CREDIT, owed)

    def revoke(self, region: int, token: int) -> None:
        """A region is closed: nothing lands in it any more, and the writer hears of it before anything else."""
        self._reader.revoke(region)
        self._tell(NEWS_REVOKED, token)

    def _tell(self, kind: int, value: int) -> None:
        if self._stream.open:
            with suppress(PeerLost):  # reading says so too, after what is still there
                self._stream.send(NEWS.pack(NEWS_MAGIC, kind, value))

    def look(self) -> None:
        """Receives what is there, at most some reads of it."""
        ending: TransportError | None = None
        reader, stream = self._reader, self._stream
        try:
            for _ in range(_READS_PER_WAKE):
                room = reader.room()
                received = stream.receive_into(room)
                if received:
                    reader.received(received)
                if received < len(room):
                    break
            if self._owed and self._out >= self._many:
                self._settle()
        except TransportError as error:
            ending = error
        if ending is not None:
            self.close(type(ending).__name__ if isinstance(ending, WireError) else "")

    def close(self, complaint: str = "") -> None:
        """Ends the link at once; its writer gets ``PeerLost``. Idempotent."""
        if self._stream.open:
            self._stream.close()
            self._forget(self, complaint)


def close_inbound(links: Iterable[TcpInbound]) -> None:
    """Closes all of ``links``."""
    for link in list(links):
        link.close()
