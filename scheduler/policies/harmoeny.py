"""``harmoeny``: tokens move from the most to the least loaded worker, and with them the experts they need.

Sees: the target's true demand, once its inputs are on the FFN side. Copies start: when the target is about to execute, or by option
as soon as its inputs are there. Nothing is kept for later targets unless asked.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import HarmoenyOptions
from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.plan import Copy
from afore.scheduler.policies.base import Action, Copies, Demand, PolicyContext
from afore.scheduler.policies.slotted import Slotted

NO_MOVE = "harmoeny: no worker is so far above the mean that a move pays"


def least_move(options: HarmoenyOptions, costs: Costs, tile_tokens: int) -> float:
    """q: given, or the published rule: tokens that compute for as long as their expert's copy takes; at least a tile."""
    if options.min_tokens is not None:
        return max(options.min_tokens, tile_tokens)
    if costs.tile_us == 0:
        return tile_tokens if costs.copy_us == 0 else math.inf
    return max(math.ceil(tile_tokens * costs.copy_us / costs.tile_us), tile_tokens)


class Harmoeny(Slotted):
    """Greedy rebalancing on true demand. A worker that needs a slot and has none takes no more."""

    name: str = "harmoeny"
    wants_inputs: bool = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.options: HarmoenyOptions = context.options.harmoeny
        self._demand: dict[tuple[int, int], tuple[Target, NDArray[np.int64]]] = {}
        """(layer, microbatch) → the target whose inputs are awaited, and its demand."""

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        self._demand[target.layer, target.microbatch] = (target, np.array(demand_E, np.int64))
        return []

    def on_inputs(self, target: Target, now_us: float) -> list[Action]:
        waiting = self._demand.pop((target.layer, target.microbatch), None)
        if waiting is None or waiting[0] != target:
            return [self.assign(target, {}, "harmoeny: its demand is not known")]
        costs = self._context.costs(target.layer)
        q = least_move(self.options, costs, self._context.planner.tile_tokens)
        pairs_EN, copies, slot_of = self._plan(target.layer, waiting[1], q)
        counts = {(e, w): (slot, int(pairs_EN[e, w])) for (e, w), slot in slot_of.items()}
        assign = self.assign(target, counts, "" if copies else NO_MOVE)
        return [Copies(target.layer, tuple(copies), self.options.start), assign] if copies else [assign]

    def _plan(
        self, layer: int, demand_E: NDArray[np.int64], q: float
    ) -> tuple[NDArray[np.int64], list[Copy], dict[tuple[int, int], int]]:
        """(pairs [E, N], copies, (expert, worker) → slot of its replica)."""
        slots = self._slots_L[layer]
        pairs_EN = np.zeros((len(demand_E), self._N), np.int64)
        pairs_EN[np.arange(len(demand_E)), self._primaries_E] = demand_E
        load_N = pairs_EN.sum(axis=0)
        open_NR = slots.safe_NR()
        full_N = np.zeros(self._N, np.bool_)  # no slot for the last expert that they were offered
        copies: list[Copy] = []
        slot_of: dict[tuple[int, int], int] = {}
        mean = int(demand_E.sum()) // self._N
        while int(load_N.max()) > mean and not full_N.all():
            source = int(load_N.argmax())
            lightest = int(np.where(full_N, np.iinfo(np.int64).max, load_N).argmin())
            if load_N[lightest] + q > mean:
                break
            expert = int(pairs_EN[:, source].argmax())
            if pairs_EN[expert, source] < q:
                break
            place = (expert, lightest)
            if self._primaries_E[expert] != lightest and place not in slot_of:
                slot = slots.find(expert, lightest) if self.options.reuse else -1
                if slot < 0:
                    slot = slots.choose(lightest, open_NR)
                    if slot < 0:
                        full_N[lightest] = True
                        continue
                    copies.append((expert, lightest, slot))
                    slots.bind(copies[-1:])
                open_NR[lightest, slot] = False
                slot_of[place] = slot
            count = min(int(pairs_EN[expert, source]), int(load_N[source]) - mean, mean - int(load_N[lightest]))
            pairs_EN[expert, source] -= count
            pairs_EN[expert, lightest] += count
            load_N[source] -= count
            load_N[lightest] += count
        return pairs_EN, copies, slot_of
