"""Seeded bad weather of a loopback network: jitter, writes that other links overtake, payloads that land in two parts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from afore.core.errors import ConfigError

_WORD = 8
"""Bytes that land as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackFaults:
    """What may go wrong between two endpoints. Order within a link always holds; a peer's death is ``LoopbackNetwork.kill``."""

    jitter_us: float = 0.0
    """Each write and message takes up to this much longer, uniformly."""
    overtake: float = 0.0
    """Probability that a write is held back by up to ``overtake_us`` more, so that later writes of other links pass it."""
    overtake_us: float = 0.0
    """Longest such delay."""
    torn: float = 0.0
    """Probability that a payload of two bytes or more (no single word) lands in two parts, in either order, before it is told."""
    torn_us: float = 0.0
    """Longest time between the two parts."""

    def __post_init__(self) -> None:
        for name in ("jitter_us", "overtake_us", "torn_us"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"faults.{name}", f"{getattr(self, name)!r} is no duration", "give 0 or more microseconds"
                )
        for name in ("overtake", "torn"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"faults.{name}", f"{getattr(self, name)!r} is no probability", "give 0 … 1")


class Flight(NamedTuple):
    """When a payload lands: in one part at ``lands_ns``, or the other part of it at ``first_ns`` before."""

    lands_ns: int
    first_ns: int | None = None
    split: int = 0
    """Bytes before the cut."""
    tail_first: bool = False
    """Whether the bytes behind the cut land first."""


class Wire:
    """One direction of one link or channel: latency, bandwidth, faults, and its own random numbers. Order is kept.

    ``name`` seeds the numbers, so that what one wire draws does not depend on what others carry.
    """

    __slots__ = ("_busy_until_ns", "_faults", "_landed_ns", "_ns_per_byte", "_random", "calm", "latency_ns")

    def __init__(
        self,
        *,
        latency_us: float,
        bandwidth_gbps: float | None,
        faults: LoopbackFaults | None,
        seed: int | None,
        name: str,
    ) -> None:
        self.latency_ns = round(latency_us * 1e3)
        self._ns_per_byte = 0.0 if bandwidth_gbps is None else 8 / bandwidth_gbps
        self._faults = faults
        # A generator weighs 2.5 KiB, and there are as many wires as pairs of workers.
        self._random = None if faults is None else random.Random(f"{seed}/{name}")
        self._busy_until_ns = 0
        self._landed_ns = 0
        self.calm = faults is None and bandwidth_gbps is None
        """Whether all that it does is to take ``latency_ns``: latencies do not change, so nothing overtakes."""

    def fly(self, now_ns: int, nbytes: int) -> Flight:
        """Sends ``nbytes`` now; never lands before what was sent earlier. A word is not torn: no fabric tears one backwards."""
        self._busy_until_ns = max(now_ns, self._busy_until_ns) + round(nbytes * self._ns_per_byte)
        arrives_ns = self._busy_until_ns + self.latency_ns
        faults, draw = self._faults, self._random
        if faults is None or draw is None:
            self._landed_ns = max(arrives_ns, self._landed_ns)
            return Flight(self._landed_ns)
        arrives_ns += round(draw.uniform(0, faults.jitter_us) * 1e3)
        if draw.random() < faults.overtake:
            arrives_ns += round(draw.uniform(0, faults.overtake_us) * 1e3)
        arrives_ns = max(arrives_ns, self._landed_ns)
        if nbytes < 2 or nbytes == _WORD or draw.random() >= faults.torn:
            self._landed_ns = arrives_ns
            return Flight(arrives_ns)
        self._landed_ns = arrives_ns + round(draw.uniform(0, faults.torn_us) * 1e3)
        return Flight(self._landed_ns, arrives_ns, draw.randrange(1, nbytes), draw.random() < 0.5)
