"""How processes wait for others and notice their end: ``--idle.*`` and ``--tcp.*``, which transport endpoints take as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from afore.core.errors import ConfigError

Strategy = Literal["fd", "spin-then-fd"]
STRATEGIES: Final[tuple[Strategy, ...]] = ("fd", "spin-then-fd")
LONGEST_SPIN_US: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class IdleOptions:
    """How the readers of an endpoint wait for notifications."""

    strategy: Strategy = "fd"
    """fd sleeps at once; spin-then-fd looks first, where a core is to spare."""
    spin_us: float = 100.0
    """spin-then-fd: how long one wait may look before it sleeps."""
    cpu_share: float = 0.2
    """spin-then-fd: the part of one core, 0 to 1, that all looking of an endpoint may take in the long run."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError("idle.strategy", f"{self.strategy!r}", f"give one of {', '.join(STRATEGIES)}")
        if not 0 < self.spin_us <= LONGEST_SPIN_US:
            raise ConfigError("idle.spin_us", f"{self.spin_us}", f"give more than 0, at most {LONGEST_SPIN_US:g}")
        if not 0 < self.cpu_share <= 1:
            raise ConfigError("idle.cpu_share", f"{self.cpu_share}", "give more than 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class TcpOptions:
    """TCP between machines: how a connection notices that nobody is there any more, since a machine without power says nothing."""

    keepalive_idle_s: int = 5
    """Silence after which the kernel asks whether the peer is there."""
    keepalive_interval_s: int = 2
    """Between one question and the next."""
    keepalive_probes: int = 3
    """Questions without an answer after which the peer is lost."""
    unacknowledged_ms: int = 20_000
    """How long what was sent may stay unacknowledged, or a peer that does not read may keep its window shut."""

    def __post_init__(self) -> None:
        for field, high in (
            ("keepalive_idle_s", 32767),
            ("keepalive_interval_s", 32767),
            ("keepalive_probes", 127),
            ("unacknowledged_ms", 1 << 31),
        ):
            value = getattr(self, field)
            if not 1 <= value < high:
                raise ConfigError(f"tcp.{field}", f"{value} is out of range", f"give 1 … {high - 1}")
