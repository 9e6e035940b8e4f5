"""``--record``: what a policy was told and what it answered, row by row, into a trace (``afore.scheduler.traces``).

The plain way calls ``Recorded``, a policy that passes everything on; the compiled way says what it did (``Recorder.planned``). Rows
are written as ``TraceSink`` says: a disk that refuses ends the recording, never the scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.plan import CopyStart
from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.policies.base import Action, Assign, Copies, Demand, Policy, Quiet
from afore.scheduler.trace_sink import TraceSink
from afore.scheduler.traces import Answer, Event, TraceHeader, TraceTarget


class WatchedCosts:
    """The cost model as a policy reads it, which remembers what was read."""

    def __init__(self, costs: Callable[[int], Costs]) -> None:
        self._costs = costs
        self.read: dict[int, Costs] = {}
        """Since somebody looked."""

    def __call__(self, layer: int) -> Costs:
        found = self.read[layer] = self._costs(layer)
        return found


class Recorder(TraceSink):
    """One run's. ``counters`` get ``recorded`` rows, and ``record_failed`` where the disk refused."""

    def __init__(
        self,
        path: str,
        header: TraceHeader,
        *,
        costs: WatchedCosts,
        counters: Counter[str],
        now_ns: Callable[[], int],
    ) -> None:
        self._header = header
        self._costs = costs
        self._counters = counters
        self._now_ns = now_ns
        self._told_L: dict[int, Costs] = {}
        """Estimates of layers that COSTS rows have said."""
        super().__init__(path, header)

    def begin(self) -> None:
        """A policy is about to be told of something: what was read of the cost model before has nothing to do with it."""
        self._costs.read.clear()

    def asked(
        self,
        event: Event,
        target: Target,
        demand_E: Demand | None,
        answer: Answer | None,
        protected_NR: NDArray[np.bool_] | None,
        now_ns: int,
    ) -> None:
        """A policy was told of ``event``; what it read of the cost model meanwhile is in ``WatchedCosts``."""
        costs = self._read_costs(target)
        tokens = int(demand_E.sum()) // self._header.top_k if demand_E is not None and self._header.top_k else 0
        self.row(
            TraceTarget(
                target=target,
                demand_E=None if demand_E is None else demand_E.astype(np.int32),
                event=event,
                tokens=tokens,
                now_ns=now_ns,
                answer=answer,
                protected_NR=protected_NR,
                costs=costs,
            )
        )

    def planned(
        self,
        target: Target,
        demand_E: Demand,
        planned: tuple[NDArray[np.int32], NDArray[np.int32]],
        start: int,
        protected_NR: NDArray[np.bool_],
        now_ns: int,
    ) -> None:
        """The compiled way has planned a target."""
        shares_X4, copies_X3 = planned
        copies_X5 = np.column_stack(
            (np.full(len(copies_X3), target.layer, np.int32), copies_X3, np.full(len(copies_X3), start, np.int32))
        )
        answer = Answer(assigned=True, shares_X4=shares_X4, copies_X5=copies_X5)
        self.asked(Event.DEMAND, target, demand_E, answer, protected_NR, now_ns)

    def withdrawn(self, target: Target) -> None:
        """What was answered to the target's last row is not published."""
        self.happened(Event.WITHDRAWN, target)

    def happened(self, event: Event, target: Target) -> None:
        """A row without demand or answer."""
        self.row(TraceTarget(target=target, event=event, now_ns=self._now_ns()))

    def reset(self, layer: int) -> None:
        """The layer's redundant replicas are void."""
        self.happened(Event.RESET, Target(layer, 0, 0))

    def _read_costs(self, target: Target) -> Costs | None:
        """The layer's estimates, if they were read; rows say before what was read of other layers."""
        read, self._costs.read = self._costs.read, {}
        own = read.pop(target.layer, None)
        for layer, costs in sorted(read.items()):
            if self._told_L.get(layer) != costs:
                self._told_L[layer] = costs
                self.row(TraceTarget(target=Target(layer, 0, 0), event=Event.COSTS, costs=costs))
        if own is not None:
            self._told_L[target.layer] = own
        return own

    def _taken(self) -> None:
        self._counters["recorded"] += 1

    def _lost(self) -> None:
        self._counters["record_failed"] += 1


class Recorded:
    """A policy, recorded: it passes everything on."""

    def __init__(self, policy: Policy, recorder: Recorder) -> None:
        self._policy = policy
        self._recorder = recorder
        self.name = policy.name
        self.wants_inputs = policy.wants_inputs
        self._protected: Callable[[int], NDArray[np.bool_] | None] = getattr(policy, "protected", lambda layer: None)
        self._hears_steps = getattr(type(policy), "on_step_end", None) is not Quiet.on_step_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return self._tell(
            Event.DEMAND, target, demand_E, now_us, self._policy.on_demand, target, demand_E.copy(), now_us
        )

    def on_prediction(self, target: Target, predicted_E: Demand, now_us: float) -> list[Action]:
        tell = self._policy.on_prediction
        return self._tell(Event.PREDICTION, target, predicted_E, now_us, tell, target, predicted_E.copy(), now_us)

    def on_inputs(self, target: Target, now_us: float) -> list[Action]:
        return self._tell(Event.INPUTS, target, None, now_us, self._policy.on_inputs, target, now_us)

    def on_step_end(self, microbatch: int, step: int, now_us: float) -> list[Action]:
        if not self._hears_steps:
            return self._policy.on_step_end(microbatch, step, now_us)
        target = Target(0, microbatch, step)
        return self._tell(Event.STEP_END, target, None, now_us, self._policy.on_step_end, microbatch, step, now_us)

    def reset_layer(self, layer: int) -> None:
        self._policy.reset_layer(layer)
        self._recorder.reset(layer)

    def adopt_layer(self, layer: int, slots_NR: NDArray[np.int32]) -> None:
        self._policy.adopt_layer(layer, slots_NR)  # type: ignore[attr-defined]  # whoever warms up has looked
        copies_X5 = [(layer, int(slots_NR[w, r]), w, r, 0) for w, r in np.argwhere(slots_NR >= 0).tolist()]
        answer = Answer(copies_X5=np.array(copies_X5, np.int32).reshape(-1, 5))
        self._recorder.row(
            TraceTarget(target=Target(layer, 0, 0), event=Event.ADOPT, answer=answer, protected_NR=slots_NR > -2)
        )

    def _tell(
        self,
        event: Event,
        target: Target,
        demand_E: Demand | None,
        now_us: float,
        tell: Callable[..., list[Action]],
        *arguments: object,
    ) -> list[Action]:
        self._recorder.begin()
        protected_NR = self._protected(target.layer) if event is not Event.STEP_END else None
        answer: Answer | None = None
        try:
            actions = list(tell(*arguments))
            with contextlib.suppress(
                Exception
            ):  # what is no answer is refused by who asked; the record says that there was none
                answer = answer_of(actions)
            return actions
        finally:
            self._recorder.asked(event, target, demand_E, answer, protected_NR, round(now_us * 1e3))


def answer_of(actions: Sequence[Action]) -> Answer:
    """A policy's answer as a row has it."""
    shares: Sequence[tuple[int, int, int, int]] = ()
    copies: list[tuple[int, int, int, int, int]] = []
    assigned = False
    for action in actions:
        if isinstance(action, Assign):
            assigned, shares = True, action.shares
        elif isinstance(action, Copies):
            start = int(CopyStart.ARRIVAL if action.start == "arrival" else CopyStart.NOW)
            copies.extend((action.layer, *copy, start) for copy in action.copies)
    return Answer(
        assigned=assigned,
        shares_X4=np.array(shares, np.int32).reshape(-1, 4),
        copies_X5=np.array(copies, np.int32).reshape(-1, 5),
    )


def planner_fields(config: PlannerConfig, primaries_E: NDArray[np.int32]) -> dict[str, Any]:
    """A planner's sizes and knobs, for a header."""
    fields = dataclasses.asdict(config)
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()},
        "primaries": primaries_E.tolist(),
    }
