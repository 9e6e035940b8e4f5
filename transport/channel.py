"""``StreamChannel``: control messages over a stream socket (Unix or TCP), after the handshake.

A message is a 4-byte little-endian length and a msgpack map. Reading and sending are each bounded: the socket is not read while
messages lie unread, and a sender waits until the kernel has taken what went before, so memory holds one message more than
the limits.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable
from typing import cast

from afore.core.errors import LinkClosed, PeerLost, PeerUnreachable, TransportError, WireError
from afore.transport.codec import MESSAGE_LIMIT, decode_message, encode_message
from afore.transport.queues import Arrivals, Turnstile

_LENGTH = struct.Struct("<I")
UNREAD_LIMIT = 256 << 10
"""Bytes of unread messages, each with ``MESSAGE_BYTES``, at which the socket is no longer read."""
MESSAGE_BYTES = 64
"""What a message takes beside its bytes: those of no bytes fill a queue too."""
UNSENT_LIMIT = 256 << 10
"""Bytes not yet taken by the kernel at which a sender waits."""
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
"""What a kernel says of a peer that it has not heard of: a process that ends has its kernel say so."""
LINGER_S = 1.0
"""How long ``close`` waits for a peer to take what was sent."""


class StreamChannel(asyncio.Protocol):
    """A ``Channel`` over a connected socket. Made by ``over``."""

    def __init__(self, peer: str, *, limit: int = MESSAGE_LIMIT) -> None:
        self._peer = peer
        self._limit = limit
        self._transport: asyncio.Transport
        self._connected = False
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._partial = bytearray()
        self._unread_bytes = 0
        self._reading = True
        self._arrivals: Arrivals[bytes] = Arrivals(peer, "control message")
        self._turnstile = Turnstile()
        self._writable = True
        self._broken: TransportError | None = None
        self._closed = False
        self._half_closes = False
        self.on_gone: Callable[[StreamChannel], None] | None = None
        """Called once when the connection no longer exists."""

    @classmethod
    async def over(cls, sock: socket.socket, *, peer: str, limit: int = MESSAGE_LIMIT) -> StreamChannel:
        """A channel over ``sock`` (connected, non-blocking, greeted), which it owns from now on, also when this raises."""
        channel = cls(peer, limit=limit)
        channel._half_closes = sock.family != socket.AF_UNIX
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, sock)
        except BaseException:
            if channel._connected:
                channel._transport.abort()
            else:
                sock.close()
            raise
        return channel

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: dict[str, object], *, timeout_us: float) -> None:
        """As ``Channel.send``. What raises ``DeadlineExceeded`` has sent nothing: the message can be sent again."""
        self._require_open()
        body = encode_message(message, limit=self._limit, peer=self._peer)
        if self._turnstile or not self._writable:
            await self._turnstile.enter(
                self._has_room,
                timeout_us,
                peer=self._peer,
                what="send of a control message",
                hint="it does not read its messages",
            )
        self._transport.write(_LENGTH.pack(len(body)) + body)

    async def receive(self, *, timeout_us: float | None) -> dict[str, object]:
        if self._closed:
            raise self._closed_error()
        await self._arrivals.ready(timeout_us)
        body = self._arrivals.items.popleft()
        self._arrivals.wake()
        self._unread_bytes -= len(body) + MESSAGE_BYTES
        self._read_on()
        return decode_message(body, limit=self._limit, peer=self._peer)

    async def close(self) -> None:
        """Closes this end once the peer's kernel took what was sent, at the latest after ``LINGER_S``. Idempotent."""
        if not self._closed:
            self._closed = True
            self._arrivals.items.clear()
            self._arrivals.end(self._closed_error)
            self._turnstile.poke()
            self._hang_up()
        if not self._gone.done():
            try:
                await asyncio.wait([self._gone], timeout=LINGER_S)
            finally:
                self._transport.abort()
            await asyncio.wait([self._gone])

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._connected = True
        self._transport.set_write_buffer_limits(high=UNSENT_LIMIT)

    def data_received(self, data: bytes) -> None:
        partial = self._partial
        partial += data
        begin = 0
        while len(partial) - begin >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(partial, begin)
            if nbytes > self._limit:
                self._break(
                    WireError(self._peer, f"a message of {nbytes:,} bytes is over the limit of {self._limit:,}")
                )
                partial.clear()
                self._transport.abort()
                return
            end = begin + _LENGTH.size + nbytes
            if end > len(partial):
                break
            if not self._closed:
                self._arrivals.items.append(bytes(partial[begin + _LENGTH.size : end]))
                self._unread_bytes += nbytes + MESSAGE_BYTES
                self._arrivals.wake()
            begin = end
        del partial[:begin]
        if self._unread_bytes >= UNREAD_LIMIT and self._reading:
            self._reading = False
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        inside = f", {len(self._partial)} bytes into a message" if self._partial else ""
        self._break(PeerLost(self._peer, f"it ended the channel{inside}", "dial again when it is back"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"the connection broke ({exc})" if exc else "the connection ended"
        silent = isinstance(exc, OSError) and exc.errno in _UNREACHABLE
        lost = PeerUnreachable if silent else PeerLost
        self._break(lost(self._peer, why, "dial again when it is back"))
        if not self._gone.done():
            self._gone.set_result(None)
        if self.on_gone is not None:
            self.on_gone(self)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._turnstile.poke()

    # State

    def _hang_up(self) -> None:
        if self._half_closes and not self._transport.is_closing():
            # TCP answers a close with unread messages by a reset, which may overtake what was sent: what still comes is read and
            # dropped until the peer has read our end.
            self._transport.write_eof()
            self._unread_bytes = 0
            self._read_on()
        else:
            self._transport.close()

    def _read_on(self) -> None:
        if not self._reading and self._unread_bytes < UNREAD_LIMIT and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def _break(self, error: TransportError) -> None:
        if self._broken is None:
            self._broken = error
            self._arrivals.end(self._broken_error)
            self._turnstile.poke()

    def _has_room(self) -> bool:
        self._require_open()
        return self._writable

    def _require_open(self) -> None:
        if self._closed:
            raise self._closed_error()
        if self._broken is not None:
            raise self._broken_error()

    def _broken_error(self) -> TransportError:
        assert self._broken is not None
        return type(self._broken)(self._broken.peer, self._broken.operation, self._broken.hint)

    def _closed_error(self) -> LinkClosed:
        return LinkClosed(self._peer, "the channel was closed on this side", "dial again")
