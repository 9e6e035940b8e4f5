"""One target on its way through the model stream, and what is measured of it.

Definitions, once: D = a copy's submission to its completion; W = its submission to the model stream reaching its wait; exposed
O = max(0, D - W); slack = W - D. All are differences of the device's own stamps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from afore.core.plan import PlanEntry
from afore.core.record import record
from afore.workers.device.base import I32, Event, Kernels
from afore.workers.experts import Store
from afore.workers.migrator import Readiness
from afore.workers.partition import count_and_crc
from afore.workers.staging import Staging

NO_SHARES: I32 = np.zeros((0, 4), dtype=np.int32)


class TargetCompute:
    """What the model stream runs for one target; ``mismatched`` says afterwards what it found."""

    __slots__ = ("_entry", "_kernels", "_staging", "_store", "mismatched")

    def __init__(self, entry: PlanEntry, staging: Staging, kernels: Kernels, store: Store) -> None:
        self._entry = entry
        self._staging = staging
        self._kernels = kernels
        self._store = store
        self.mismatched = False

    @property
    def num_primaries(self) -> int:
        """Store rows before the redundant ones."""
        return len(self._store.layout.primary_experts)

    def partition(self) -> None:
        """This worker's exact share of the pairs (eq. 11).

        Inputs whose demand is not the planned one run on primaries: every worker sees the same bytes, so all decide the same.
        """
        ids_TK, layout = self._staging.ids_TK, self._store.layout
        _, crc = count_and_crc(ids_TK, layout.row_E.shape[0])
        self.mismatched = crc != self._entry.demand_crc
        shares_X4 = NO_SHARES if self.mismatched else self._entry.shares_X4()
        self._kernels.partition(
            ids_TK, shares_X4, layout.row_E, layout.rank, layout.num_rows, self.num_primaries, self._staging.pairs
        )

    def experts(self) -> None:
        """The grouped MLP over this worker's pairs: partial rows of all tokens."""
        staging, layer = self._staging, self._entry.target.layer
        self._kernels.grouped_mlp(
            staging.hidden_TD,
            staging.weights_TK,
            staging.pairs,
            self._store.gate_up[layer],
            self._store.down[layer],
            staging.out_TD,
            self._store.shape.form,
            self._store.biases[layer],
        )

    def settle(self) -> None:
        """Called once the stream is past the target: ``mismatched`` and the pairs' counts are known from here on.

        Raises what a device could not say earlier.
        """


@record(kw_only=True)
class Flight:
    """A target between its turn and its replies."""

    entry: PlanEntry
    refused: bool
    """The plan was refused by some worker: the entry has no shares and copies any more."""
    taken_ns: int
    """When its copies could first be submitted."""
    staging: Staging
    copies: Sequence[Readiness]
    """What the plan names on this worker: each slot's content at its generation."""
    compute: TargetCompute
    began: Event
    """The stream has come to this target."""
    reached: Event
    """It has gathered, and now waits for the slots."""
    ready: Event
    """All slots are ready."""
    split: Event
    """The pairs are partitioned."""
    computed: Event
    """The experts have run: slots may be overwritten."""
    done: Event
    """The rows may be sent."""

    @property
    def num_primaries(self) -> int:
        """Store rows before the redundant ones."""
        return self.compute.num_primaries
