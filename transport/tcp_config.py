"""What an endpoint of the tcp fabric is made of."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from afore.core.control import WIRE_VERSION
from afore.core.errors import ConfigError
from afore.core.link_options import IdleOptions, TcpOptions
from afore.core.topology import split_address
from afore.transport.codec import MESSAGE_LIMIT
from afore.transport.tcp_sockets import EXAMPLE, require_secret

LOOPBACK_SECRET = b"everybody on this machine may know this"
"""What is proved where no secret is given: nothing. Regions are then guarded by their keys alone."""
CREDITS_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpConfig:
    """One endpoint of the tcp fabric."""

    listen: str = "127.0.0.1:0"
    """``HOST:PORT`` of an interface of this machine; port 0 lets the kernel choose."""
    advertise: str | None = None
    """``HOST:PORT`` that peers connect to, where it is not the one listened at; none means ``listen``. Port 0: the same port."""
    secret: bytes | None = None
    """What all processes of the run know, 16 random bytes or more; may be left out on loopback only."""
    label: str = "endpoint"
    """Names the endpoint for humans: the role."""
    credits: int = 1024
    """Notifications of one link that may wait to be taken."""
    unsent_bytes: int = 1 << 20
    """Bytes of a link that the kernel has not taken, at which writers wait. One write more than that is held at most."""
    message_limit: int = MESSAGE_LIMIT
    """Bytes of one control message."""
    handshake_timeout_us: float = 5e6
    """How long a client may take to prove itself."""
    greetings_limit: int = 256
    """Clients that may be proving themselves at once; one more ends the oldest."""
    tuning: TcpOptions = field(default_factory=TcpOptions)
    """How a dead machine is noticed."""
    idle: IdleOptions = field(default_factory=IdleOptions)
    """How its readers wait for notifications."""
    version: int = WIRE_VERSION
    """Wire version to speak."""

    def __post_init__(self) -> None:
        host, _ = split_address(self.listen, field="tcp.listen", example=EXAMPLE, any_port=True)
        if self.advertise is None:
            if _is_wildcard(host):
                raise ConfigError(
                    "tcp.listen", f"peers cannot connect to {host}", "name an interface, or give tcp.advertise"
                )
        else:
            split_address(self.advertise, field="tcp.advertise", example=EXAMPLE, any_port=True)
        require_secret(self.listen, self.secret)
        if not 1 <= self.credits <= CREDITS_LIMIT:
            raise ConfigError("tcp.credits", f"{self.credits}", f"give 1 … {CREDITS_LIMIT}")
        if not self.unsent_bytes >= 1:
            raise ConfigError("tcp.unsent_bytes", f"{self.unsent_bytes}", "give 1 byte or more")
        if not 0 < self.message_limit < 1 << 32:
            raise ConfigError("tcp.message_limit", f"{self.message_limit}", "give 1 … 2^32 - 1 bytes")
        if not self.handshake_timeout_us > 0:
            raise ConfigError("tcp.handshake_timeout_us", f"{self.handshake_timeout_us}", "give more than 0")
        if not self.greetings_limit >= 1:
            raise ConfigError("tcp.greetings_limit", f"{self.greetings_limit}", "give 1 or more")

    @property
    def shared_secret(self) -> bytes:
        """What the handshake proves."""
        return self.secret if self.secret is not None else LOOPBACK_SECRET


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
