"""What the baselines share: one ledger of redundant slots for each layer, and plans written down in it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from afore.core.target import Target
from afore.scheduler.policies.base import Assign, Demand, PolicyContext, Quiet
from afore.scheduler.slot_ledger import SlotLedger
from afore.scheduler.split import even_split

Replicas = Mapping[tuple[int, int], int]
"""(expert, worker) → slot"""
Counts = Mapping[tuple[int, int], tuple[int, int]]
"""(expert, worker) → (slot, pairs)"""


def even_counts(replicas: Replicas, demand_E: Demand) -> dict[tuple[int, int], tuple[int, int]]:
    """An even split over an expert's replicas: the primary first, then by rank."""
    workers: dict[int, list[int]] = {}
    for e, w in sorted(replicas):
        workers.setdefault(e, []).append(w)
    counts = {}
    for e, holders in workers.items():
        split = even_split(int(demand_E[e]), 1 + len(holders))
        for w, count in zip(holders, split[1:], strict=True):
            counts[e, w] = (replicas[e, w], count)
    return counts


class Slotted(Quiet):
    """A policy without a planner."""

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._primaries_E = context.primaries_E
        self._N = context.planner.num_workers
        self._slots_L = [SlotLedger(context.planner, context.num_microbatches) for _ in range(context.num_layers)]
        self._placed: dict[tuple[int, int], tuple[Target, Replicas]] = {}
        """(layer, microbatch) → its next target, and the replicas that are meant for it."""

    def assign(self, target: Target, counts: Counts, skipped: str = "") -> Assign:
        """The target's assignment, written into its layer's ledger."""
        shares = tuple((e, w, slot, count) for (e, w), (slot, count) in sorted(counts.items()) if count > 0)
        self._slots_L[target.layer].planned(target.microbatch, [(w, slot) for _e, w, slot, _count in shares])
        return Assign(target, shares, skipped=skipped)

    def place(self, target: Target, replicas: Replicas) -> None:
        """These replicas are meant for ``target``, which is still to come: nothing rebinds their slots before."""
        self._placed[target.layer, target.microbatch] = (target, replicas)
        self._slots_L[target.layer].reserve(target.microbatch, [(w, slot) for (_e, w), slot in replicas.items()])

    def placed(self, target: Target) -> Replicas | None:
        """What was placed for the target; None: nothing, or the layer was reset meanwhile."""
        placed = self._placed.pop((target.layer, target.microbatch), None)
        return placed[1] if placed is not None and placed[0] == target else None

    def adopt_layer(self, layer: int, slots_NR: NDArray[np.int32]) -> None:
        """Before the first target: the layer's slots hold these experts."""
        self._slots_L[layer].bind([(int(slots_NR[w, r]), w, r) for w, r in np.argwhere(slots_NR >= 0).tolist()])

    def protected(self, layer: int) -> NDArray[np.bool_]:
        """Slots of the layer that may not be rebound now, for records; those that do not exist are among them."""
        protected_NR: NDArray[np.bool_] = ~self._slots_L[layer].safe_NR()
        return protected_NR

    def reset_layer(self, layer: int) -> None:
        self._slots_L[layer].reset()
        self._placed = {key: placed for key, placed in self._placed.items() if key[0] != layer}
