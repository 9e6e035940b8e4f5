"""Where streams lead: an address with a slash is a Unix socket's path, any other is ``HOST:PORT``."""

from __future__ import annotations

import os
import socket

from afore.core.link_options import TcpOptions
from afore.transport.sockets import Accepted, Listener
from afore.transport.tcp_sockets import TcpListener, connect_tcp
from afore.transport.unix_sockets import UnixListener, connect_unix, require_same_user


def is_path(address: str) -> bool:
    """Whether ``address`` is a Unix socket's path."""
    return "/" in address


def listen_stream(address: str, accepted: Accepted, tuning: TcpOptions) -> Listener:
    """A listener at ``address``. Raises as ``UnixListener`` and ``TcpListener`` do."""
    return UnixListener(address, accepted) if is_path(address) else TcpListener(address, accepted, tuning)


async def connect_stream(address: str, tuning: TcpOptions) -> socket.socket:
    """A connected non-blocking socket; to a path only where the same user listens.

    Raises ``PeerLost`` (nobody there), ``AuthenticationFailed`` (another user), ``HostError``, ``ConfigError``.
    """
    if not is_path(address):
        return await connect_tcp(address, tuning)
    sock = await connect_unix(address)
    try:
        require_same_user(sock, address, os.geteuid())
    except BaseException:
        sock.close()
        raise
    return sock
