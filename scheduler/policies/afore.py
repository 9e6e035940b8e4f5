"""``afore``: Algorithm 1 on each target's own demand; copies start at once, under the targets before it (paper §3, Approach 3)."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.planner import Planner, ProtectedWindow
from afore.scheduler.policies.base import Action, Assign, Copies, CopyTime, Demand, PolicyContext, Quiet

NOTHING_TO_PLAN_ON = "no demand of a previous step to plan on"


class CompiledLayer(NamedTuple):
    """A layer's state, for the compiled call."""

    buffer: NDArray[np.int32]
    scratch: NDArray[np.int32] | None
    window: NDArray[np.bool_]


class Afore(Quiet):
    """One planner and one protected window per layer. The ablations change what it plans on, and when copies start."""

    planner: ClassVar[type[Planner]] = Planner

    name: str = "afore"
    start: CopyTime = "now"

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        layers = range(context.num_layers)
        self._planners = [self.planner(context.planner, context.primaries_E) for _ in layers]
        self._windows = [ProtectedWindow(self.protected_plans) for _ in layers]
        self._unused_NR: NDArray[np.bool_] = np.zeros(context.planner.empty_slots().shape, np.bool_)

    @property
    def protected_plans(self) -> int:
        """How many of a layer's last plans keep their slots: M - 1, all that can still be in flight."""
        return self._context.num_microbatches - 1

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        window = self._windows[target.layer]
        planned_E = self.planned_demand(target, demand_E)
        if planned_E is None:
            window.push(self._unused_NR)
            return [Assign(target, (), skipped=NOTHING_TO_PLAN_ON)]
        costs = self.costs(target.layer)
        plan = self._planners[target.layer].plan(planned_E, self.protected(target.layer), costs)
        window.push(self.used(target.layer, plan.used_NR))
        assign = Assign(target, tuple(plan.shares()), plan, costs, plan.skipped)
        if not plan.copies:
            return [assign]
        return [Copies(target.layer, tuple(plan.copies), self.start), assign]

    def protected(self, layer: int) -> NDArray[np.bool_] | None:
        """U_t of the layer's next target, for records; none before the first."""
        return self._windows[layer].protected()

    def used(self, layer: int, used_NR: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Slots that the layer's last plan uses or bound, from those of the plan itself."""
        return used_NR

    def adopt_layer(self, layer: int, slots_NR: NDArray[np.int32]) -> None:
        """Before the first target: the layer's slots hold these experts."""
        self._planners[layer].adopt(slots_NR)

    def reset_layer(self, layer: int) -> None:
        """Slots and A_{t-1} are forgotten; the window stays, because targets that were accepted still use their slots."""
        self._planners[layer].reset()

    def compiled_layers(self) -> list[CompiledLayer] | None:
        """Each layer's state, for the compiled call; None where that would not do what ``on_demand`` does."""
        kind = type(self)
        if kind.on_demand is not Afore.on_demand or kind.planned_demand is not Afore.planned_demand:
            return None
        if kind.protected is not Afore.protected or kind.used is not Afore.used:
            return None
        if any(type(planner).plan is not Planner.plan for planner in self._planners):
            return None
        N, R = self._unused_NR.shape
        return [
            CompiledLayer(planner.buffer, planner.scratch, window.flags((N, R)))
            for planner, window in zip(self._planners, self._windows, strict=True)
        ]

    def planned_demand(self, target: Target, demand_E: Demand) -> Demand | None:
        """The demand that the target is planned on; None: none is known, so it runs on primaries."""
        return demand_E

    def costs(self, layer: int) -> Costs:
        """The estimates that the layer is planned with."""
        return self._context.costs(layer)
