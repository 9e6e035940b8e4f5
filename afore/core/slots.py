"""Where experts live: fixed primaries, and R redundant slots per worker and layer whose bindings change.

A worker's expert store of one layer has S = primaries + R slots: primaries first in rising expert order, then the redundant ones.
``slot`` in plans counts redundant slots from 0; ``store_slot`` counts the store's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EMPTY = -1
NO_SUCH_SLOT = -2

PrimariesVector = npt.NDArray[np.int32]


def contiguous_primaries(num_experts: int, num_workers: int) -> PrimariesVector:
    """Expert e on worker floor(e*N/E): int32 [E]; N need not divide E, and workers beyond E hold none."""
    return (np.arange(num_experts, dtype=np.int64) * num_workers // num_experts).astype(np.int32)


def slots_vector(slots_per_worker: int | Sequence[int], num_workers: int) -> npt.NDArray[np.int32]:
    """R as int32 [N], whether it was given as one number or one for each worker; ``ValueError`` for another length."""
    if isinstance(slots_per_worker, int):
        return np.full(num_workers, slots_per_worker, dtype=np.int32)
    slots_N = np.asarray(slots_per_worker, dtype=np.int32)
    if slots_N.shape != (num_workers,):
        raise ValueError(f"slots_per_worker has {slots_N.size} entries for {num_workers} workers")
    return slots_N


class StoreLayout:
    """Rows of one worker's expert store of a layer: primaries in rising expert order, then R redundant slots."""

    __slots__ = ("num_redundant", "primary_experts", "rank", "row_E")

    def __init__(self, primaries_E: PrimariesVector, rank: int, num_redundant: int) -> None:
        self.rank = rank
        self.num_redundant = num_redundant
        self.primary_experts: tuple[int, ...] = tuple(int(e) for e in np.flatnonzero(primaries_E == rank))
        self.row_E = np.full(primaries_E.shape[0], -1, dtype=np.int32)
        """Row of each expert's primary on this worker, -1 elsewhere."""
        self.row_E[list(self.primary_experts)] = np.arange(len(self.primary_experts), dtype=np.int32)

    @property
    def num_rows(self) -> int:
        """S: primaries and redundant slots."""
        return len(self.primary_experts) + self.num_redundant

    def redundant_row(self, slot: int) -> int:
        """Store row of redundant slot ``slot``."""
        assert 0 <= slot < self.num_redundant
        return len(self.primary_experts) + slot
