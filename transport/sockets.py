"""Stream sockets under any event loop: exact reads and sends, descriptors passed, a listener that survives full tables.

Everything is a non-blocking call plus ``add_reader``/``add_writer``, so asyncio and uvloop behave alike. Deadlines are the
caller's. What differs between families is in ``unix_sockets`` and ``tcp_sockets``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence

from afore.core.errors import HostError, PeerLost
from afore.transport.host import DESCRIPTORS_REMEDY, TABLE_FULL, host_error

_log = logging.getLogger(__name__)

BACKLOG = 512
_FD = struct.Struct("i")
_ACCEPTS_PER_WAKE = 64
_RETRY_ACCEPT_S = 0.1
_FULL = (*TABLE_FULL, errno.ENOBUFS, errno.ENOMEM)
_PASSING = (errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""What accept(2) passes on of a connection that broke before it was accepted."""

Accepted = Callable[[socket.socket], None]


def new_socket(family: socket.AddressFamily) -> socket.socket:
    """A non-blocking stream socket. Raises ``HostError``."""
    try:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise host_error(error, "sockets", "cannot make a socket", "see why the kernel refuses") from error


async def receive_exactly(sock: socket.socket, nbytes: int, peer: str) -> bytes:
    """The next ``nbytes`` bytes and not one more. Raises ``PeerLost`` at the end of the stream."""
    data, _ = await receive_with_fds(sock, nbytes, 0, peer)
    return data


async def receive_with_fds(sock: socket.socket, nbytes: int, max_fds: int, peer: str) -> tuple[bytes, list[int]]:
    """The next ``nbytes`` bytes, and the descriptors that came with them; the caller owns those. Raises ``PeerLost``."""
    data = bytearray()
    fds: list[int] = []
    room = socket.CMSG_SPACE(max_fds * _FD.size) if max_fds else 0
    try:
        while len(data) < nbytes:
            try:
                # Not socket.recv_fds: Python 3.11 and 3.12 drop its flags there, and children would inherit the descriptors.
                part, control, flags, _ = sock.recvmsg(nbytes - len(data), room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await ready(sock, writing=False)
                continue
            except OSError as error:
                raise PeerLost(peer, f"the connection broke ({error.strerror})") from error
            fds += _descriptors(control)
            if flags & socket.MSG_CTRUNC:
                raise HostError("file descriptors", f"no room for those that {peer} passed", DESCRIPTORS_REMEDY)
            if not part:
                raise PeerLost(peer, "it ended the connection")
            data += part
    except BaseException:
        close_all(fds)
        raise
    return bytes(data), fds


def _descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, raw in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += [fd for (fd,) in _FD.iter_unpack(raw[: len(raw) // _FD.size * _FD.size])]
    return fds


async def send_all(sock: socket.socket, data: bytes, peer: str) -> None:
    """Sends ``data``. Raises ``PeerLost``."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            await ready(sock, writing=True)
        except OSError as error:
            raise PeerLost(peer, f"the connection broke ({error.strerror})") from error


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int], peer: str) -> None:
    """Sends a few bytes and ``fds`` in one piece, without waiting: for a fresh connection. Raises ``PeerLost``."""
    try:
        sent = socket.send_fds(sock, [data], fds, socket.MSG_NOSIGNAL) if fds else sock.send(data, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise PeerLost(peer, f"the connection broke ({error.strerror})") from error
    if sent != len(data):
        raise PeerLost(peer, "it does not read its connection")


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)


async def ready(sock: socket.socket, *, writing: bool) -> None:
    """Waits until ``sock`` can be read, or written."""
    loop = asyncio.get_running_loop()
    is_ready: asyncio.Future[None] = loop.create_future()
    fd = sock.fileno()
    (loop.add_writer if writing else loop.add_reader)(fd, _set_ready, is_ready)
    try:
        await is_ready
    finally:
        (loop.remove_writer if writing else loop.remove_reader)(fd)


def _set_ready(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class Listener:
    """A listening socket that hands each accepted, non-blocking socket to ``accepted``."""

    def __init__(self, address: str, sock: socket.socket, accepted: Accepted) -> None:
        """Owns ``sock``, which listens at ``address``, from now on."""
        self.address = address
        self._sock: socket.socket | None = sock
        self._accepted = accepted
        self.pauses = 0
        """How often nobody could be accepted, for want of descriptors or memory."""
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._sock is not None
        for _ in range(_ACCEPTS_PER_WAKE):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _PASSING:
                    continue
                if error.errno not in _FULL:
                    raise
                # The socket stays readable: without a pause the loop would spin on it.
                self.pauses += 1
                # It may stay so for long, and a line for each look would fill the log.
                if self.pauses & (self.pauses - 1) == 0:
                    why = error.strerror
                    _log.error(
                        "%s: cannot accept (%s, %d times so far); %s",
                        self.address,
                        why,
                        self.pauses,
                        DESCRIPTORS_REMEDY,
                    )
                self._loop.remove_reader(self._sock.fileno())
                self._retry = self._loop.call_later(_RETRY_ACCEPT_S, self._resume)
                return
            sock.setblocking(False)
            self._accepted(sock)

    def _resume(self) -> None:
        self._retry = None
        if self._sock is not None:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Stops listening. Idempotent."""
        if self._sock is None:
            return
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        self._left()

    def _left(self) -> None:
        """What else is to be done once nobody listens any more."""
