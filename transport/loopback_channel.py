"""Control channels of the loopback fabric: encoded and limited as on any other, so that what works here works there."""

from __future__ import annotations

from collections.abc import Callable

from afore.core.clock import Clock
from afore.core.errors import LinkClosed, PeerLost
from afore.transport.codec import decode_message, encode_message
from afore.transport.loopback_faults import Wire
from afore.transport.loopback_sky import Airway, Sky
from afore.transport.queues import Arrivals, Turnstile

UNREAD_LIMIT = 256 << 10
"""Bytes that may be under way or unread before a sender waits; one message may go beyond, whatever its size."""


class LoopbackChannel(Airway):
    """One end of a ``Channel``. Made in pairs by ``channel_pair``."""

    def __init__(self, peer: str, *, limit: int, clock: Clock, sky: Sky, wire: Wire | None) -> None:
        self._peer = peer
        self._limit = limit
        self._clock = clock
        super().__init__(sky)
        self._wire = wire
        self._arrivals: Arrivals[bytes] = Arrivals(peer, "control message")
        self._turnstile = Turnstile()
        self._unread_bytes = 0
        self._other: LoopbackChannel
        self._lost = ""
        self.closed = False
        self.on_close: Callable[[LoopbackChannel], None] | None = None

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: dict[str, object], *, timeout_us: float) -> None:
        self._require_open()
        body = encode_message(message, limit=self._limit, peer=self._peer)
        if self._turnstile or not self._has_room():
            await self._turnstile.enter(
                self._has_room,
                timeout_us,
                peer=self._peer,
                what="send of a control message",
                hint="it does not read its messages",
            )
        self._other._unread_bytes += len(body)
        self._carry(body)

    async def receive(self, *, timeout_us: float | None) -> dict[str, object]:
        if self.closed:
            raise self._closed_error()
        await self._arrivals.ready(timeout_us)
        body = self._arrivals.items.popleft()
        self._arrivals.wake()
        self._unread_bytes -= len(body)
        self._other._turnstile.poke()
        return decode_message(body, limit=self._limit, peer=self._peer)

    async def close(self) -> None:
        self.shut()

    def shut(self) -> None:
        """Closes this end: the other reads what was sent, then ``PeerLost``. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if not self._lost:
            self._carry(None)
        self._arrivals.items.clear()
        self._arrivals.end(self._closed_error)
        self._other._turnstile.poke()
        self._turnstile.poke()
        if self.on_close is not None:
            self.on_close(self)

    def lose(self, reason: str) -> None:
        """The endpoint at either side died: what is under way is lost, what arrived can be read."""
        for end in (self, self._other):
            end._lost = end._lost or reason
            end.cut()
            end._arrivals.end(end._lost_error)
            end._turnstile.poke()

    def _carry(self, body: bytes | None) -> None:
        """Sends a message, or the end of the stream, to the other end."""
        if self._wire is None:
            self._other._arrive(body)
            return
        now_ns = self._clock.now_ns()
        flight = self._wire.fly(now_ns, len(body or b""))
        self.fly(flight.lands_ns, now_ns, body)

    def land(self, flight: bytes | None) -> None:
        self._other._arrive(flight)

    def _arrive(self, body: bytes | None) -> None:
        if body is None:
            self._lost = self._lost or "it closed the channel"
            self._arrivals.end(self._lost_error)
            self._turnstile.poke()
        elif not self.closed:
            self._arrivals.items.append(body)
            self._arrivals.wake()

    def _has_room(self) -> bool:
        self._require_open()
        return self._other._unread_bytes < UNREAD_LIMIT

    def _require_open(self) -> None:
        if self.closed:
            raise self._closed_error()
        if self._lost:
            raise self._lost_error()

    def _closed_error(self) -> LinkClosed:
        return LinkClosed(self._peer, "the channel was closed on this side", "dial again")

    def _lost_error(self) -> PeerLost:
        return PeerLost(self._peer, self._lost, "dial again when it is back")


def channel_pair(
    near: str, far: str, *, limit: int, clock: Clock, sky: Sky, wires: tuple[Wire | None, Wire | None]
) -> tuple[LoopbackChannel, LoopbackChannel]:
    """The ends of one channel: that of ``near`` and that of ``far``, with the wire of each direction."""
    near_end = LoopbackChannel(far, limit=limit, clock=clock, sky=sky, wire=wires[0])
    far_end = LoopbackChannel(near, limit=limit, clock=clock, sky=sky, wire=wires[1])
    near_end._other, far_end._other = far_end, near_end
    return near_end, far_end
