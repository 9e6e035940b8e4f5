"""Which target's demand is complete: announcements and vectors in, targets out; pure.

The engine announces a step with T_a of every attention worker; only those with rows take part. A vector that comes before its
announcement stays in its mailbox slot and is found when the announcement comes: the slot is not written again before the
target has been executed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from afore.core.demand import DemandVector
from afore.core.record import record
from afore.core.target import Target

Take = Callable[[int, int, Target], DemandVector | None]
"""(attention, microbatch, expected target) → that worker's vector when it has arrived whole."""


class Gathering:
    """A step's current layer: who is still awaited, and the sum of those who have come."""

    __slots__ = ("accepted_ns_A", "demand_E", "layer", "missing_A", "step", "tokens_A", "waiting", "words")

    def __init__(self, step: int, tokens_A: tuple[int, ...], num_experts: int) -> None:
        A = len(tokens_A)
        self.step = step
        self.tokens_A = tokens_A
        self.layer = 0
        self.words = np.zeros(2 * A + num_experts, np.int32)
        """What follows, for compiled callers: missing [A], tokens [A], demand [E]."""
        self.words[A : 2 * A] = tokens_A
        self.missing_A = self.words[:A]
        """1: this attention worker's vector is awaited."""
        self.demand_E = self.words[2 * A :]
        self.waiting = 0
        """How many are."""
        self.accepted_ns_A: list[int] = []
        """When each one was found whole, where somebody wants to know; 0: not yet, or nobody does."""
        self.begin_layer()

    def begin_layer(self) -> None:
        """Everybody with rows is awaited."""
        self.missing_A[:] = [tokens > 0 for tokens in self.tokens_A]
        self.waiting = int(self.missing_A.sum())
        self.demand_E[:] = 0
        self.forget_times()

    def forget_times(self) -> None:
        """Of the layer before."""
        self.accepted_ns_A = [0] * len(self.tokens_A)


@record
class Complete:
    """All vectors of a target have come."""

    target: Target
    tokens_A: tuple[int, ...]
    demand_E: DemandVector
    accepted_ns_A: tuple[int, ...] = ()
    """When each vector was found whole."""


class DemandBook:
    """Sums the vectors of the M microbatches' current targets."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        num_microbatches: int,
        take: Take,
        now_ns: Callable[[], int] = int,
    ) -> None:
        """``now_ns`` stamps vectors as they are taken (without it: 0)."""
        self._now_ns = now_ns
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._take = take
        self._steps_M: list[Gathering | None] = [None] * num_microbatches

    def announce(self, microbatch: int, step: int, tokens_A: tuple[int, ...]) -> list[Complete]:
        """``begin``, and the targets whose vectors are there already."""
        self.begin(microbatch, step, tokens_A)
        return self._collect(microbatch)

    def begin(self, microbatch: int, step: int, tokens_A: tuple[int, ...]) -> None:
        """A new step of ``microbatch``; what was left of the previous one (an aborted step) is forgotten."""
        self._steps_M[microbatch] = Gathering(step, tokens_A, self._num_experts)

    def drop(self, microbatch: int, step: int) -> None:
        """A target of this step was aborted: the microbatch is announced anew, and nothing more of this step will be complete."""
        state = self._steps_M[microbatch]
        if state is not None and state.step == step:
            self._steps_M[microbatch] = None

    def arrived(self, microbatch: int) -> list[Complete]:
        """A vector of ``microbatch`` came in: the targets that are complete now, in layer order."""
        return self._collect(microbatch)

    def gathering(self, microbatch: int) -> Gathering | None:
        """What is awaited of ``microbatch`` now, for a caller that gathers by itself; none between steps."""
        return self._steps_M[microbatch]

    def passed(self, microbatch: int) -> None:
        """The current layer of ``microbatch`` has been gathered and begun anew by such a caller."""
        state = self._steps_M[microbatch]
        assert state is not None
        state.layer += 1
        if state.layer == self._num_layers:
            self._steps_M[microbatch] = None

    def _collect(self, microbatch: int) -> list[Complete]:
        complete: list[Complete] = []
        while (state := self._steps_M[microbatch]) is not None:
            target = Target(layer=state.layer, microbatch=microbatch, step=state.step)
            for attention, missing in enumerate(state.missing_A.tolist()):
                if not missing:
                    continue
                vector_E = self._take(attention, microbatch, target)
                if vector_E is not None:
                    state.demand_E += vector_E
                    state.missing_A[attention] = 0
                    state.accepted_ns_A[attention] = self._now_ns()
                    state.waiting -= 1
            if state.waiting:
                break
            complete.append(Complete(target, state.tokens_A, state.demand_E.copy(), tuple(state.accepted_ns_A)))
            state.begin_layer()
            self.passed(microbatch)
        return complete
