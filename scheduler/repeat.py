"""A recorded run again: its policy is told what it was told then, and must answer what it answered then, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.policy_options import PolicyOptions
from afore.core.record import record
from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.policies.base import Policy, PolicyContext
from afore.scheduler.policies.registry import POLICIES, make_policy
from afore.scheduler.recorder import answer_of
from afore.scheduler.traces import Answer, Event, TraceError, TraceHeader, TraceReader, TraceTarget


@record(kw_only=True)
class Repeated:
    """What came of it."""

    targets: int
    """DEMAND rows."""
    copies: int
    """In all answers together."""
    different: int
    """Rows whose answer, or U_t, differs."""
    first: str
    """What differs in the first of them; empty: nothing does."""


class CostTable:
    """The estimates as rows say them, for ``PolicyContext.costs``."""

    def __init__(self, before: Costs) -> None:
        """``before``: of a layer of which nothing was said yet."""
        self._before = before
        self._layers: dict[int, Costs] = {}

    def __call__(self, layer: int) -> Costs:
        return self._layers.get(layer, self._before)

    def take(self, row: TraceTarget) -> None:
        """What the row says of its layer."""
        if row.costs is not None:
            self._layers[row.target.layer] = row.costs


def repeat(reader: TraceReader, *, each: Callable[[int], None] | None = None) -> Repeated:
    """Runs the recording through its policy anew; ``each`` hears of every row. Raises ``TraceError``, ``ConfigError``."""
    header = reader.header
    table = CostTable(Costs(tile_us=0.0, copy_us=0.0, window_us=0.0))
    policy = recorded_policy(header, table, str(reader.path))
    protected: Callable[[int], NDArray[np.bool_] | None] = getattr(policy, "protected", lambda layer: None)
    targets = copies = different = 0
    first = ""
    for number, row in enumerate(reader.events()):
        table.take(row)
        problem = ""
        if row.event is Event.RESET:
            policy.reset_layer(row.target.layer)
        elif row.event is Event.ADOPT:
            try:
                _adopt(policy, row)
            except (AttributeError, ValueError) as error:
                raise TraceError(reader.path, f"row {number}: no layer starts so: {error}", "record again") from error
        elif row.event in _TOLD:
            if row.protected_NR is not None:
                problem = _protected_differs(row.protected_NR, protected(row.target.layer))
            answer = _tell(policy, row)
            problem = problem or _differs(row.answer, answer)
            targets += row.event is Event.DEMAND
            copies += 0 if answer is None else len(answer.copies_X5)
        if problem:
            different += 1
            first = first or f"row {number} ({row.event.name} of {row.target}): {problem}"
        if each is not None:
            each(number)
    return Repeated(targets=targets, copies=copies, different=different, first=first)


def recorded_policy(header: TraceHeader, costs: Callable[[int], Costs], name: str) -> Policy:
    """The policy of a recorded run, as it began. Raises ``TraceError`` for a trace that is none of a run, and ``ConfigError``."""
    if not header.planner or not header.policy:
        raise TraceError(name, "it is no recording of a run", "record one: python -m afore.launch --demo --record FILE")
    fields = dict(header.planner)
    primaries = fields.pop("primaries", None)
    try:
        config = PlannerConfig(**fields)
        primaries_E = config.check_primaries(np.asarray(primaries, np.int64))
        if (config.num_experts, config.num_workers) != (header.experts, header.workers):
            raise ConfigError("planner", "its sizes are not the header's")
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(name, f"its planner cannot be: {error}", "record the run again") from error
    if header.policy not in POLICIES:
        # A name from a file must not choose what is imported.
        raise TraceError(name, f"its policy {header.policy[:60]!r} is none of AFORE's", "replay it with --policy NAME")
    return make_policy(
        header.policy,
        PolicyContext(
            experts_per_token=header.top_k or 1,
            options=_options(header, name),
            planner=config,
            primaries_E=primaries_E,
            num_layers=header.layers,
            num_microbatches=header.microbatches,
            costs=costs,
        ),
    )


def _options(header: TraceHeader, name: str) -> PolicyOptions:
    """What the run's policy was configured with."""
    options = PolicyOptions()
    if not header.options:
        return options
    section = PolicyOptions.section(header.policy)
    try:
        given = dataclasses.replace(getattr(options, section), **header.options)
        return dataclasses.replace(options, **{section: given})
    except (AttributeError, TypeError, ValueError) as error:
        raise TraceError(name, f"its policy's options cannot be: {error}", "record the run again") from error


_TOLD = frozenset((Event.DEMAND, Event.INPUTS, Event.STEP_END, Event.PREDICTION))


def _adopt(policy: Policy, row: TraceTarget) -> None:
    """Fills the layer's slots as they were filled then."""
    if row.protected_NR is None or row.answer is None:
        raise ValueError("it has no slots, or no copies")
    slots_NR = np.where(row.protected_NR, -1, -2)
    for _layer, e, w, r, _start in row.answer.copies_X5.tolist():
        slots_NR[w, r] = e
    policy.adopt_layer(row.target.layer, slots_NR.astype(np.int32))  # type: ignore[attr-defined]  # it did so then


def _tell(policy: Policy, row: TraceTarget) -> Answer | None:
    """The policy's answer; none where it raises, as then."""
    target, now_us = row.target, row.now_ns / 1e3
    try:
        if row.event is Event.DEMAND:
            assert row.demand_E is not None
            return answer_of(policy.on_demand(target, row.demand_E, now_us))
        if row.event is Event.PREDICTION:
            assert row.demand_E is not None
            return answer_of(policy.on_prediction(target, row.demand_E, now_us))
        if row.event is Event.INPUTS:
            return answer_of(policy.on_inputs(target, now_us))
        return answer_of(policy.on_step_end(target.microbatch, target.step, now_us))
    except Exception:  # whatever a policy raises: that it did is what is compared
        return None


def _differs(recorded: Answer | None, again: Answer | None) -> str:
    if recorded is None or again is None:
        return "" if recorded is again else f"{_what(again)}, recorded {_what(recorded)}"
    for name in ("assigned", "shares_X4", "copies_X5"):
        before: Any = getattr(recorded, name)
        after: Any = getattr(again, name)
        if not np.array_equal(before, after):
            return f"{name}: {np.asarray(after).tolist()}, recorded {np.asarray(before).tolist()}"
    return ""


def _what(answer: Answer | None) -> str:
    return "no answer" if answer is None else "an answer"


def _protected_differs(recorded_NR: NDArray[np.bool_], again_NR: NDArray[np.bool_] | None) -> str:
    same = not recorded_NR.any() if again_NR is None else np.array_equal(recorded_NR, again_NR)
    return "" if same else "other slots are protected than were then"
