"""``lina``: replicas of the experts that the next layer is predicted to need most, from how experts have followed one another.

Sees: for every layer, which experts of the next one past tokens chose after each expert of this one; this layer's demand.
Copies start: at once, a layer ahead of their target. With ``replan``, where that was wrong, also true demand, with exposed copies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import LinaOptions
from afore.core.target import Target
from afore.scheduler.plan import Copy
from afore.scheduler.policies.base import Action, Copies, Demand, PolicyContext, Predictor
from afore.scheduler.policies.slotted import Slotted, even_counts

AHEAD = "lina: its copies went ahead of it"
NOT_PREDICTED = "lina: nothing was predicted for it"


class Lina(Slotted):
    """Each target uses at most ⌊R/M⌋ slots of a worker, at least one, filled for it or found so: more would leave the targets that
    are in flight beside it none that may be rebound."""

    name: str = "lina"
    wants_predictions: Predictor | None = "transitions"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.options: LinaOptions = context.options.lina
        slots_N = context.planner.slots_N
        self._part_N = np.minimum(slots_N, np.maximum(1, slots_N // context.num_microbatches))
        self._predicted_top: dict[tuple[int, int], frozenset[int]] = {}
        """(layer, microbatch) → the 2K experts that its next target is predicted to need most."""

    def on_prediction(self, target: Target, predicted_E: Demand, now_us: float) -> list[Action]:
        copies = self._place(target, predicted_E)
        self._predicted_top[target.layer, target.microbatch] = self._top(predicted_E)
        return [Copies(target.layer, copies)] if copies else []

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        replicas = self.placed(target)
        predicted = self._predicted_top.pop((target.layer, target.microbatch), frozenset())
        if replicas is None:
            return [self.assign(target, {}, NOT_PREDICTED)]
        copies: tuple[Copy, ...] = ()
        if self.options.replan and predicted != self._top(demand_E):
            copies = self._place(target, demand_E)
            replicas = self.placed(target) or {}
        assign = self.assign(target, even_counts(replicas, demand_E), "" if copies else AHEAD)
        return [Copies(target.layer, copies, "arrival"), assign] if copies else [assign]

    def _top(self, load_E: Demand) -> frozenset[int]:
        """The 2K experts with most pairs, the first on ties; none without pairs."""
        order = np.argsort(-np.asarray(load_E, np.int64), kind="stable")[: 2 * self._context.experts_per_token]
        return frozenset(e for e in order.tolist() if load_E[e] > 0)

    def _place(self, target: Target, load_E: Demand) -> tuple[Copy, ...]:
        """Chooses the target's replicas, and returns the copies that they need."""
        slots = self._slots_L[target.layer]
        safe_NR = slots.safe_NR()
        found, missing = self._choose(np.asarray(load_E, np.float64), target.layer, safe_NR)
        for (_e, w), r in found.items():
            safe_NR[w, r] = False
        copies: list[Copy] = []
        for e, w in missing:
            slot = slots.choose(w, safe_NR)
            safe_NR[w, slot] = False
            copies.append((e, w, slot))
        slots.bind(copies)
        self.place(target, found | {(e, w): slot for e, w, slot in copies})
        return tuple(copies)

    def _choose(
        self, load_E: NDArray[np.float64], layer: int, safe_NR: NDArray[np.bool_]
    ) -> tuple[dict[tuple[int, int], int], list[tuple[int, int]]]:
        """Greatest load/copies → least loaded worker with a slot and without the expert, until slots or loads are used up.

        Returns replicas that are there already, (expert, worker) → slot, and (expert, worker) of those to copy.
        """
        slots = self._slots_L[layer]
        table_NR = slots.table_NR
        copies_E = np.ones(len(load_E))
        holds_EN = self._primaries_E[:, None] == np.arange(self._N)[None, :]
        load_N = np.bincount(self._primaries_E, weights=load_E, minlength=self._N)
        safe_N, room_N = safe_NR.sum(axis=1), self._part_N.copy()
        there_EN = np.zeros_like(holds_EN)
        workers, places = np.nonzero(table_NR >= 0)
        there_EN[table_NR[workers, places], workers] = True
        found: dict[tuple[int, int], int] = {}
        missing: list[tuple[int, int]] = []
        open_E = load_E > 0
        while open_E.any():
            e = int(np.where(open_E, load_E / copies_E, -1.0).argmax())
            # A replica that is there, in a slot that may be rebound, takes that slot from what may be copied into.
            reusable_N = there_EN[e] & ~((safe_N == 0) & _is_safe(table_NR, safe_NR, e))
            eligible_N = (room_N > 0) & ((safe_N > 0) | reusable_N) & ~holds_EN[e]
            if not eligible_N.any():
                open_E[e] = False
                continue
            w = int(np.where(eligible_N, load_N, np.inf).argmin())
            if reusable_N[w]:
                r = found[e, w] = slots.find(e, w)
                safe_N[w] -= int(safe_NR[w, r])
            else:
                missing.append((e, w))
                safe_N[w] -= 1
            room_N[w] -= 1
            each, more = load_E[e] / copies_E[e], load_E[e] / (copies_E[e] + 1)
            load_N[holds_EN[e]] += more - each
            load_N[w] += more
            holds_EN[e, w] = True
            copies_E[e] += 1
        return found, missing


def _is_safe(table_NR: NDArray[np.int32], safe_NR: NDArray[np.bool_], expert: int) -> NDArray[np.bool_]:
    """Workers [N] whose replica of the expert is in a slot that may be rebound."""
    found_N: NDArray[np.bool_] = ((table_NR == expert) & safe_NR).any(axis=1)
    return found_N
