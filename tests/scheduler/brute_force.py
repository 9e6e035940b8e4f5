"""The least maximum load by trying everything: what the solver and the planners are held against in tiny cases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.core.speeds import least_load


def least_over(
    tiles: Sequence[int], holders: Sequence[set[int]], num_workers: int, costs_N: Sequence[int] | None = None
) -> int:
    """The least maximum load when expert e may run on ``holders[e]``: the worst of all sets of experts (Hall's theorem)."""
    costs_N = costs_N or (1,) * num_workers
    worst = least_load(sum(tiles), costs_N)
    some = [e for e, n in enumerate(tiles) if n > 0]
    for size in range(1, len(some) + 1):
        for group in itertools.combinations(some, size):
            workers = set().union(*(holders[e] for e in group))
            worst = max(worst, least_load(sum(tiles[e] for e in group), [costs_N[w] for w in workers]))
    return worst


def holders_of(
    slots_NR: NDArray[np.int32], primaries: Sequence[int], tiles: Sequence[int], theta: int
) -> list[set[int]]:
    """Workers on which each expert may run: its primary, and its replicas unless θ keeps it whole."""
    holders = [{int(w)} for w in primaries]
    for w, row in enumerate(slots_NR.tolist()):
        for e in row:
            if e >= 0 and tiles[e] > theta:
                holders[e].add(w)
    return holders


def least_maximum(
    tiles: Sequence[int],
    primaries: Sequence[int],
    slots_NR: NDArray[np.int32],
    budget: int,
    protected: NDArray[np.bool_] | None = None,
    theta: int = 0,
    costs_N: Sequence[int] | None = None,
) -> int:
    """The least maximum load over every slot table that at most ``budget`` copies reach."""
    N = slots_NR.shape[0]
    cells = [
        cell
        for cell in np.ndindex(slots_NR.shape)
        if slots_NR[cell] != NO_SUCH_SLOT and (protected is None or not protected[cell])
    ]
    best = least_over(tiles, holders_of(slots_NR, primaries, tiles, theta), N, costs_N)
    for count in range(1, min(budget, len(cells)) + 1):
        for chosen in itertools.combinations(cells, count):
            for experts in itertools.product(range(len(tiles)), repeat=count):
                table_NR = slots_NR.copy()
                for cell, e in zip(chosen, experts, strict=True):
                    table_NR[cell] = EMPTY if primaries[e] == cell[0] else e
                best = min(best, least_over(tiles, holders_of(table_NR, primaries, tiles, theta), N, costs_N))
    return best
