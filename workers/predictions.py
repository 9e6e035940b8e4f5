"""What an attention worker predicts of the next layer's demand, for policies that ask for it (``wants_predictions``)."""

from __future__ import annotations

from typing import Any, Protocol

from afore.core.demand import DemandVector, count_demand
from afore.core.target import Target
from afore.models.attention import I32, AttentionModel, Routed
from afore.models.config import ModelSpec
from afore.scheduler.policies.base import Predictor
from afore.scheduler.predictors import Transitions


class Predictions(Protocol):
    """One attention worker's, over all its steps."""

    def predict(self, model: AttentionModel, state: Any, routed: Routed, target: Target) -> DemandVector | None:
        """The next layer's demand [E] of the rows of ``target``, whose experts are being computed; None after the last layer."""
        ...


class ByTransitions:
    """From this layer's demand and how experts have followed one another in this worker's own steps so far (Lina)."""

    def __init__(self, spec: ModelSpec) -> None:
        self._num_layers, self._num_experts = spec.num_moe_layers, spec.num_experts
        self._transitions = Transitions(self._num_layers, self._num_experts)
        self._before: dict[int, tuple[Target, I32]] = {}
        """Microbatch → its last target, and the experts that its rows chose."""

    def predict(self, model: AttentionModel, state: Any, routed: Routed, target: Target) -> DemandVector | None:
        before = self._before.pop(target.microbatch, None)
        if before is not None and before[0] == Target(target.layer - 1, target.microbatch, target.step):
            self._transitions.observe(target.layer - 1, before[1], routed.ids_TK)
        if target.layer == self._num_layers - 1:
            return None
        self._before[target.microbatch] = (target, routed.ids_TK.copy())
        return self._transitions.predict(target.layer, count_demand(routed.ids_TK, self._num_experts))


class ByNextGate:
    """By the next layer's gate on this layer's hidden states (Libra)."""

    def __init__(self, spec: ModelSpec) -> None:
        self._num_layers, self._num_experts = spec.num_moe_layers, spec.num_experts

    def predict(self, model: AttentionModel, state: Any, routed: Routed, target: Target) -> DemandVector | None:
        if target.layer == self._num_layers - 1:
            return None
        return count_demand(model.next_choices(state, target.layer), self._num_experts)


def predictions_by(predictor: Predictor | None, spec: ModelSpec) -> Predictions | None:
    """What predicts so; None where nothing is asked for."""
    if predictor is None:
        return None
    return ByTransitions(spec) if predictor == "transitions" else ByNextGate(spec)
