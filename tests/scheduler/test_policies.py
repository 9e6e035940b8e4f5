"""Policies: one assignment for every target, what each plans on, when its copies start; names and paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.slots import contiguous_primaries
from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.planner import Planner, ProtectedWindow
from afore.scheduler.policies.afore import NOTHING_TO_PLAN_ON
from afore.scheduler.policies.base import Action, Assign, Copies, Policy, PolicyContext
from afore.scheduler.policies.registry import POLICIES, check_policy, make_policy

E, N, L, M = 12, 4, 2, 3
COSTS = Costs(tile_us=20.0, copy_us=30.0, window_us=45.0)
CONFIG = PlannerConfig(num_experts=E, num_workers=N, slots_per_worker=2, tile_tokens=2)
PRIMARIES_E = contiguous_primaries(E, N)
AFORE_NAMES = [name for name in POLICIES if name.startswith("afore")]


def context() -> PolicyContext:
    return PolicyContext(
        planner=CONFIG, primaries_E=PRIMARIES_E, num_layers=L, num_microbatches=M, costs=lambda layer: COSTS
    )


def demand(seed: int) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 40, E) * (rng.random(E) < 0.4)).astype(np.int32)


def targets(steps: int) -> list[Target]:
    """In execution order."""
    return [Target(layer, m, step) for step in range(steps) for layer in range(L) for m in range(M)]


def assigned(actions: list[Action]) -> Assign:
    assigns = [action for action in actions if isinstance(action, Assign)]
    assert len(assigns) == 1
    return assigns[0]


def copied(actions: list[Action]) -> list[Copies]:
    return [action for action in actions if isinstance(action, Copies)]


@pytest.mark.parametrize("name", ["static", *AFORE_NAMES])
def test_every_target_gets_one_assignment_with_its_copies_before_it(name: str) -> None:
    policy = make_policy(name, context())
    assert policy.name == name
    assert policy.wants_inputs is False
    start = "arrival" if name in ("afore-no-overlap", "afore-reactive") else "now"
    copies = 0
    for number, target in enumerate(targets(6)):
        actions = policy.on_demand(target, demand(number), float(number))
        assign = assigned(actions)
        assert actions[-1] is assign
        assert assign.target == target
        for action in copied(actions):
            assert action.layer == target.layer
            assert action.start == start
            copies += len(action.copies)
        assert bool(assign.skipped) != bool(copied(actions))
        if assign.plan is not None:
            assert list(assign.shares) == assign.plan.shares()
            assert assign.costs == assign.plan.costs
        assert policy.on_inputs(target, 0.0) == []
        if name == "afore-ahead":
            continue  # see test_ahead.py
        assert policy.on_prediction(target, demand(number), 0.0) == []
        assert policy.on_step_end(target.microbatch, target.step, 0.0) == []
    assert (copies > 0) == (name != "static")


def test_static_runs_on_primaries() -> None:
    assign = assigned(make_policy("static", context()).on_demand(Target(0, 0, 0), demand(1), 0.0))
    assert assign.shares == ()
    assert assign.plan is None


def test_afore_is_the_planner_of_each_layer_with_its_window() -> None:
    """Equal to planners driven by hand, with U_t of the last M - 1 plans of the same layer."""
    policy = make_policy("afore", context())
    planners = [Planner(CONFIG, PRIMARIES_E) for _ in range(L)]
    windows = [ProtectedWindow(M - 1) for _ in range(L)]
    masked = 0
    for number, target in enumerate(targets(8)):
        window = windows[target.layer]
        protected_NR = window.protected()
        expected = planners[target.layer].plan(demand(number), protected_NR, COSTS)
        window.push(expected.used_NR)
        masked += protected_NR is not None and bool(protected_NR.any())
        actions = policy.on_demand(target, demand(number), 0.0)
        assert list(assigned(actions).shares) == expected.shares()
        assert [copy for action in copied(actions) for copy in action.copies] == expected.copies
    assert masked > 10


@pytest.mark.parametrize("name", ["afore-no-prefetch", "afore-reactive"])
def test_history_is_the_same_position_one_step_before(name: str) -> None:
    policy = make_policy(name, context())
    costs = COSTS if name == "afore-no-prefetch" else Costs(tile_us=20.0, copy_us=30.0, window_us=0.0)
    planners = [Planner(CONFIG, PRIMARIES_E) for _ in range(L)]
    windows = [ProtectedWindow(M - 1) for _ in range(L)]
    seen: dict[tuple[int, int], NDArray[np.int32]] = {}
    for number, target in enumerate(targets(5)):
        position = (target.layer, target.microbatch)
        true_E = demand(number)
        assign = assigned(policy.on_demand(target, true_E, 0.0))
        if target.step == 0:
            assert assign.shares == ()
            assert assign.skipped == NOTHING_TO_PLAN_ON
        else:
            expected = planners[target.layer].plan(seen[position], windows[target.layer].protected(), costs)
            windows[target.layer].push(expected.used_NR)
            assert list(assign.shares) == expected.shares()
        seen[position] = true_E.copy()
        true_E[:] = -1  # the policy must have kept its own copy


def test_a_step_announced_again_is_still_planned_on_the_step_before() -> None:
    policy, twin = (make_policy("afore-no-prefetch", context()) for _ in range(2))
    first, second = Target(0, 0, 0), Target(0, 0, 1)
    for each in (policy, twin):
        each.on_demand(first, demand(3), 0.0)
    assert assigned(policy.on_demand(second, demand(4), 0.0)).plan is not None
    again = assigned(policy.on_demand(second, demand(5), 0.0))
    assert again.plan is not None
    assert np.array_equal(again.plan.assign_EN.sum(axis=1), demand(3))
    after = assigned(policy.on_demand(Target(0, 0, 2), demand(6), 0.0))
    assert after.plan is not None
    assert np.array_equal(after.plan.assign_EN.sum(axis=1), demand(5))


def test_without_overlap_copies_must_pay_for_all_of_their_time() -> None:
    """The window would hide the copies; starting at arrival, all of it is exposed, and the planner knows."""
    hot_E = np.zeros(E, np.int32)
    hot_E[0] = 4
    overlapped = make_policy("afore", context()).on_demand(Target(0, 0, 0), hot_E, 0.0)
    assert copied(overlapped)
    exposed = make_policy("afore-no-overlap", context()).on_demand(Target(0, 0, 0), hot_E, 0.0)
    assert not copied(exposed)
    costs = assigned(exposed).costs
    assert costs is not None
    assert (costs.tile_us, costs.copy_us, costs.window_us) == (20.0, 30.0, 0.0)


@pytest.mark.parametrize("name", AFORE_NAMES)
def test_a_reset_layer_starts_empty_and_others_go_on(name: str) -> None:
    policy = make_policy(name, context())
    for number, target in enumerate(targets(6)):
        policy.on_demand(target, demand(number % 3), 0.0)
    policy.reset_layer(0)
    shares_before_copies = []
    for layer in range(L):
        actions = policy.on_demand(Target(layer, 0, 6), demand(0), 0.0)
        bound = {copy for action in copied(actions) for copy in action.copies}
        shares_before_copies.append([s for s in assigned(actions).shares if s[:3] not in bound])
    assert shares_before_copies[0] == []
    assert shares_before_copies[1] != []


def test_slots_in_flight_stay_protected_over_a_reset() -> None:
    policy = make_policy("afore", context())
    hot_E = np.zeros(E, np.int32)
    hot_E[0] = 80
    first = copied(policy.on_demand(Target(0, 0, 0), hot_E, 0.0))[0]
    policy.reset_layer(0)
    second = copied(policy.on_demand(Target(0, 1, 0), hot_E, 0.0))[0]
    assert {copy[1:] for copy in first.copies}.isdisjoint({copy[1:] for copy in second.copies})


# Names


def test_a_users_own_policy_is_found_by_path() -> None:
    path = "tests.scheduler.own_policies:Mine"
    check_policy(path)
    policy: Policy = make_policy(path, context())
    assert policy.name == "mine"
    assert assigned(policy.on_demand(Target(0, 0, 0), demand(0), 0.0)).shares == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "afore-noprefetch",
            ["'afore-noprefetch'", "did you mean afore-no-prefetch?", "static", "package.module:Class"],
        ),
        ("statik", ["did you mean static?"]),
        ("zzz", ["'zzz'", "afore-reactive"]),
        ("", ["there is no policy ''"]),
        (":Class", ["':Class'"]),
        ("no_such_module_here:Class", ["no_such_module_here cannot be imported", "PYTHONPATH"]),
        ("tests.scheduler.own_policies:Min", ["has no Min", "did you mean Mine?"]),
        ("tests.scheduler.own_policies:Deaf", ["lacks on_demand, on_prediction, on_inputs"]),
        ("tests.scheduler.own_policies:NOT_A_CLASS", ["lacks on_demand"]),
    ],
)
def test_what_is_no_policy_is_refused(name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_policy(name)
    assert caught.value.field == "policy"
    for word in words:
        assert word in str(caught.value)


def test_a_policy_without_a_name_is_refused() -> None:
    path: Any = "tests.scheduler.own_policies:Nameless"
    with pytest.raises(ConfigError, match="no attribute name"):
        make_policy(path, context())
