"""Unix sockets under any event loop: exact reads, descriptors passed, honest connects, a listener that survives full tables.

Everything is a non-blocking call plus ``add_reader``/``add_writer``, so asyncio and uvloop behave alike. Deadlines are the
caller's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from afore.core.errors import AuthenticationFailed, ConfigError, HostError, PeerLost
from afore.transport.host import DESCRIPTORS_REMEDY, TABLE_FULL, host_error

_log = logging.getLogger(__name__)

PATH_LIMIT = 107
"""Bytes of a Unix socket's path that ``sockaddr_un`` holds, without the closing zero (unix(7))."""
NAME_LIMIT = 80
"""Bytes of its last component, such that the detour over /proc always fits."""
_FD = struct.Struct("i")
_BACKLOG = 512
_ACCEPTS_PER_WAKE = 64
_RETRY_ACCEPT_S = 0.1
_FULL = (*TABLE_FULL, errno.ENOBUFS, errno.ENOMEM)


@contextmanager
def usable_path(path: str) -> Iterator[str]:
    """``path``, or a short name of the same place where it is too long for a socket. Raises ``ConfigError``, ``OSError``."""
    if len(os.fsencode(path)) <= PATH_LIMIT:
        yield path
        return
    folder, name = os.path.split(path)
    if len(os.fsencode(name)) > NAME_LIMIT:
        raise ConfigError("address", f"{name!r} is too long for a socket's name", f"use at most {NAME_LIMIT} bytes")
    folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder_fd}/{name}"
    finally:
        os.close(folder_fd)


def _new_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise host_error(error, "sockets", "cannot make a socket", "see why the kernel refuses") from error


async def connect_unix(path: str) -> socket.socket:
    """A connected non-blocking socket. Raises ``PeerLost`` where nobody listens, ``HostError`` without permission.

    A full backlog is waited out with growing pauses: a Unix socket answers EAGAIN there and asyncio would take it for connected.
    """
    pause_s = 0.001
    while True:
        sock = _new_socket()
        try:
            with usable_path(path) as usable:
                sock.connect(usable)
            return sock
        except BlockingIOError:
            sock.close()
        except PermissionError as error:
            sock.close()
            raise HostError(path, "no permission to connect", "run all roles as the same user") from error
        except OSError as error:
            sock.close()
            raise PeerLost(
                path, f"nobody listens there ({error.strerror})", "start it first, or check the address"
            ) from error
        except BaseException:
            sock.close()
            raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def somebody_listens(path: str) -> bool:
    """Whether a live process listens at ``path``."""
    with _new_socket() as sock:
        try:
            with usable_path(path) as usable:
                sock.connect(usable)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def _is_dead_socket(path: str) -> bool:
    """Whether ``path`` is what a dead listener left, and not a file of somebody's or a living listener."""
    return stat.S_ISSOCK(os.lstat(path).st_mode) and not somebody_listens(path)


def require_same_user(sock: socket.socket, peer: str, uid: int) -> None:
    """Raises ``AuthenticationFailed`` unless the process at the other end runs as ``uid`` (SO_PEERCRED, unix(7))."""
    _, other_uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if other_uid != uid:
        raise AuthenticationFailed(
            peer, f"it runs as user {other_uid}, this side as {uid}", "run all roles as the same user"
        )


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
                await _ready(sock, writing=False)
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
            await _ready(sock, writing=True)
        except OSError as error:
            raise PeerLost(peer, f"the connection broke ({error.strerror})") from error


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int], peer: str) -> None:
    """Sends a few bytes and ``fds`` in one piece, without waiting: for a fresh connection. Raises ``PeerLost``."""
    try:
        sent = socket.send_fds(sock, [data], fds, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise PeerLost(peer, f"the connection broke ({error.strerror})") from error
    if sent != len(data):
        raise PeerLost(peer, "it does not read its connection")


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)


async def _ready(sock: socket.socket, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    fd = sock.fileno()
    (loop.add_writer if writing else loop.add_reader)(fd, _set_ready, ready)
    try:
        await ready
    finally:
        (loop.remove_writer if writing else loop.remove_reader)(fd)


def _set_ready(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class UnixListener:
    """A listening socket at ``path`` (0600) that hands each accepted, non-blocking socket to ``accepted``.

    A socket file that a dead process left is replaced. Raises ``HostError`` where ``path`` is in use or cannot be made, and
    ``FileNotFoundError`` where its folder is missing.
    """

    def __init__(self, path: str, accepted: Callable[[socket.socket], None]) -> None:
        self.path = path
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._sock: socket.socket | None = _new_socket()
        try:
            self._bind(self._sock)
        except BaseException:
            self._sock.close()
            raise
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _bind(self, sock: socket.socket) -> None:
        try:
            with usable_path(self.path) as usable:
                try:
                    sock.bind(usable)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or not _is_dead_socket(usable):
                        raise
                    os.unlink(usable)
                    sock.bind(usable)
                os.chmod(usable, 0o600)
                sock.listen(_BACKLOG)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise host_error(error, self.path, "cannot listen there", "choose another address") from error

    def _accept(self) -> None:
        assert self._sock is not None
        for _ in range(_ACCEPTS_PER_WAKE):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                # The socket stays readable: without a pause the loop would spin on it.
                _log.error("%s: cannot accept (%s); %s", self.path, error.strerror, DESCRIPTORS_REMEDY)
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
        """Stops listening and removes the socket file. Idempotent."""
        if self._sock is None:
            return
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        with suppress(OSError):
            os.unlink(self.path)
