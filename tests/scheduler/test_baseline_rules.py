"""Rules that every baseline keeps whatever the traffic: every pair once, slots bound before they are used, and never
while targets in flight may use them; and what each asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afore.core.errors import PlanError
from afore.core.policy_options import (
    AforeAheadOptions,
    AforePlusOptions,
    EplbOptions,
    HarmoenyOptions,
    LibraOptions,
    LinaOptions,
    PolicyOptions,
)
from afore.core.target import Target
from afore.scheduler.policies.base import Action, Assign, Copies, Policy, PolicyContext
from afore.scheduler.policies.registry import POLICIES, make_policy, policy_wants_inputs, policy_wants_predictions
from afore.scheduler.validate_actions import ActionChecker
from tests.scheduler.baseline_cases import context

BASELINES = ["eplb", "eplb-redistribute", "harmoeny", "lina", "libra"]
OURS = ["afore", "afore-plus", "afore-ahead"]
L = 2


@dataclass
class Traffic:
    """Microbatches that run through the layers in any order of one another, as long as each keeps its own."""

    microbatches: int
    experts: int
    turns: list[int]
    """Whose next event it is."""
    seed: int

    def demand(self, rng: np.random.Generator) -> NDArray[np.int32]:
        return (rng.integers(0, 30, self.experts) * (rng.random(self.experts) < 0.5)).astype(np.int32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[PolicyContext, Traffic]:
    experts, workers = draw(st.integers(1, 10)), draw(st.integers(1, 5))
    microbatches = draw(st.integers(1, 3))
    options = PolicyOptions(
        eplb=EplbOptions(
            mode=draw(st.sampled_from(["stop", "async"])),
            window_steps=draw(st.integers(1, 3)),
            interval_steps=draw(st.integers(1, 3)),
        ),
        harmoeny=HarmoenyOptions(min_tokens=draw(st.sampled_from([1, 5, None])), reuse=draw(st.booleans())),
        lina=LinaOptions(replan=draw(st.booleans())),
        libra=LibraOptions(buffers=draw(st.integers(1, 3)), reuse=draw(st.booleans())),
        afore_plus=AforePlusOptions(protected_plans=draw(st.sampled_from([None, 0, 1, 2]))),
        afore_ahead=AforeAheadOptions(
            protected_plans=draw(st.sampled_from([None, 0, 1, 2])),
            window_copies=draw(st.sampled_from([0.0, 1e9])),
            first_layer=draw(st.booleans()),
        ),
    )
    slots = draw(st.lists(st.integers(0, 4), min_size=workers, max_size=workers))
    shape: dict[str, Any] = {"experts": experts, "workers": workers, "slots": slots, "microbatches": microbatches}
    made = context(**shape, layers=L, tile=draw(st.sampled_from([1, 4])), options=options)
    turns = draw(st.lists(st.integers(0, microbatches - 1), min_size=10, max_size=60))
    return made, Traffic(microbatches, experts, turns, draw(st.integers(0, 1000)))


def drive(policy: Policy, made: PolicyContext, traffic: Traffic, seen: Callable[[list[Action]], None]) -> ActionChecker:
    """Plays the runtime's part. A microbatch's event is: a layer's demand (and inputs), then the prediction of the next layer,
    which sometimes does not come; now and then a layer is refused, or a step given up."""
    in_flight = 1 + getattr(policy, "protected_plans", traffic.microbatches - 1)
    checker = ActionChecker(made.planner, made.primaries_E, num_layers=L, num_microbatches=in_flight)
    rng = np.random.default_rng(traffic.seed)
    at: dict[int, tuple[int, int]] = dict.fromkeys(range(traffic.microbatches), (0, 0))
    predicts = policy_wants_predictions(policy.name) is not None
    for m in traffic.turns:
        layer, step = at[m]
        if rng.random() < 0.05:
            at[m] = (0, step + 1)
            continue
        if rng.random() < 0.05:
            refused = int(rng.integers(L))
            policy.reset_layer(refused)
            checker.reset_layer(refused)
        target, demand_E = Target(layer, m, step), traffic.demand(rng)
        answer = policy.on_demand(target, demand_E.copy(), 0.0)
        if policy.wants_inputs:
            assert answer == []
            answer = policy.on_inputs(target, 0.0)
        seen(answer)
        assign_EN = checker.assigned(target, demand_E, answer)
        assert np.array_equal(assign_EN.sum(axis=1), demand_E)
        if layer == L - 1:
            ahead = policy.on_step_end(m, step, 0.0)
            at[m] = (0, step + 1)
        else:
            ahead = []
            if predicts and rng.random() < 0.9:
                ahead = policy.on_prediction(Target(layer + 1, m, step), traffic.demand(rng), 0.0)
            at[m] = (layer + 1, step)
        seen(ahead)
        checker.ahead(ahead)
    return checker


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BASELINES, *OURS])
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_answers_keep_the_rules(name: str, case: tuple[PolicyContext, Traffic]) -> None:
    made, traffic = case
    answers: list[Action] = []
    policy = make_policy(name, made)
    drive(policy, made, traffic, answers.extend)
    for action in answers:
        if isinstance(action, Assign):
            own = [a for a in answers if isinstance(a, Copies) and a.copies and a.layer == action.target.layer]
            assert action.skipped or own


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BASELINES, "afore-ahead"])
def test_the_same_events_get_the_same_answers(name: str) -> None:
    options = PolicyOptions(
        eplb=EplbOptions(window_steps=2, interval_steps=2), afore_ahead=AforeAheadOptions(window_copies=1e9)
    )
    made = context(experts=12, workers=3, slots=3, layers=L, microbatches=2, options=options)
    traffic = Traffic(2, 12, [number % 2 for number in range(80)], seed=7)
    runs: list[list[Action]] = [[], []]
    for run in runs:
        drive(make_policy(name, made), made, traffic, run.extend)
    without_plans = [
        [replace(action, plan=None) if isinstance(action, Assign) else action for action in run] for run in runs
    ]
    assert without_plans[0] == without_plans[1]
    assert sum(len(action.copies) for action in runs[0] if isinstance(action, Copies)) > 10
    assert any(action.shares for action in runs[0] if isinstance(action, Assign))


def test_what_each_asks_for() -> None:
    asks = {name: (policy_wants_inputs(name), policy_wants_predictions(name)) for name in POLICIES}
    assert {name: asks[name] for name in BASELINES} == {
        "eplb": (False, None),
        "eplb-redistribute": (False, None),
        "harmoeny": (True, None),
        "lina": (False, "transitions"),
        "libra": (False, "next-gate"),
    }
    assert asks["afore-ahead"] == (False, "next-gate")
    assert {asks[name] for name in POLICIES if name not in (*BASELINES, "afore-ahead")} == {(False, None)}


# The checker itself

MADE = context(experts=4, workers=2, slots=(2, 1), microbatches=2)
"""Experts 0, 1 | 2, 3; worker 1 has one slot."""


@pytest.mark.parametrize(
    ("copies", "shares", "rule"),
    [
        (((4, 1, 0),), (), "expert 4 does not exist"),
        (((0, 1, 1),), (), "slot 1 of worker 1, which does not exist"),
        (((0, 0, 0),), (), "which has its primary"),
        (((0, 1, 0), (1, 1, 0)), (), "targets in flight may use"),
        ((), ((0, 1, 0, 1),), "slot 0 of worker 1 does not hold expert 0"),
        (((0, 1, 0),), ((0, 1, 0, 9),), "exceed its demand"),
        (((0, 1, 0),), ((0, 1, 0, 0),), "has 0 pairs"),
        (((2, 0, 0), (0, 1, 0)), ((2, 0, 0, 1), (0, 1, 0, 1)), "do not come by expert"),
        (((2, 0, 0), (2, 0, 1)), ((2, 0, 0, 1), (2, 0, 1, 1)), "each once"),
    ],
)
def test_an_answer_that_breaks_a_rule_is_refused(copies: Any, shares: Any, rule: str) -> None:
    checker = ActionChecker(MADE.planner, MADE.primaries_E, num_layers=1, num_microbatches=2)
    target = Target(0, 0, 0)
    with pytest.raises(PlanError, match=rule):
        checker.assigned(target, np.full(4, 8), [Copies(0, copies), Assign(target, shares)])


def test_slots_of_targets_in_flight_are_refused_until_they_have_passed() -> None:
    checker = ActionChecker(MADE.planner, MADE.primaries_E, num_layers=1, num_microbatches=2)
    target, full_E = Target(0, 0, 0), np.full(4, 8)
    checker.assigned(target, full_E, [Copies(0, ((0, 1, 0),)), Assign(target, ((0, 1, 0, 4),))])
    with pytest.raises(PlanError, match="in flight"):
        checker.ahead([Copies(0, ((1, 1, 0),))])
    checker.assigned(target, full_E, [Assign(target, ())])
    assert checker.ahead([Copies(0, ((1, 1, 0),))]) == [(1, 1, 0)]
    assert checker.slots_NR(0).tolist() == [[-1, -1], [1, -2]]
    with pytest.raises(PlanError, match="only copies"):
        checker.ahead([Assign(target, ())])
