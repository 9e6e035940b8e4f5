"""A lower bound on the maximum load that needs no solver: what cannot leave a set of workers.

Tiles homed in a set W leave it only over replicas outside W. Those outside W that may not be rebound are given; the others take at
most one slot each that may be, and new ones a copy each. So at most m more experts can leave, at best the largest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.speeds import least_load

MOST_SUBSETS = 8
"""Up to as many workers every set is looked at; beyond, the most loaded ones together, and each alone."""


def least_by_reach(
    *,
    tiles_E: NDArray[np.int64],
    primaries_E: NDArray[np.int32],
    slots_NR: NDArray[np.int32],
    safe_NR: NDArray[np.bool_],
    budget: int,
    compactness: int,
    costs_N: Sequence[int],
) -> int:
    """No plan has a maximum load below this; never less than ``least_load`` of all tiles. ``costs_N``: what a tile costs where."""
    N = slots_NR.shape[0]
    worst = least_load(int(tiles_E.sum()), costs_N)
    movable_E = tiles_E > compactness
    for group in _groups(np.bincount(primaries_E, weights=tiles_E, minlength=N) * costs_N):
        inside_N = np.zeros(N, np.bool_)
        inside_N[list(group)] = True
        homed_E = inside_N[primaries_E]
        outside_NR = slots_NR[~inside_N]
        safe_outside_NR = safe_NR[~inside_N]
        fixed = outside_NR[(outside_NR >= 0) & ~safe_outside_NR]
        free_E = np.zeros(tiles_E.size, np.bool_)
        free_E[fixed] = True
        there = outside_NR[(outside_NR >= 0) & safe_outside_NR]
        more = min(int(safe_outside_NR.sum()), budget + int(homed_E[there].sum()))
        leaves = int(tiles_E[homed_E & free_E & movable_E].sum())
        rest = np.sort(tiles_E[homed_E & ~free_E & movable_E])[::-1]
        stays = int(tiles_E[homed_E].sum()) - leaves - int(rest[:more].sum())
        worst = max(worst, least_load(stays, [costs_N[w] for w in group]))
    return worst


def _groups(base_N: NDArray[Any]) -> Iterator[tuple[int, ...]]:
    order = np.argsort(-base_N, kind="stable").tolist()
    N = len(order)
    if N <= MOST_SUBSETS:
        for size in range(1, N):
            yield from itertools.combinations(order, size)
        return
    for size in range(1, N):
        yield tuple(order[:size])
    for w in order[1:]:
        yield (w,)
