"""Which target's prediction is complete: announcements, vectors and planned targets in, predictions out; pure.

As ``DemandBook``, but nothing waits for a prediction: one that is not complete when its target's demand is, is dropped; one that a
later one has overwritten is never found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afore.core.demand import DemandVector
from afore.core.target import Target
from afore.scheduler.demand_book import Complete, Take


@dataclass(slots=True)
class _Step:
    """A microbatch's step: the layer whose prediction is gathered, who is still awaited, and the sum of those who have come."""

    step: int
    tokens_A: tuple[int, ...]
    layer: int
    missing: set[int]
    sum_E: DemandVector


class PredictionBook:
    """Sums the predictions of the M microbatches' next targets. The first layer has none."""

    def __init__(self, *, num_layers: int, num_experts: int, num_microbatches: int, take: Take) -> None:
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._take = take
        self._steps_M: list[_Step | None] = [None] * num_microbatches

    def begin(self, microbatch: int, step: int, tokens_A: tuple[int, ...]) -> None:
        """A new step of ``microbatch``."""
        state = _Step(step, tokens_A, 0, set(), np.zeros(self._num_experts, np.int32))
        self._steps_M[microbatch] = state
        self._expect(state, 1)

    def drop(self, microbatch: int, step: int) -> None:
        """A target of this step was aborted."""
        state = self._steps_M[microbatch]
        if state is not None and state.step == step:
            self._steps_M[microbatch] = None

    def planned(self, target: Target) -> None:
        """The target's demand is complete: it needs no prediction any more."""
        state = self._steps_M[target.microbatch]
        if state is not None and state.step == target.step and state.layer <= target.layer:
            self._expect(state, target.layer + 1)

    def arrived(self, microbatch: int) -> list[Complete]:
        """A prediction of ``microbatch`` came in, or there is room for one: those that are complete now, in layer order."""
        complete: list[Complete] = []
        while (state := self._steps_M[microbatch]) is not None and state.layer < self._num_layers:
            target = Target(layer=state.layer, microbatch=microbatch, step=state.step)
            for attention in sorted(state.missing):
                vector_E = self._take(attention, microbatch, target)
                if vector_E is not None:
                    state.sum_E += vector_E
                    state.missing.discard(attention)
            if state.missing:
                break
            complete.append(Complete(target, state.tokens_A, state.sum_E.copy()))
            self._expect(state, state.layer + 1)
        return complete

    @staticmethod
    def _expect(state: _Step, layer: int) -> None:
        state.layer = layer
        state.missing = {attention for attention, tokens in enumerate(state.tokens_A) if tokens > 0}
        state.sum_E[:] = 0
