"""Unix sockets: long paths, honest connects, a listener that replaces what dead ones left, and who is at the other end."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from afore.core.errors import AuthenticationFailed, ConfigError, HostError, PeerLost
from afore.transport.host import host_error
from afore.transport.sockets import BACKLOG, Accepted, Listener, new_socket

PATH_LIMIT = 107
"""Bytes of a Unix socket's path that ``sockaddr_un`` holds, without the closing zero (unix(7))."""
NAME_LIMIT = 80
"""Bytes of its last component, such that the detour over /proc always fits."""


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


async def connect_unix(path: str) -> socket.socket:
    """A connected non-blocking socket. Raises ``PeerLost`` where nobody listens, ``HostError`` without permission.

    A full backlog is waited out with growing pauses: a Unix socket answers EAGAIN there and asyncio would take it for connected.
    """
    pause_s = 0.001
    while True:
        sock = new_socket(socket.AF_UNIX)
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
    with new_socket(socket.AF_UNIX) as sock:
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


class UnixListener(Listener):
    """Listens at the path ``address`` (0600).

    A socket file that a dead process left is replaced. Raises ``HostError`` where the path is in use or cannot be made, and
    ``FileNotFoundError`` where its folder is missing.
    """

    def __init__(self, address: str, accepted: Accepted) -> None:
        sock = new_socket(socket.AF_UNIX)
        try:
            _bind(sock, address)
        except BaseException:
            sock.close()
            raise
        super().__init__(address, sock, accepted)

    def _left(self) -> None:
        with suppress(OSError):
            os.unlink(self.address)


def _bind(sock: socket.socket, path: str) -> None:
    try:
        with usable_path(path) as usable:
            try:
                sock.bind(usable)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not _is_dead_socket(usable):
                    raise
                os.unlink(usable)
                sock.bind(usable)
            os.chmod(usable, 0o600)
            sock.listen(BACKLOG)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise host_error(error, path, "cannot listen there", "choose another address") from error
