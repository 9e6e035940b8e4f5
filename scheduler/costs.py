"""What computing a tile and copying an expert cost, and how long a copy may take unnoticed: eq. 7 and 8's estimates.

M(Δ) = copy_us × the most copies at any one source or destination port: copies leave from the fixed primary, and ports work at
the same time. Exposed O = max(0, M(Δ) - W).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The estimates that one plan is made with. Raises ``ConfigError`` for a value that is negative or not finite."""

    tile_us: float
    """β_tile: microseconds of FFN compute a tile costs, on a worker of the greatest speed."""
    copy_us: float
    """Microseconds to copy one expert through one port."""
    window_us: float
    """W: microseconds from a copy's submission to its target's first use."""

    def __post_init__(self) -> None:
        for name, value in (("tile_us", self.tile_us), ("copy_us", self.copy_us), ("window_us", self.window_us)):
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"costs.{name}", f"{value!r} is not a time", "give microseconds, 0 or more")


def migration_us(
    copies: Iterable[tuple[int, int, int]], primaries_E: NDArray[np.integer[Any]] | Sequence[int], costs: Costs
) -> float:
    """M(Δ) of (expert, worker, slot) copies, in µs."""
    ports: Counter[tuple[str, int]] = Counter()
    for expert, worker, _slot in copies:
        ports["out", int(primaries_E[expert])] += 1
        ports["in", worker] += 1
    return costs.copy_us * max(ports.values(), default=0)


def exposed_us(
    copies: Iterable[tuple[int, int, int]], primaries_E: NDArray[np.integer[Any]] | Sequence[int], costs: Costs
) -> float:
    """O = max(0, M(Δ) - W), in µs."""
    return max(0.0, migration_us(copies, primaries_E, costs) - costs.window_us)


MEDIAN, EIGHTH = 0.5, 0.125


class _Recent:
    """A quantile of the last ``size`` values, kept sorted."""

    __slots__ = ("_order", "_quantile", "_size", "_sorted")

    def __init__(self, size: int, quantile: float) -> None:
        self._size = size
        self._quantile = quantile
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        if len(self._order) == self._size:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(value)
        insort(self._sorted, value)

    def value(self) -> float:
        """The quantile; of the median the upper one of two."""
        return self._sorted[int(len(self._sorted) * self._quantile)]


class CostModel:
    """Costs per layer: the seed until ``warmup`` measurements of a quantity have come, then the median of its last ``recent``;
    of the window the lower eighth.

    Medians, because on shared cores single records are off by whole time slices. A window that is believed too long costs all that
    the copies then show, one believed too short a tile or so: targets that follow a gap in the pipeline have little of it, and are
    more than an eighth where there is one in every few of a layer. ``seed`` is one for all layers, or one each.
    ``costs_N``: what a tile costs on each worker (``afore.core.speeds``; none: all are equally fast). ``tile_us`` is kept as it
    would be on the fastest, so that a slow worker's tiles do not make all of them look slow.
    """

    def __init__(
        self,
        seed: Costs | Sequence[Costs],
        *,
        num_layers: int,
        frozen: bool = False,
        recent: int = 31,
        warmup: int = 5,
        costs_N: Sequence[int] | None = None,
    ) -> None:
        self._costs = [seed] * num_layers if isinstance(seed, Costs) else list(seed)
        if len(self._costs) != num_layers:
            raise ConfigError("costs", f"{len(self._costs)} seeds for {num_layers} layers", "give one, or one for each")
        if not 1 <= warmup <= recent:
            raise ConfigError("costs.warmup", f"{warmup} is not between 1 and recent={recent}")
        self._scale_N = [min(costs_N) / cost for cost in costs_N] if costs_N else None
        self._seeds = tuple(self._costs)
        self._warmup = warmup
        self._recent = [[_Recent(recent, quantile) for quantile in (MEDIAN, MEDIAN, EIGHTH)] for _ in range(num_layers)]
        self._stale = [False] * num_layers
        self.frozen = frozen
        """Keep the seeds whatever is measured, so that a run can be repeated exactly."""
        self.ignored = 0
        """Measurements that were no times (negative or not finite)."""

    def layer(self, layer: int) -> Costs:
        """The layer's costs now."""
        if self._stale[layer]:
            seed = self._seeds[layer]
            tile_us, copy_us, window_us = (
                recent.value() if len(recent) >= self._warmup else before
                for recent, before in zip(
                    self._recent[layer], (seed.tile_us, seed.copy_us, seed.window_us), strict=True
                )
            )
            self._costs[layer] = Costs(tile_us=tile_us, copy_us=copy_us, window_us=window_us)
            self._stale[layer] = False
        return self._costs[layer]

    def update(
        self,
        layer: int,
        *,
        worker: int | None = None,
        tile_us: float | None = None,
        copy_us: float | None = None,
        window_us: float | None = None,
    ) -> None:
        """Takes one worker's measurements of one target; None: not measured (no tiles, no copies).

        ``worker`` is its rank; none: a worker of the greatest speed.
        """
        if self.frozen:
            return
        if tile_us is not None and worker is not None and self._scale_N is not None:
            tile_us *= self._scale_N[worker]
        for recent, value in zip(self._recent[layer], (tile_us, copy_us, window_us), strict=True):
            if value is None:
                continue
            if 0.0 <= value < math.inf:
                recent.add(value)
                self._stale[layer] = True
            else:
                self.ignored += 1
