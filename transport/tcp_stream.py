"""A connected socket whose sends never wait: what the kernel does not take is kept, in order, and follows by itself.

Whoever sends looks at ``queued_bytes`` first, so that what is kept is bounded. Non-blocking calls plus ``add_reader`` and
``add_writer``: the same under asyncio and uvloop, one system call for a small write.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from afore.core.errors import PeerLost
from afore.transport.api import Buffer
from afore.transport.tcp_spill import Spill

_PARTS = 64
"""Kept pieces that go into one system call."""
_GONE = "its process or endpoint is gone"


class SendStream:
    """One connection. ``readable`` is called when there is something to receive, its end included; ``room`` when all was taken."""

    def __init__(
        self, sock: socket.socket, peer: str, *, readable: Callable[[], None], room: Callable[[], None]
    ) -> None:
        """Owns ``sock`` from now on."""
        self._sock = sock
        self._fd = sock.fileno()
        self._peer = peer
        self._room = room
        self._queue: deque[memoryview] = deque()
        self._spill = Spill()
        self.queued_bytes = 0
        """Bytes that the kernel has not taken."""
        self._finishing = False
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the socket is closed."""
        self._loop.add_reader(self._fd, readable)

    @property
    def queued_pieces(self) -> int:
        """Pieces that the kernel has not taken: small ones hold many times their bytes in memory."""
        return len(self._queue)

    @property
    def open(self) -> bool:
        """Whether the socket is."""
        return not self.gone.done()

    def send(self, head: bytes, body: Buffer = b"") -> None:
        """Sends both in one piece; both may be reused afterwards. Raises ``PeerLost``, and nothing more goes out then."""
        if self._queue:
            self._keep(head)
            if body:
                self._keep(body)
            return
        try:
            sent = self._sock.sendmsg((head, body) if body else (head,), (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self.lost(error) from error
        if sent == len(head) + len(body):
            return
        if sent < len(head):
            self._keep(head[sent:])
            sent = len(head)
        if body:
            self._keep(memoryview(body)[sent - len(head) :])
        self._loop.add_writer(self._fd, self._flush)

    def _keep(self, data: Buffer) -> None:
        # A copy: the caller may reuse its memory, and a cancelled caller cannot leave half a frame behind.
        kept = self._spill.copy(data)
        self._queue.append(kept)
        self.queued_bytes += len(kept)

    def _flush(self) -> None:
        queue = self._queue
        try:
            sent = self._sock.sendmsg([queue[at] for at in range(min(len(queue), _PARTS))], (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:
            # The reading side hears of the same end, and says so.
            self._drop_queue()
            return
        self.queued_bytes -= sent
        while sent:
            first = queue[0]
            if sent < len(first):
                queue[0] = first[sent:]
                break
            sent -= len(first)
            self._spill.done(queue.popleft())
        if not queue:
            self._loop.remove_writer(self._fd)
            if self._finishing:
                self._shut_writing()
        self._room()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self.queued_bytes = 0
        self._loop.remove_writer(self._fd)

    def receive_into(self, room: memoryview) -> int:
        """Bytes received; 0 where none are there now. Raises ``PeerLost`` at the end of the stream."""
        try:
            received = self._sock.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.lost(error) from error
        if not received:
            raise PeerLost(self._peer, _GONE, "wait for the next epoch and connect again")
        return received

    def lost(self, error: OSError) -> PeerLost:
        """The error for a connection that broke."""
        why = os.strerror(error.errno) if error.errno else str(error)
        return PeerLost(self._peer, f"{_GONE} ({why})", "wait for the next epoch and connect again")

    def finish(self) -> None:
        """Nothing more is sent: the peer reads an end after what is kept. Idempotent."""
        if not self._finishing and self.open:
            self._finishing = True
            if not self._queue:
                self._shut_writing()

    def _shut_writing(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def close(self) -> None:
        """Closes the socket at once; what is kept is lost. Idempotent."""
        if self.open:
            self._loop.remove_reader(self._fd)
            if self._queue:
                self._drop_queue()
            self._sock.close()
            self.gone.set_result(None)
