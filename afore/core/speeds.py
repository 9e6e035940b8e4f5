"""How fast FFN workers are relative to each other, as whole numbers that every planner adds and compares alike.

A worker's *tile cost* is what one tile on it adds to its load; *load* is tiles times that cost. The unit of load is 1/U of a tile
on a worker of the greatest speed, where U (``load_unit``) is the least tile cost: U = 1 and every cost 1 where all are equally
fast, so that load is tiles. Letters: N FFN workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from afore.core.errors import ConfigError

FINENESS = 60
"""Parts of the fastest worker's tile that costs are rounded to, before common divisors go. Halves, thirds, quarters, fifths and
sixths are exact; any other ratio is off by at most 1/120 of such a tile, far below the one whole tile that a plan can move."""
GREATEST_RATIO = 64
"""Of the fastest worker's speed to the slowest's: beyond it, that worker is broken rather than slow, and loads would overflow."""


def check_speeds(field: str, speeds: Sequence[float] | npt.NDArray[Any], num_workers: int | None) -> tuple[float, ...]:
    """Relative speeds as floats, one for each worker; ``num_workers`` None: any number of them.

    Raises ``ConfigError`` naming ``field``.
    """
    remedy = "give one speed above 0 for each FFN worker, 1.0 the usual"
    found = []
    for worker, speed in enumerate(speeds):
        if isinstance(speed, bool | np.bool_ | str) or not np.isscalar(speed):
            raise ConfigError(field, f"{speed!r} for worker {worker} is no number", remedy)
        value = float(speed)  # type: ignore[arg-type]  # a scalar that is neither text nor truth
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(field, f"{value!r} for worker {worker} is no speed", remedy)
        found.append(value)
    if not found or (num_workers is not None and len(found) != num_workers):
        raise ConfigError(field, f"{len(found)} numbers for {num_workers or 'some'} workers", remedy)
    if max(found) / min(found) > GREATEST_RATIO:
        raise ConfigError(
            field,
            f"worker {found.index(max(found))} is {max(found) / min(found):.4g} times as fast as worker "
            f"{found.index(min(found))}",
            f"give speeds within a factor of {GREATEST_RATIO}, and leave out what is slower",
        )
    return tuple(found)


def tile_costs(speeds: Sequence[float]) -> tuple[int, ...]:
    """What a tile costs on each worker: in proportion to 1/speed, in the coarsest unit that tells them apart."""
    fastest = max(speeds)
    costs = [round(FINENESS * fastest / speed) for speed in speeds]
    common = math.gcd(*costs)
    return tuple(cost // common for cost in costs)


def least_load(tiles: int, costs_N: Sequence[int]) -> int:
    """No assignment of so many whole tiles has a lower maximum load: the least T with Σ_w ⌊T/c_w⌋ ≥ tiles; ⌈tiles/N⌉ if equal."""
    if max(costs_N) == 1:
        return -(-tiles // len(costs_N))
    even = even_workers(costs_N)
    # Between tiles that could be cut at will, and one tile wasted on each worker; two more on either side for the division.
    low, high = max(-1, int(tiles / even) - 2), int((tiles + len(costs_N)) / even) + 2
    while high - low > 1:
        middle = (low + high) // 2
        if sum(middle // cost for cost in costs_N) >= tiles:
            high = middle
        else:
            low = middle
    return high


def even_workers(costs_N: Sequence[int]) -> float:
    """Σ_w 1/c_w: tiles over it is the load of each worker if tiles could be cut at will; N where all are equally fast."""
    return math.fsum(1 / cost for cost in costs_N)
