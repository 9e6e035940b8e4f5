"""``eplb-full``: EPLB as it is defined, every slot movable, primaries too. For replay and evaluation; a running system refuses it.

In the runtime a map of primaries belongs to an epoch, so each new layout would be an epoch change. What drives a replay:

    policy = EplbFull(context)
    for each target in order:
        assign_EN = policy.on_demand(target, demand_E)      pairs of each expert and worker, under the layout as it is
        after the step's last layer:
            for layout in policy.on_step_end(microbatch, step):
                layout.moved                                 (expert, worker, slot): len × expert bytes were copied

Beside the ``Policy`` protocol: the same two events, ``FullLayout`` where others answer ``Copies``, and the assignment as a matrix,
because there is no primary that the rest would run on. Letters: E experts, N workers, R redundant slots, S = E/N + R slots.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import EplbOptions
from afore.core.record import record
from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.core.target import Target
from afore.scheduler.eplb import full_layout, moves
from afore.scheduler.load_window import LoadWindow
from afore.scheduler.plan import Copy
from afore.scheduler.policies.base import CopyTime, Demand, PolicyContext
from afore.scheduler.split import even_split


@record
class FullLayout:
    """A layer's new layout: from now on its targets are assigned under it."""

    layer: int
    experts_NS: NDArray[np.int32]
    """Expert in each slot, -2 where a worker has fewer."""
    moved: tuple[Copy, ...]
    """(expert, worker, slot): what had to be copied; what a worker kept stays in its slot."""
    start: CopyTime
    """arrival: at once for all layers, and exposed (mode stop). now: one layer a step, hidden (mode async)."""


class EplbFull:
    """N·(E/N + R) slots packed anew; pairs split evenly over an expert's replicas, by slot."""

    name: str = "eplb-full"
    moves_primaries: ClassVar[bool] = True
    """Why a running system refuses it."""

    def __init__(self, context: PolicyContext) -> None:
        self.options: EplbOptions = context.options.eplb
        self._N, self._L = context.planner.num_workers, context.num_layers
        primaries_N = np.bincount(context.primaries_E, minlength=self._N)
        self._sizes_N = primaries_N + context.planner.slots_N
        first_NS = np.full((self._N, int(self._sizes_N.max())), NO_SUCH_SLOT, np.int32)
        for w in range(self._N):
            first_NS[w, : self._sizes_N[w]] = EMPTY
            first_NS[w, : primaries_N[w]] = np.flatnonzero(context.primaries_E == w)
        self._experts_L = [first_NS.copy() for _ in range(self._L)]
        self._window = LoadWindow(self.options.window_steps, self._L, context.planner.num_experts)
        self._to_rebalance: deque[int] = deque()

    def layout_NS(self, layer: int) -> NDArray[np.int32]:
        """The layer's layout now: expert, -1 empty, -2 no such slot. A copy."""
        return self._experts_L[layer].copy()

    def on_demand(self, target: Target, demand_E: Demand, now_us: float = 0.0) -> NDArray[np.int64]:
        """Pairs of each expert and worker [E, N] for the target's true demand [E]."""
        self._window.add(target, demand_E)
        return assign_evenly(self._experts_L[target.layer], demand_E)

    def on_step_end(self, microbatch: int, step: int, now_us: float = 0.0) -> list[FullLayout]:
        """The step's last layer has been assigned: the layouts that change now."""
        before = self._window.completed
        self._window.close(microbatch)
        if self._window.completed == before:
            return []
        if self.options.due(self._window.completed):
            self._to_rebalance = deque(range(self._L))
        turns = len(self._to_rebalance) if self.options.mode == "stop" else min(1, len(self._to_rebalance))
        return [self._rebalance(self._to_rebalance.popleft()) for _ in range(turns)]

    def _rebalance(self, layer: int) -> FullLayout:
        before_NS = self._experts_L[layer]
        load_E = self._window.load_LE[layer]
        held_N = full_layout(load_E, self._sizes_N, groups=self.options.groups, nodes=self.options.nodes)
        after_NS = self._experts_L[layer] = moves(before_NS, held_N)
        moved = tuple((int(after_NS[w, s]), w, s) for w, s in np.argwhere(after_NS != before_NS).tolist())
        return FullLayout(layer, after_NS.copy(), moved, "arrival" if self.options.mode == "stop" else "now")


def assign_evenly(experts_NS: NDArray[np.int32], demand_E: Demand) -> NDArray[np.int64]:
    """Pairs [E, N] of an even split over each expert's replicas, remainders to the first ones by (worker, slot)."""
    assign_EN = np.zeros((len(demand_E), len(experts_NS)), np.int64)
    workers_E: list[list[int]] = [[] for _ in range(len(demand_E))]
    for w, s in np.argwhere(experts_NS >= 0).tolist():
        workers_E[int(experts_NS[w, s])].append(w)
    for e in np.flatnonzero(demand_E).tolist():
        for w, count in zip(workers_E[e], even_split(int(demand_E[e]), len(workers_E[e])), strict=True):
            assign_EN[e, w] += count
    return assign_EN
