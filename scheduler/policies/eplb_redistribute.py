"""``eplb-redistribute``: EPLB's replicas, and over them the pairs by true demand. Ours, not a published system: a strong extra.

Sees: history for its replicas, the target's true demand for its pairs. Copies start as EPLB's do.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from afore.core.slots import EMPTY
from afore.scheduler.planner import Planner
from afore.scheduler.policies.base import Demand, PolicyContext
from afore.scheduler.policies.eplb import Eplb


class EplbRedistribute(Eplb):
    """Pairs move between replicas that are there as Algorithm 1 moves them before it copies: a planner without a copy budget."""

    name: str = "eplb-redistribute"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        config = dataclasses.replace(context.planner, copy_budget=0)
        self._empty_NR = config.empty_slots()
        self._planners = [Planner(config, context.primaries_E) for _ in range(context.num_layers)]
        self._adopted: list[dict[tuple[int, int], int]] = [{} for _ in self._planners]

    def _counts(self, layer: int, demand_E: Demand) -> dict[tuple[int, int], tuple[int, int]]:
        usable, planner = self.usable(layer), self._planners[layer]
        if usable != self._adopted[layer]:
            # Where only EPLB's own are known to the planner, a slot that is to be replaced gets nothing.
            table_NR = self._empty_NR.copy()
            for (e, w), r in usable.items():
                assert table_NR[w, r] == EMPTY
                table_NR[w, r] = e
            planner.adopt(table_NR)
            self._adopted[layer] = usable
        plan = planner.plan(np.asarray(demand_E), None, self._context.costs(layer))
        return {(e, w): (r, count) for e, w, r, count in plan.shares()}
