"""``afore-ahead``: ``afore-plus``, and where a target's window is short, copies that start before its demand is known.

Sees: the next layer's gate applied to this layer's hidden states, and for the first layer the demand of the same microbatch's step
before; by these, copies go ahead. Then the true demand, on which the target is planned as ever: over what is there, with the copies
that are still worth it. So a wrong prediction costs a port some time and a slot its replica, never an answer or a plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import AforeAheadOptions
from afore.core.target import Target
from afore.scheduler.policies.afore_plus import AforePlus
from afore.scheduler.policies.base import Action, Copies, Demand, PolicyContext, Predictor

Flags = NDArray[np.bool_]

_LEAD_KEPT = 0.9
"""Of the mean lead so far, at each new one."""


class AforeAhead(AforePlus):
    """A slot that was bound ahead of a target is kept for it until its demand is there."""

    name: str = "afore-ahead"
    wants_predictions: Predictor | None = "next-gate"
    options: AforeAheadOptions

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        layers = range(context.num_layers)
        self._ahead_L: list[dict[int, tuple[Flags, float]]] = [{} for _ in layers]
        """Of each layer: microbatch → slots that its next target is to find, and when it was predicted."""
        self._fresh_L: list[Flags] = [self._unused_NR.copy() for _ in layers]
        """Slots bound ahead since the layer's last plan."""
        self._lead_us_L: list[float] = [0.0 for _ in layers]
        """How long before its demand a target of the layer was predicted, on average."""
        self._first: dict[int, Demand] = {}
        """Microbatch → its last demand of the first layer."""

    @staticmethod
    def _its_options(context: PolicyContext) -> AforeAheadOptions:
        return context.options.afore_ahead

    def on_prediction(self, target: Target, predicted_E: Demand, now_us: float) -> list[Action]:
        layer = target.layer
        costs = self.costs(layer)
        if costs.window_us >= self.options.window_copies * costs.copy_us:
            return []
        kept_NR = self._protected_for(layer, target.microbatch)
        planned = replace(costs, window_us=costs.window_us + self._lead_us_L[layer])
        plan = self._planners[layer].plan(predicted_E, kept_NR, planned)
        self._ahead_L[layer][target.microbatch] = (plan.used_NR, now_us)
        for _expert, worker, slot in plan.copies:
            self._fresh_L[layer][worker, slot] = True
        return [Copies(layer, tuple(plan.copies))] if plan.copies else []

    def on_step_end(self, microbatch: int, step: int, now_us: float) -> list[Action]:
        demand_E = self._first.pop(microbatch, None)
        if demand_E is None or not self.options.first_layer:
            return []
        return self.on_prediction(Target(0, microbatch, step + 1), demand_E, now_us)

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        layer = target.layer
        if layer == 0:
            self._first[target.microbatch] = demand_E.copy()
        ahead = self._ahead_L[layer].pop(target.microbatch, None)
        if ahead is not None:
            lead_us = max(0.0, now_us - ahead[1])
            known_us = self._lead_us_L[layer]
            self._lead_us_L[layer] = _LEAD_KEPT * known_us + (1 - _LEAD_KEPT) * lead_us if known_us else lead_us
        actions = super().on_demand(target, demand_E, now_us)
        self._fresh_L[layer][:] = False
        return actions

    def protected(self, layer: int) -> Flags | None:
        """U_t, and what was bound or kept for targets that are still to come."""
        return self._protected_for(layer, None)

    def used(self, layer: int, used_NR: Flags) -> Flags:
        """Slots bound ahead since the last plan count as bound by this one."""
        return used_NR | self._fresh_L[layer]

    def reset_layer(self, layer: int) -> None:
        super().reset_layer(layer)
        self._ahead_L[layer].clear()

    def _protected_for(self, layer: int, microbatch: int | None) -> Flags:
        """For the target of ``microbatch``: what was kept for it before is its own to use, but copies that are under way stay."""
        protected_NR = self._fresh_L[layer].copy()
        window_NR = self._windows[layer].protected()
        if window_NR is not None:
            protected_NR |= window_NR
        for number, (used_NR, _at_us) in self._ahead_L[layer].items():
            if number != microbatch:
                protected_NR |= used_NR
        return protected_NR
