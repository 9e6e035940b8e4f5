"""Which target's demand is complete: announcements and vectors in, targets out; pure.

The engine announces a step with T_a of every attention worker; only those with rows take part. A vector that comes before its
announcement stays in its mailbox slot and is found when the announcement comes: the slot is not written again before the
target has been executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from afore.core.demand import DemandVector
from afore.core.record import record
from afore.core.target import Target

Take = Callable[[int, int, Target], DemandVector | None]
"""(attention, microbatch, expected target) → that worker's vector when it has arrived whole."""


@dataclass(slots=True)
class _Step:
    step: int
    tokens_A: tuple[int, ...]
    layer: int
    missing: set[int]
    demand_E: DemandVector


@record
class Complete:
    """All vectors of a target have come."""

    target: Target
    tokens_A: tuple[int, ...]
    demand_E: DemandVector


class DemandBook:
    """Sums the vectors of the M microbatches' current targets."""

    def __init__(self, *, num_layers: int, num_experts: int, num_microbatches: int, take: Take) -> None:
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._take = take
        self._steps_M: list[_Step | None] = [None] * num_microbatches

    def announce(self, microbatch: int, step: int, tokens_A: tuple[int, ...]) -> list[Complete]:
        """A new step of ``microbatch``; what was left of the previous one (an aborted step) is forgotten."""
        self._steps_M[microbatch] = _Step(step, tokens_A, 0, self._participants(tokens_A), self._zero())
        return self._collect(microbatch)

    def drop(self, microbatch: int, step: int) -> None:
        """A target of this step was aborted: the microbatch is announced anew, and nothing more of this step will be complete."""
        state = self._steps_M[microbatch]
        if state is not None and state.step == step:
            self._steps_M[microbatch] = None

    def arrived(self, microbatch: int) -> list[Complete]:
        """A vector of ``microbatch`` came in: the targets that are complete now, in layer order."""
        return self._collect(microbatch)

    def _collect(self, microbatch: int) -> list[Complete]:
        complete: list[Complete] = []
        state = self._steps_M[microbatch]
        while state is not None:
            target = Target(layer=state.layer, microbatch=microbatch, step=state.step)
            for attention in sorted(state.missing):
                vector_E = self._take(attention, microbatch, target)
                if vector_E is not None:
                    state.demand_E += vector_E
                    state.missing.discard(attention)
            if state.missing:
                break
            complete.append(Complete(target, state.tokens_A, state.demand_E))
            state.layer += 1
            state.missing = self._participants(state.tokens_A)
            state.demand_E = self._zero()
            if state.layer == self._num_layers:
                self._steps_M[microbatch] = state = None
        return complete

    def _zero(self) -> DemandVector:
        return np.zeros(self._num_experts, dtype=np.int32)

    @staticmethod
    def _participants(tokens_A: tuple[int, ...]) -> set[int]:
        return {attention for attention, tokens in enumerate(tokens_A) if tokens > 0}
