"""What an endpoint of the verbs fabric is made of: units in every name, and the codes that verbs makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from afore.core.control import WIRE_VERSION
from afore.core.errors import ConfigError
from afore.core.link_options import IdleOptions, TcpOptions
from afore.transport.codec import MESSAGE_LIMIT
from afore.transport.verbs.binding import APIS, MTU_CODES
from afore.transport.verbs.wire import CREDITS_LIMIT

RNR_TIMERS_US = (
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1_280, 1_920,
    2_560, 3_840, 5_120, 7_680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760, 327_680, 491_520,
)  # fmt: skip
"""How long a receiver that is not ready asks to be left alone, by code (InfiniBand specification, table 45)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbsConfig:
    """One endpoint, and how it uses RDMA. What is ``None`` is chosen, and the choice explained (``VerbsFabric.choice``)."""

    listen: str = "127.0.0.1:0"
    """Where peers meet to exchange queue pairs: HOST:PORT of an interface (0: the kernel's choice), or a Unix socket's path."""
    advertise: str | None = None
    """``HOST:PORT`` that peers connect to, where it is not the one listened at. Port 0: the same port."""
    secret: bytes
    """What all processes of the run know, 16 random bytes or more."""
    label: str = "endpoint"
    """Names the endpoint for humans: the role."""
    api: str = "auto"
    """The Python binding: ``pyverbs``, ``ibverbs``, or ``auto``: pyverbs where it can be imported, else ibverbs."""
    device: str | None = None
    """The RDMA device, as ``rdma link`` names it."""
    port: int | None = None
    gid_index: int | None = None
    """The source address, as an index of the port's GID table; both sides need one of the same kind."""
    mtu_bytes: int | None = None
    """Payload of one packet: 256, 512, 1024, 2048 or 4096; never more than either port has."""
    numa_node: int | None = None
    """Where the process's memory is; the nearest device is chosen. None: the node that has all cores which the process may use."""
    credits: int = 256
    """Notifications of one link that may wait to be taken."""
    send_depth: int = 128
    """Requests of one link that may be under way."""
    inline_bytes: int = 512
    """Payload that travels inside its request; the device may grant less."""
    staging_bytes: int = 1 << 20
    """Registered memory of one link from which larger payloads leave, so that a write's data may be reused at once. A payload
    that is larger still gets memory of its own."""
    ack_timeout_us: float = 1e6
    """How long a packet may stay unanswered before it is sent again; rounded up to 4.096 µs × 2^n."""
    retry_count: int = 7
    """How often, 0 … 7. Then the link is lost."""
    rnr_timer_us: float = 10_240
    """How long a receiver without receives asks to be left alone. Credits see to it that this does not happen."""
    rnr_retry_count: int = 3
    """How often it is then tried again, 0 … 6; 7 would be for ever."""
    reads_in_flight: int = 4
    """RDMA READs that one link may have under way."""
    revoke_timeout_us: float = 10e6
    """How long a writer may take to let go of a region that its owner closed; then its link ends."""
    linger_us: float = 1e6
    """How long ``close`` waits for what was written to arrive."""
    message_limit: int = MESSAGE_LIMIT
    """Bytes of one control message."""
    handshake_timeout_us: float = 5e6
    """How long a client may take to prove itself, and again to exchange queue pairs."""
    greetings_limit: int = 256
    """Clients that may be proving themselves at once; one more ends the oldest."""
    tuning: TcpOptions = field(default_factory=TcpOptions)
    """How a dead machine is noticed."""
    idle: IdleOptions = field(default_factory=IdleOptions)
    """How its readers wait for notifications."""
    version: int = WIRE_VERSION
    """Wire version to speak."""

    def __post_init__(self) -> None:
        if self.api not in APIS:
            raise ConfigError("verbs.api", f"{self.api!r} is no binding", f"choose one of {', '.join(APIS)}")
        if self.mtu_bytes is not None and self.mtu_bytes not in MTU_CODES:
            raise ConfigError("verbs.mtu_bytes", f"{self.mtu_bytes}", f"choose one of {', '.join(map(str, MTU_CODES))}")
        _require_range("port", self.port if self.port is not None else 1, 1, 255)
        _require_range("gid_index", self.gid_index or 0, 0, 65_535)
        _require_range("credits", self.credits, 1, CREDITS_LIMIT)
        _require_range("send_depth", self.send_depth, 4, CREDITS_LIMIT)
        _require_range("inline_bytes", self.inline_bytes, 0, 4096)
        _require_range("staging_bytes", self.staging_bytes, 4096, 1 << 40)
        _require_range("retry_count", self.retry_count, 0, 7)
        _require_range("rnr_retry_count", self.rnr_retry_count, 0, 6)
        _require_range("reads_in_flight", self.reads_in_flight, 1, 16)
        _require_range("greetings_limit", self.greetings_limit, 1, 1 << 20)
        _require_range("message_limit", self.message_limit, 1, (1 << 32) - 1)
        for name in ("ack_timeout_us", "rnr_timer_us", "revoke_timeout_us", "linger_us", "handshake_timeout_us"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"verbs.{name}", f"{value} is no duration", "give more than 0 microseconds")
        if self.ack_timeout_us > 4.096 * 2**31:
            raise ConfigError("verbs.ack_timeout_us", f"{self.ack_timeout_us:g} is over 2.4 hours", "give less")
        if self.rnr_timer_us > RNR_TIMERS_US[0]:
            raise ConfigError("verbs.rnr_timer_us", f"{self.rnr_timer_us:g}", f"give at most {RNR_TIMERS_US[0]:,}")

    @property
    def ack_timeout_code(self) -> int:
        """The smallest n with 4.096 µs × 2^n ≥ ``ack_timeout_us``; never 0, which means for ever."""
        return max(1, math.ceil(math.log2(self.ack_timeout_us / 4.096)))

    @property
    def patience(self) -> str:
        """How long the device tries before a link is lost, in words."""
        return f"{self.retry_count} retries, {4.096 * 2**self.ack_timeout_code / 1e6:.2g} s each or longer"

    @property
    def rnr_timer_code(self) -> int:
        """The code of the shortest timer that is at least ``rnr_timer_us``."""
        return min(
            (duration_us, code) for code, duration_us in enumerate(RNR_TIMERS_US) if duration_us >= self.rnr_timer_us
        )[1]


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"verbs.{name}", f"{value}", f"give {low} … {high}")
