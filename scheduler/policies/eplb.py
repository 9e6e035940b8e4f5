"""``eplb``: replicas from the statistics of past steps, every so many steps; pairs split evenly over them.

Sees: demand of completed steps, summed over a window. Copies start: in ``stop`` mode when the next target is about to execute, all
layers at once; in ``async`` mode at once, one layer a step, and replicas take work once M more steps are over.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import EplbOptions
from afore.core.slots import EMPTY
from afore.core.target import Target
from afore.scheduler.eplb import moves, redundant_layout
from afore.scheduler.load_window import LoadWindow
from afore.scheduler.plan import Copy
from afore.scheduler.policies.base import Action, Copies, CopyTime, Demand, PolicyContext
from afore.scheduler.policies.slotted import Slotted, even_counts

NOT_NOW = "eplb: replicas change only when experts are rebalanced"


class Eplb(Slotted):
    """Primaries stay where they are (the runtime's rule); the redundant slots are planned anew.

    A slot whose replica is to be replaced takes no more work, and is copied into once it is safe: no target that could still use
    it is in flight.
    """

    name: str = "eplb"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.options: EplbOptions = context.options.eplb
        self._window = LoadWindow(self.options.window_steps, context.num_layers, context.planner.num_experts)
        self._start: CopyTime = "arrival" if self.options.mode == "stop" else "now"
        empty_NR = context.planner.empty_slots()
        self._wanted_L = [empty_NR.copy() for _ in range(context.num_layers)]
        """The layout that each layer is to have."""
        self._ready_L = [np.zeros(empty_NR.shape, np.int64) for _ in range(context.num_layers)]
        """Completed steps from which a slot's replica takes work."""
        self._to_rebalance: deque[int] = deque()

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        self._window.add(target, demand_E)
        copies = self._copies(target.layer)
        assign = self.assign(target, self._counts(target.layer, demand_E), "" if copies else NOT_NOW)
        return [Copies(target.layer, copies, self._start), assign] if copies else [assign]

    def on_step_end(self, microbatch: int, step: int, now_us: float) -> list[Action]:
        before = self._window.completed
        self._window.close(microbatch)
        if self._window.completed == before:
            return []
        if self.options.due(self._window.completed):
            # A rebalancing that has not come to an end gives way to the next: its layers' statistics are older.
            self._to_rebalance = deque(range(self._context.num_layers))
        turns = len(self._to_rebalance) if self.options.mode == "stop" else min(1, len(self._to_rebalance))
        actions: list[Action] = []
        for layer in [self._to_rebalance.popleft() for _ in range(turns)]:
            self._rebalance(layer)
            if copies := self._copies(layer):
                actions.append(Copies(layer, copies, self._start))
        return actions

    def adopt_layer(self, layer: int, slots_NR: NDArray[np.int32]) -> None:
        super().adopt_layer(layer, slots_NR)
        self._wanted_L[layer] = slots_NR.copy()

    def usable(self, layer: int) -> dict[tuple[int, int], int]:
        """(expert, worker) → slot of the replicas that take work now: those that stay, and that have been there for long enough."""
        table_NR, wanted_NR = self._slots_L[layer].table_NR, self._wanted_L[layer]
        usable_NR = (table_NR == wanted_NR) & (table_NR >= 0) & (self._ready_L[layer] <= self._window.completed)
        return {(int(table_NR[w, r]), w): r for w, r in np.argwhere(usable_NR).tolist()}

    def _counts(self, layer: int, demand_E: Demand) -> dict[tuple[int, int], tuple[int, int]]:
        """(expert, worker) → (slot, pairs) of the redundant replicas."""
        return even_counts(self.usable(layer), demand_E)

    def _rebalance(self, layer: int) -> None:
        """Plans the layer's redundant slots anew. A layer without load keeps what it has."""
        load_E = self._window.load_LE[layer]
        if load_E.any():
            held_N = redundant_layout(load_E, self._primaries_E, self._context.planner.slots_N)
            self._wanted_L[layer] = moves(self._slots_L[layer].table_NR, held_N)

    def _copies(self, layer: int) -> tuple[Copy, ...]:
        """What is wanted, not there, and may be copied now."""
        slots, wanted_NR = self._slots_L[layer], self._wanted_L[layer]
        due_NR = (wanted_NR != slots.table_NR) & (wanted_NR > EMPTY)
        if not due_NR.any():
            return ()
        due_NR &= slots.safe_NR()
        copies = tuple((int(wanted_NR[w, r]), w, r) for w, r in np.argwhere(due_NR).tolist())
        slots.bind(copies)
        settle = 0 if self.options.mode == "stop" else self._context.num_microbatches
        self._ready_L[layer][due_NR] = self._window.completed + settle
        return copies
