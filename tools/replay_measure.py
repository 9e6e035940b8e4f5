"""What a replay is made under, and what it adds up over its measured targets."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import PolicyOptions
from afore.scheduler.costs import Costs

_MOST_TIMES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a policy is replayed under."""

    policy: str
    workers: int
    slots: int
    tile_tokens: int
    costs: Costs
    options: PolicyOptions
    accuracy: float
    """Of predictions, where they are not made of tokens' experts."""
    seed: int
    optimum_limit_s: float | None = None
    """Time of the solver for a target; none: it is not asked."""


@dataclass(slots=True)
class Measured:
    """Sums over the measured targets."""

    layers: int
    workers: int
    targets: int = 0
    plan_us: list[float] = field(default_factory=list)
    """At most ``_MOST_TIMES``, evenly over the targets."""
    token_before: NDArray[np.float64] = field(init=False)
    """By layer, as are the next four."""
    token_after: NDArray[np.float64] = field(init=False)
    tile_before: NDArray[np.float64] = field(init=False)
    tile_after: NDArray[np.float64] = field(init=False)
    tile_bound: NDArray[np.float64] = field(init=False)
    of_layer: NDArray[np.int64] = field(init=False)
    load_before_N: NDArray[np.float64] = field(init=False)
    """Share of the pairs of each worker, summed."""
    load_after_N: NDArray[np.float64] = field(init=False)
    at_bound: int = 0
    gap_to_bound: float = 0.0
    optimal: int = 0
    open: int = 0
    copies: int = 0
    raw_us: float = 0.0
    exposed_us: float = 0.0
    ffn_us: float = 0.0
    """Modelled time of the FFN workers."""
    static_us: float = 0.0
    """The same with everything on primaries."""
    stride: int = 1

    def __post_init__(self) -> None:
        for name in ("token_before", "token_after", "tile_before", "tile_after", "tile_bound"):
            setattr(self, name, np.zeros(self.layers))
        self.of_layer = np.zeros(self.layers, np.int64)
        self.load_before_N, self.load_after_N = np.zeros(self.workers), np.zeros(self.workers)

    def timed(self, plan_us: float) -> None:
        """Keeps a latency, if it is one of those that are kept."""
        if self.targets % self.stride == 0:
            self.plan_us.append(plan_us)
            if len(self.plan_us) >= _MOST_TIMES:
                self.plan_us = self.plan_us[::2]
                self.stride *= 2
