"""The door's address. Light to import: the launcher looks whether it can be had before it starts anything."""

from __future__ import annotations

import ipaddress
import os
import socket

from afore.core.config import ServeOptions
from afore.core.errors import ConfigError

BACKLOG = 2048


def listen(options: ServeOptions) -> socket.socket:
    """A socket that listens where the options say. Raises ``ConfigError`` when the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise ConfigError("serve.host", f"{options.host} is no address of this machine ({error.strerror})") from None
    except UnicodeError:
        raise ConfigError("serve.host", f"{options.host!r} is no name of a host") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            "serve.port",
            f"cannot listen at {options.host} port {options.port}: {reason}",
            "give another --port; 0 takes any free one",
        ) from None
    listener.setblocking(False)
    return listener


def check_listen(options: ServeOptions) -> None:
    """Raises ``ConfigError`` where ``listen`` would, a moment before it."""
    listen(options).close()


def url_of(listener: socket.socket, host: str) -> str:
    """Where clients of this machine find the listener: ``http://127.0.0.1:8000``."""
    port = listener.getsockname()[1]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        return f"http://{'[::1]' if address.version == 6 else '127.0.0.1'}:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
