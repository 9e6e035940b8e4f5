"""The planner's interface, and its state between targets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.slots import contiguous_primaries
from afore.scheduler import Costs, Plan, Planner, PlannerConfig, ProtectedWindow
from afore.scheduler.core_layout import Parts, buffer_words, parts_of, plan_words
from afore.scheduler.plan import AT_BOUND, NO_GAIN, NO_SAFE_MOVE, NONE_ALLOWED
from tests.scheduler.plan_cases import FREE, make

# What a plan says


def test_a_hot_expert_is_copied_and_shared() -> None:
    """Expert 0 has 8 tiles on worker 0, all else is idle: half of them go to a new replica."""
    planner = make([0, 0, 1, 1], 2, 1, tile_tokens=4)
    plan = planner.plan(np.array([31, 0, 0, 0]), protected=None, costs=Costs(tile_us=10, copy_us=7, window_us=5))
    assert plan.copies == [(0, 1, 0)]
    assert plan.slots_NR.tolist() == [[-1], [0]]
    assert plan.assign_EN.tolist() == [[15, 16], [0, 0], [0, 0], [0, 0]]
    assert plan.shares() == [(0, 1, 0, 16)]
    assert (plan.max_tiles, plan.bound_tiles, plan.base_max_tiles, plan.within_max_tiles) == (4, 4, 8, 8)
    assert plan.gain_us == 10 * 8 - 10 * 4 - (7 - 5)
    assert plan.used_NR.tolist() == [[False], [True]]
    assert plan.skipped == ""


def test_the_last_replica_has_the_partial_tile_when_the_primary_has_none() -> None:
    planner = make([0, 0], 3, 1, tile_tokens=4, budget=0)
    planner.adopt(np.array([[-1], [1], [1]]))
    plan = planner.plan(np.array([400, 7]), costs=FREE)
    assert plan.assign_EN.tolist() == [[400, 0, 0], [0, 4, 3]]
    assert plan.shares() == [(1, 1, 0, 4), (1, 2, 0, 3)]


def test_uneven_slots_are_marked() -> None:
    planner = make([0, 0, 0, 0], 3, (2, 0, 1))
    plan = planner.plan(np.array([4, 4, 4, 4]), costs=FREE)
    assert plan.slots_NR.shape == (3, 2)
    assert plan.slots_NR[1].tolist() == [-2, -2]
    assert plan.slots_NR[2, 1] == -2
    assert {w for _e, w, _r in plan.copies} == {2}


def test_no_slots_at_all() -> None:
    plan = make([0, 1], 2, 0).plan(np.array([9, 1]), costs=FREE)
    assert plan.slots_NR.shape == (2, 0)
    assert plan.assign_EN.tolist() == [[9, 0], [0, 1]]
    assert plan.skipped == NONE_ALLOWED


@pytest.mark.parametrize(
    ("demand", "budget", "costs", "reason"),
    [
        ([4, 4], None, FREE, AT_BOUND),
        ([9, 0], 0, FREE, NONE_ALLOWED),
        ([9, 0], None, Costs(tile_us=1, copy_us=90, window_us=80), NO_GAIN),
        ([2, 1], None, FREE, AT_BOUND),
    ],
)
def test_a_plan_without_copies_says_why(demand: list[int], budget: int | None, costs: Costs, reason: str) -> None:
    plan = make([0, 1], 2, 1, budget=budget).plan(np.array(demand), costs=costs)
    assert plan.copies == []
    assert plan.gain_us == 0.0
    assert plan.skipped == reason


def test_without_a_safe_slot_it_says_so() -> None:
    planner = make([0, 1], 2, 1)
    plan = planner.plan(np.array([9, 0]), protected=np.ones((2, 1), np.bool_), costs=FREE)
    assert plan.skipped == NO_SAFE_MOVE


def test_a_plan_is_not_changed_by_the_next() -> None:
    planner = make([0, 0, 1, 1], 2, 1)
    first = planner.plan(np.array([8, 0, 0, 0]), costs=FREE)
    kept = [first.assign_EN.copy(), first.slots_NR.copy(), first.used_NR.copy(), first.shares_X4.copy()]
    planner.plan(np.array([0, 0, 9, 0]), costs=FREE)
    after = [first.assign_EN, first.slots_NR, first.used_NR, first.shares_X4]
    assert all(np.array_equal(a, b) for a, b in zip(kept, after, strict=True))


# State between targets


def test_replicas_and_proportions_are_carried() -> None:
    planner = make([0, 0, 1, 1], 2, 1)
    planner.plan(np.array([8, 0, 0, 0]), costs=FREE)
    again = planner.plan(np.array([12, 0, 0, 0]), costs=FREE)
    assert again.copies == []
    assert again.assign_EN[0].tolist() == [6, 6]


def test_the_least_recently_used_idle_slot_is_taken() -> None:
    planner = make([0, 0, 0, 1], 2, 2)
    planner.adopt(np.array([[-1, -1], [0, 1]]))
    planner.plan(np.array([6, 0, 0, 0]), costs=FREE)  # slot 0 is used, slot 1 is not
    plan = planner.plan(np.array([0, 0, 6, 0]), costs=FREE)
    assert plan.copies == [(2, 1, 1)]
    plan = planner.plan(np.array([0, 6, 0, 0]), costs=FREE)
    assert plan.copies == [(1, 1, 0)]


def test_reset_forgets_everything() -> None:
    planner, fresh = make([0, 0, 1, 1], 2, 2), make([0, 0, 1, 1], 2, 2)
    planner.plan(np.array([8, 3, 0, 0]), costs=FREE)
    planner.reset()
    assert (planner.slots_NR == -1).all()
    demand_E = np.array([5, 2, 9, 1])
    ours, theirs = planner.plan(demand_E, costs=FREE), fresh.plan(demand_E, costs=FREE)
    assert np.array_equal(ours.assign_EN, theirs.assign_EN)
    assert ours.copies == theirs.copies


def test_adopt_takes_reported_slots_and_drops_useless_replicas() -> None:
    planner = make([0, 0, 1, 1], 2, 2)
    planner.adopt(np.array([[2, 2], [3, 0]]))  # the second 2 and worker 1's own 3 can serve nothing
    assert planner.slots_NR.tolist() == [[2, -1], [-1, 0]]


def test_an_empty_slot_can_be_protected_too() -> None:
    """After a reset the table says empty, but targets in flight may still read the slot."""
    planner = make([0, 1], 2, 1)
    plan = planner.plan(np.array([8, 0]), protected=np.array([[False], [True]]), costs=FREE)
    assert plan.copies == []


# The door


def test_a_wrong_demand_is_refused_by_name_and_changes_nothing() -> None:
    planner, untouched = make([0, 0, 1, 1], 2, 1), make([0, 0, 1, 1], 2, 1)
    for each in (planner, untouched):
        each.plan(np.array([8, 1, 0, 0]), costs=FREE)
    for wrong, words in (
        (np.array([1, 2, 3]), "shape"),
        (np.zeros((4, 1), np.int32), "shape"),
        (np.array([1.0, 2, 3, 4]), "float64"),
        (np.array([True, False, True, True]), "bool"),
        (np.array([1, 2, -3, 4]), "-3 pairs for expert 2"),
        (np.full(4, 2**30), "in all"),
        (np.array([2**62, 2**62, 2**62, 2**62]), "in all"),
    ):
        with pytest.raises(ValueError, match="demand_E") as caught:
            planner.plan(wrong, costs=FREE)
        assert words in str(caught.value)
    demand_E = np.array([3, 9, 1, 0])
    ours, theirs = planner.plan(demand_E, costs=FREE), untouched.plan(demand_E, costs=FREE)
    assert np.array_equal(ours.assign_EN, theirs.assign_EN)
    assert np.array_equal(ours.slots_NR, theirs.slots_NR)


def test_any_integer_type_and_plain_lists_are_taken() -> None:
    plans = [make([0, 1], 2, 1).plan(demand, costs=FREE) for demand in (np.array([9, 2], np.uint8), [9, 2])]
    assert np.array_equal(plans[0].assign_EN, plans[1].assign_EN)


def test_the_largest_demand_fits() -> None:
    plan = make([0, 1], 2, 1, tile_tokens=2**30).plan(np.array([2**31 - 1, 0]), costs=FREE)
    assert plan.assign_EN.sum(dtype=np.int64) == 2**31 - 1
    plan = make([0, 1], 2, 1, tile_tokens=1).plan(np.array([2**31 - 1, 0]), costs=FREE)
    assert plan.assign_EN.tolist() == [[2**30, 2**30 - 1], [0, 0]]


@pytest.mark.parametrize("mask", [np.zeros((2, 2), np.bool_), np.zeros((2, 1), np.int32), [[False], [False]]])
def test_a_wrong_mask_is_refused_by_name(mask: NDArray[np.bool_]) -> None:
    with pytest.raises(ValueError, match="protected"):
        make([0, 1], 2, 1).plan(np.array([1, 1]), protected=mask, costs=FREE)


def test_costs_are_needed() -> None:
    with pytest.raises(ConfigError, match="costs"):
        make([0, 1], 2, 1).plan(np.array([1, 1]))


@pytest.mark.parametrize(
    "slots", [[[1], [0], [0]], [[5], [-1]], [[-2], [-1]], [[-3], [-1]], [[0.0], [1.0]]]
)  # fmt: skip
def test_a_wrong_slot_table_is_refused_by_name(slots: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="slots_NR"):
        make([0, 1], 2, 1).adopt(np.array(slots))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_experts": 0}, "planner.num_experts"),
        ({"num_workers": 0}, "planner.num_workers"),
        ({"tile_tokens": 0}, "planner.tile_tokens"),
        ({"tile_tokens": 2.5}, "planner.tile_tokens"),
        ({"copy_budget": -1}, "planner.copy_budget"),
        ({"compactness": -1}, "planner.compactness"),
        ({"slots_per_worker": -1}, "planner.slots_per_worker"),
        ({"slots_per_worker": (1, -1)}, "planner.slots_per_worker"),
        ({"slots_per_worker": (1, 1, 1)}, "planner.slots_per_worker"),
        ({"slots_per_worker": "8"}, "planner.slots_per_worker"),
        ({"worker_speed": (1.0, 1.0, 1.0)}, "planner.worker_speed"),
        ({"worker_speed": (1.0, 0.0)}, "planner.worker_speed"),
        ({"worker_speed": -1.0}, "planner.worker_speed"),
        ({"worker_speed": (1.0, 64.5)}, "planner.worker_speed"),
        ({"worker_speed": ()}, "planner.worker_speed"),
        ({"worker_speed": "1"}, "planner.worker_speed"),
        ({"worker_speed": None}, "planner.worker_speed"),
        ({"worker_speed": np.ones((2, 1))}, "planner.worker_speed"),
        ({"compactness_share": 1.01}, "planner.compactness_share"),
        ({"compactness_share": float("nan")}, "planner.compactness_share"),
        ({"compactness_share": "0.1"}, "planner.compactness_share"),
    ],
)
def test_a_wrong_config_names_its_field(change: dict[str, object], field: str) -> None:
    values: dict[str, object] = {"num_experts": 4, "num_workers": 2, **change}
    with pytest.raises(ConfigError) as caught:
        PlannerConfig(**values)  # type: ignore[arg-type]  # the wrong values are the point
    assert caught.value.field == field


@pytest.mark.parametrize("primaries", [[0, 1], [0, 1, 2, 1], [0, 1, -1, 1], [0.0, 1, 0, 1]])
def test_wrong_primaries_are_refused(primaries: list[int]) -> None:
    with pytest.raises(ConfigError, match="primaries"):
        Planner(PlannerConfig(num_experts=4, num_workers=2), primaries)


def test_config_defaults() -> None:
    assert PlannerConfig(num_experts=4, num_workers=2).budget == 8
    assert PlannerConfig(num_experts=4, num_workers=20).budget == 20
    config = PlannerConfig(num_experts=4, num_workers=2, slots_per_worker=np.array([3, 0], np.int32))
    assert config.slots_per_worker == (3, 0)
    assert hash(config) == hash(PlannerConfig(num_experts=4, num_workers=2, slots_per_worker=[3, 0]))


@pytest.mark.parametrize(("E", "N", "R", "C"), [(1, 1, 0, 0), (5, 3, 2, 4), (7, 40, 1, 9)])
def test_the_buffers_parts_cover_it_without_overlap(E: int, N: int, R: int, C: int) -> None:
    buffer = np.zeros(buffer_words(E, N, R, C), np.int32)
    buffer[:4] = E, N, R, C
    parts: Parts = parts_of.py_func(buffer)
    sizes = [part.size for part in parts]
    assert sum(sizes) == buffer.size
    starts = [(part.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]) // 4 for part in parts]
    taken = sorted((start, size) for start, size in zip(starts, sizes, strict=True) if size)
    assert all(a + n == b for (a, n), (b, _size) in pairwise(taken))
    assert sum(part.size for part in parts[:6]) == plan_words(E, N, R, C)


# Protected slots


@pytest.mark.slow
@given(depth=st.integers(0, 4), used=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=8))
def test_the_window_is_the_union_of_the_last_plans(depth: int, used: list[list[bool]]) -> None:
    window = ProtectedWindow(depth)
    for row in used:
        window.push(np.array([row]))
    last = used[len(used) - min(depth, len(used)) :]
    protected_NR = window.protected()
    expected = [any(column) for column in zip(*last, strict=True)] if last else [False] * 3
    assert (protected_NR.tolist() if protected_NR is not None else [[False] * 3]) == [expected]


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 3))
def test_no_slot_is_rebound_while_a_plan_in_flight_uses_it(seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    planner = make(contiguous_primaries(12, 4).tolist(), 4, 2, tile_tokens=2)
    window = ProtectedWindow(depth)
    in_flight: list[Plan] = []
    for _ in range(8):
        plan = planner.plan(rng.integers(0, 40, 12) * (rng.random(12) < 0.4), window.protected(), FREE)
        window.push(plan.used_NR)
        for earlier in in_flight[len(in_flight) - depth :] if depth else []:
            reads = {(w, r) for _e, w, r, _count in earlier.shares()} | {(w, r) for _e, w, r in earlier.copies}
            assert reads.isdisjoint((w, r) for _e, w, r in plan.copies)
        in_flight.append(plan)
