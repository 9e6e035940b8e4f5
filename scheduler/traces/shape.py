"""The shape of a generated workload, and what every workload is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from afore.core.errors import ConfigError
from afore.scheduler.traces.calibrate import SKEW
from afore.scheduler.traces.records import TraceHeader, TraceTarget

Skew = Literal["real", "paper"]
"""Demand as it was recorded, or brought to the paper's skew."""
PLACES = 64
"""Windows of a text that its skew is measured by."""


class Workload(Protocol):
    """Anything that makes targets."""

    @property
    def header(self) -> TraceHeader:
        """What the targets share; its ``source`` says where they come from and how skewed they are."""
        ...

    def targets(self) -> Iterator[TraceTarget]:
        """Without end; each call begins anew."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """How traffic moves on from step to step; only of workloads that are drawn around counts."""

    pace: float = 1.0
    """How many times as fast mixtures drift and chunks pass."""
    jitter: float = 1.0
    """How many times as much a target's shares vary around its mixture's: what κ is divided by."""
    turn_step: int | None = None
    """From this step on, requests are of the other half of the domains; none: always of all."""

    def __post_init__(self) -> None:
        for name in ("pace", "jitter"):
            if not 0.0 < getattr(self, name) <= 1e4:
                raise ConfigError(f"workload.{name}", f"{getattr(self, name)} is not above 0, and 10,000 at most")
        if self.turn_step is not None and self.turn_step < 0:
            raise ConfigError("workload.turn_step", f"{self.turn_step} is below 0")


AS_COUNTED = Motion()
"""Traffic that moves as chunks of counted text do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a generated workload."""

    microbatches: int = 2
    """M."""
    tokens: int = 256
    """T: requests of a microbatch, each with one token a step."""
    layers: int | None = None
    """L: so many neighbouring layers, from the middle; none: all."""
    seed: int = 1
    skew: Skew = "real"
    imbalance: float = SKEW
    """Of ``skew="paper"``: pairs of the most loaded of 8 workers over the mean, mean over layers. 1: routing is uniform."""
    motion: Motion = AS_COUNTED

    def __post_init__(self) -> None:
        for name in ("microbatches", "tokens"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ConfigError(f"workload.{name}", f"{getattr(self, name)} is not 1 to 2^20")
        if self.layers is not None and self.layers < 1:
            raise ConfigError("workload.layers", f"{self.layers} layers", "give 1 or more, or leave it out")
        if self.seed < 0:
            raise ConfigError("workload.seed", f"{self.seed} is below 0")
        if not 1.0 <= self.imbalance <= 6.0:
            raise ConfigError("workload.imbalance", f"{self.imbalance} is not 1 to 6")

    def chosen(self, layers: int) -> range:
        """Which of so many layers are taken."""
        wanted = layers if self.layers is None else min(self.layers, layers)
        first = (layers - wanted) // 2
        return range(first, first + wanted)
