"""What a published target asks of the workers, as one compiled call: it stands between two targets, so it must cost nothing.

The plain version is ``afore.core.metrics.shared_loads``. Letters: E experts, N workers, X shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from afore.core.metrics import Loads
from afore.core.plan import Share
from afore.core.speeds import least_load


class LoadMeter:
    """Loads of targets of one layer shape. Not thread-safe: it keeps its own scratch.

    ``costs_N``: what a tile costs on each worker (``afore.core.speeds``); none: all are equally fast.
    """

    def __init__(
        self,
        primaries_E: NDArray[np.integer],
        num_workers: int,
        tile_tokens: int,
        costs_N: Sequence[int] | None = None,
    ) -> None:
        compile_loads()
        self._primaries_E = np.ascontiguousarray(primaries_E, np.int32)
        self._tile_tokens = tile_tokens
        self._cost_of = tuple(costs_N or (1,) * num_workers)
        self._costs_N = np.array(self._cost_of, np.int64)
        self._pairs_N2 = np.zeros((num_workers, 2), np.int64)
        self._tiles_N2 = np.zeros((num_workers, 2), np.int64)

    def loads(self, demand_E: NDArray[np.int32], shares: Sequence[Share]) -> Loads:
        """Loads before and after the shares, which are clipped to the demand in rank order, as the workers clip them.

        ``shares`` come by expert, then by rank (the order of ring entries), none of them on its expert's primary worker.
        """
        shares_X3 = np.array([(s.expert, s.worker, s.count) for s in shares], np.int32).reshape(-1, 3)
        pairs, tiles, pairs_before, pairs_after, tiles_before, tiles_after = _loads(
            demand_E, shares_X3, self._primaries_E, self._tile_tokens, self._costs_N, self._pairs_N2, self._tiles_N2
        )
        return Loads(
            pairs=pairs,
            tiles=tiles,
            max_pairs_before=pairs_before,
            max_pairs_after=pairs_after,
            max_tiles_before=tiles_before,
            max_tiles_after=tiles_after,
            bound_tiles=least_load(tiles, self._cost_of),
        )


def compile_loads() -> None:
    """Compiles (or reads from numba's cache) for exactly these types: nothing compiles at the first target."""
    if not _loads.signatures:
        vector, rows = types.int32[::1], types.int32[:, ::1]
        scratch = types.int64[:, ::1]
        _loads.compile((vector, rows, vector, types.int64, types.int64[::1], scratch, scratch))
        _loads.disable_compile()


@njit(nogil=True, cache=True, error_model="numpy")
def _loads(demand_E, shares_X3, primaries_E, tile_tokens, costs_N, pairs_N2, tiles_N2):  # type: ignore[no-untyped-def]  # numba infers
    """Column 0 of the scratch is before, column 1 after."""
    pairs_N2[:] = 0
    tiles_N2[:] = 0
    pairs = tiles = 0
    x = 0
    for expert in range(demand_E.shape[0]):
        count = demand_E[expert]
        primary = primaries_E[expert]
        here = (count + tile_tokens - 1) // tile_tokens
        pairs += count
        tiles += here
        pairs_N2[primary, 0] += count
        tiles_N2[primary, 0] += here
        left = count
        while x < shares_X3.shape[0] and shares_X3[x, 0] == expert:
            worker = shares_X3[x, 1]
            taken = min(shares_X3[x, 2], left)
            left -= taken
            pairs_N2[worker, 1] += taken
            tiles_N2[worker, 1] += (taken + tile_tokens - 1) // tile_tokens
            x += 1
        pairs_N2[primary, 1] += left
        tiles_N2[primary, 1] += (left + tile_tokens - 1) // tile_tokens
    for worker in range(costs_N.shape[0]):
        for when in range(2):
            pairs_N2[worker, when] *= costs_N[worker]
            tiles_N2[worker, when] *= costs_N[worker]
    return (
        pairs,
        tiles,
        pairs_N2[:, 0].max(),
        pairs_N2[:, 1].max(),
        tiles_N2[:, 0].max(),
        tiles_N2[:, 1].max(),
    )
