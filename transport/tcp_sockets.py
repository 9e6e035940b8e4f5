"""TCP sockets: ``HOST:PORT`` (IPv6 in brackets), connects that do not block the loop, listeners, keep-alive."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from afore.core.errors import ConfigError, HostError, PeerLost
from afore.core.link_options import TcpOptions
from afore.core.topology import is_loopback, join_address, split_address
from afore.transport.host import host_error
from afore.transport.sockets import BACKLOG, Accepted, Listener, new_socket, ready

EXAMPLE = "127.0.0.1:29600"
_SocketAddress = tuple[str, int] | tuple[str, int, int, int]
_Target = tuple[socket.AddressFamily, _SocketAddress]


def tune(sock: socket.socket, options: TcpOptions) -> None:
    """Sets the options; small writes leave at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, options.keepalive_idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, options.keepalive_interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, options.keepalive_probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, options.unacknowledged_ms)


def require_secret(address: str, secret: bytes | None) -> None:
    """Raises ``ConfigError`` where others can reach ``address`` (``HOST:PORT``, or a path) and there is no secret."""
    if secret is not None or "/" in address:
        return
    host, _ = split_address(address, field="address", example=EXAMPLE, any_port=True)
    if not is_loopback(host):
        raise ConfigError(
            "secret_file", f"{host} lies beyond this machine, and there is no secret", "give all machines the same file"
        )


async def connect_tcp(address: str, tuning: TcpOptions) -> socket.socket:
    """A connected non-blocking socket. Raises ``ConfigError`` (no address), ``PeerLost`` (nobody there), ``HostError``."""
    host, port = split_address(address, field="address", example=EXAMPLE)
    lost: PeerLost | None = None
    for family, target in await _resolve(address, host, port):
        sock = new_socket(family)
        try:
            await connect_to(sock, target, address)
            tune(sock, tuning)
            return sock
        except PeerLost as error:
            sock.close()
            lost = lost or error
        except BaseException:
            sock.close()
            raise
    assert lost is not None, "getaddrinfo gives one address or raises"
    raise lost


async def connect_to(sock: socket.socket, target: _SocketAddress, address: str) -> None:
    """Connects ``sock``; raises as ``connect_tcp`` does."""
    number = sock.connect_ex(target)
    if number == errno.EINPROGRESS:
        await ready(sock, writing=True)
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number in (errno.EACCES, errno.EPERM):
        raise HostError(address, "no permission to connect", "see this machine's firewall rules")
    if number == errno.EADDRNOTAVAIL:
        raise HostError("ports", f"no local port or address is left to reach {address}", "close what holds them")
    if number:
        word = os.strerror(number)
        if number == errno.ECONNREFUSED:
            raise PeerLost(address, f"nobody listens there ({word})", "start it first, or check address and firewall")
        raise PeerLost(address, f"it cannot be reached ({word})", "check address, route and firewall")
    try:
        meets_itself = sock.getsockname() == sock.getpeername()
    except OSError as error:
        raise PeerLost(address, f"the connection broke ({error.strerror})") from error
    if meets_itself:
        # A local port that nobody listens at may be drawn for this very connection.
        raise PeerLost(address, "nobody listens there", "start it first, or check the address")


async def _resolve(address: str, host: str, port: int) -> list[_Target]:
    numeric = _numeric(host, port)
    if numeric:
        return numeric
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerLost(
            address, f"its name cannot be resolved ({error.strerror})", "check the name, or give the number"
        ) from error
    return [(family, target) for family, _, _, _, target in found]  # type: ignore[misc]  # as _numeric


def _numeric(host: str, port: int) -> list[_Target]:
    """The target where ``host`` is a number; nothing for a name. Never asks anybody."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return []
    return [(family, target) for family, _, _, _, target in found]  # type: ignore[misc]  # no strings from AF_INET


class TcpListener(Listener):
    """Listens at ``address``; with port 0 the kernel chooses one, and ``address`` names it afterwards.

    Raises ``ConfigError`` (no address), ``HostError`` (in use, not of this machine, no permission).
    """

    def __init__(self, address: str, accepted: Accepted, tuning: TcpOptions) -> None:
        host, port = split_address(address, field="address", example=EXAMPLE, any_port=True)
        targets = _numeric(host, port)
        try:
            # A name is looked up while the role starts, and only there.
            targets = targets or [(f, t) for f, _, _, _, t in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]  # type: ignore[misc]
        except OSError as error:
            raise host_error(error, address, "its name cannot be resolved", "give the number") from error
        family, target = targets[0]
        sock = new_socket(family)
        try:
            _bind(sock, family, target, address)
            port = sock.getsockname()[1]
        except BaseException:
            sock.close()
            raise

        def tuned(new: socket.socket) -> None:
            try:
                tune(new, tuning)
            except OSError:
                new.close()  # it broke before it was looked at
                return
            accepted(new)

        super().__init__(join_address(host, port), sock, tuned)


def _bind(sock: socket.socket, family: socket.AddressFamily, target: _SocketAddress, address: str) -> None:
    try:
        # Connections of an earlier life that are still winding down do not keep a port from its owner.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(target)
        sock.listen(BACKLOG)
    except OSError as error:
        raise host_error(error, address, "cannot listen there", "choose another address or port") from error
