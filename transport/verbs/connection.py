"""One end of a verbs link: its queue pair in the event loop, and the stream beside it that says who is gone and what is revoked.

Completions come through the channel's descriptor: take the event, arm, then drain, so that none is lost and none is waited for. The
stream carries fixed messages only; a peer that does not read them, or sends what is none, loses the link.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from afore.core.errors import TransportError
from afore.transport.verbs.binding import Completion, QueuePair
from afore.transport.verbs.status import SUCCESS
from afore.transport.verbs.wire import FRAME_BYTES, EndpointRecord, Frame, message_bytes, unpack_message

BATCH = 64
"""Completions that one poll takes."""
ROUNDS = 16
"""Polls of one turn; what is left then waits for the next turn, so that a flood does not hold up the loop."""
_FRAMES_AT_ONCE = 64


class Side(Protocol):
    """What a connection tells the link that it serves."""

    def on_completions(self, batch: list[Completion]) -> None:
        """Requests and receives that succeeded, in their order. Raises ``TransportError`` to end the link."""
        ...

    def on_failure(self, number: int, status: int) -> None:
        """The first request or receive that failed; ``on_end`` follows unless this has closed the connection."""
        ...

    def on_message(self, message: Frame | EndpointRecord) -> None:
        """Raises ``TransportError`` to end the link."""
        ...

    def on_drained(self) -> None:
        """After a batch of turns: time to wake who waits."""
        ...

    def on_end(self, error: TransportError | None, reason: str) -> None:
        """The link is over: ``error`` where the peer misbehaved, else ``reason`` in words. Called at most once."""
        ...


class Connection:
    """Owns a queue pair and a socket. ``start`` it, ``close`` it."""

    def __init__(self, sock: socket.socket, pair: QueuePair, side: Side, *, peer: str) -> None:
        self.pair = pair
        self.peer = peer
        self._sock = sock
        self._side = side
        self._loop = asyncio.get_running_loop()
        self._partial = bytearray()
        self._pair_open = True
        self._sock_open = True
        self._started = False
        self._failed = False

    def start(self) -> None:
        """Begins to look at both descriptors; the queue pair is connected or will be."""
        self._started = True
        self._loop.add_reader(self._sock.fileno(), self._on_stream)
        self._loop.add_reader(self.pair.fd, self._on_event)
        self.pair.arm()

    # Completions

    def _on_event(self) -> None:
        try:
            self.pair.take_event()
        except OSError:
            return  # woken for nothing
        self.pair.arm()
        self.drain()

    def drain(self) -> None:
        """Handles every completion that is there. Never waits."""
        poll, side = self.pair.poll, self._side
        for _ in range(ROUNDS):
            batch = poll(BATCH)
            if not batch:
                break
            good = batch
            for place, one in enumerate(batch):
                if one[1] != SUCCESS:
                    good = batch[:place]
                    break
            try:
                if good:
                    side.on_completions(good)
                if good is not batch and self._pair_open and not self._failed:
                    self._failed = True
                    side.on_failure(batch[len(good)][0], batch[len(good)][1])
            except TransportError as error:
                self._end(error, str(error))
            if not self._pair_open:
                return
            if len(batch) < BATCH:
                break
        else:
            self._loop.call_soon(self._drain_on)
        side.on_drained()

    def _drain_on(self) -> None:
        if self._pair_open:
            self.drain()

    # The stream

    def send(self, message: Frame | EndpointRecord) -> None:
        """Sends a message at once. A peer that has left thousands unread loses the link."""
        if not self._sock_open:
            return
        raw = message.pack()
        try:
            sent = self._sock.send(raw, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._end(None, f"the connection broke ({error.strerror})")
            return
        if sent != len(raw):
            self._end(None, "it does not read its connection")

    def _on_stream(self) -> None:
        try:
            data = self._sock.recv(_FRAMES_AT_ONCE * FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(None, f"the connection broke ({error.strerror})")
            return
        if not data:
            self._end(None, "its process or endpoint is gone")
            return
        self._partial += data
        try:
            while self._partial and self._sock_open:
                need = message_bytes(self._partial[0], self.peer)
                if len(self._partial) < need:
                    return
                raw = bytes(self._partial[:need])
                del self._partial[:need]
                self._side.on_message(unpack_message(raw, self.peer))
        except TransportError as error:
            self._end(error, str(error))

    # The end

    def _end(self, error: TransportError | None, reason: str) -> None:
        if self._sock_open:
            self._hang_up()
            self._side.on_end(error, reason)

    def _hang_up(self) -> None:
        if self._sock_open:
            self._sock_open = False
            if self._started:
                self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    @property
    def usable(self) -> bool:
        """Whether the queue pair still exists."""
        return self._pair_open

    def close(self) -> None:
        """Ends both without a word to the side. Idempotent."""
        self._hang_up()
        if self._pair_open:
            self._pair_open = False
            if self._started:
                self._loop.remove_reader(self.pair.fd)
            self.pair.close()
