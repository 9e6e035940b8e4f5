"""The certified optimum against trying everything, its honesty about time, and the inputs on which Algorithm 1 is far from it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afore.core.errors import HostError
from afore.scheduler.optimum import Optimum, optimum
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.planner import Planner
from afore.scheduler.plus_planner import PlusPlanner
from tests.scheduler.brute_force import holders_of, least_maximum, least_over
from tests.scheduler.plan_cases import FREE


@st.composite
def tiny(
    draw: st.DrawFn,
) -> tuple[PlannerConfig, NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]]:
    """(config, primaries, demand, slot table before, protected slots) small enough to try everything."""
    N, E = draw(st.integers(2, 3)), draw(st.integers(1, 4))
    speeds: list[float | list[float]] = [1.0, 1.0, 0.5, [1.0, 0.5, 0.3][:N], [0.4, 1.0, 0.9][:N]]
    slots = draw(st.lists(st.integers(0, 2 if N == 2 else 1), min_size=N, max_size=N))
    config = PlannerConfig(
        num_experts=E,
        num_workers=N,
        slots_per_worker=slots,
        tile_tokens=2,
        copy_budget=draw(st.integers(0, 3)),
        compactness=draw(st.sampled_from([0, 0, 1])),
        compactness_share=draw(st.sampled_from([0.0, 0.0, 0.3])),
        worker_speed=draw(st.sampled_from(speeds)),
    )
    primaries_E = np.array(draw(st.lists(st.integers(0, N - 1), min_size=E, max_size=E)), np.int32)
    demand_E = np.array(draw(st.lists(st.integers(0, 24), min_size=E, max_size=E)), np.int64)
    slots_NR = config.empty_slots()
    for cell in np.ndindex(slots_NR.shape):
        if slots_NR[cell] == -1:
            slots_NR[cell] = draw(st.integers(-1, E - 1))
    protected_NR = np.array(
        draw(st.lists(st.booleans(), min_size=slots_NR.size, max_size=slots_NR.size)), np.bool_
    ).reshape(slots_NR.shape)
    return config, primaries_E, demand_E, slots_NR, protected_NR


def check_witness(
    found: Optimum,
    config: PlannerConfig,
    primaries_E: NDArray[np.int32],
    demand_E: NDArray[np.int64],
    before_NR: NDArray[np.int32],
    protected_NR: NDArray[np.bool_] | None,
) -> None:
    """What the answer shows is reachable: its table by its copies, its maximum on that table."""
    tiles = (-(-demand_E // config.tile_tokens)).tolist()
    assert found.tiles_EN.sum(axis=1).tolist() == tiles
    assert int((found.tiles_EN.sum(axis=0) * config.costs_N).max()) == found.best_tiles
    holders = holders_of(found.slots_NR, primaries_E.tolist(), tiles, config.threshold(sum(tiles)))
    for e, w in np.argwhere(found.tiles_EN > 0).tolist():
        assert w in holders[e]
    changed_NR = found.slots_NR != before_NR
    assert len(found.copies) <= config.budget
    assert {(w, r) for _e, w, r in found.copies} == {(w, r) for w, r in np.argwhere(changed_NR).tolist()}
    if protected_NR is not None:
        assert not (changed_NR & protected_NR).any()


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(tiny())
def test_the_optimum_is_what_trying_everything_finds(
    case: tuple[PlannerConfig, NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]],
) -> None:
    """And no planner is below it; ``afore-plus`` is never above ``afore``, and exact where it copies nothing."""
    config, primaries_E, demand_E, slots_NR, protected_NR = case
    tiles = (-(-demand_E // config.tile_tokens)).tolist()
    planner, plus = Planner(config, primaries_E), PlusPlanner(config, primaries_E)
    planner.adopt(slots_NR)
    plus.adopt(slots_NR)
    before_NR = planner.slots_NR
    theta, costs_N = config.threshold(sum(tiles)), config.costs_N
    least = least_maximum(tiles, primaries_E.tolist(), before_NR, config.budget, protected_NR, theta, costs_N)
    greedy, better = (each.plan(demand_E, protected_NR, FREE) for each in (planner, plus))
    for start in (None, greedy, better):
        found = optimum(config, primaries_E, demand_E, before_NR, protected=protected_NR, plan=start, time_limit_s=60)
        assert (found.state, found.best_tiles, found.lower_tiles) == ("optimal", least, least)
        check_witness(found, config, primaries_E, demand_E, before_NR, protected_NR)
    assert least <= better.max_tiles <= greedy.max_tiles
    if greedy.max_tiles > greedy.bound_tiles and better.copies:
        holders = holders_of(before_NR, primaries_E.tolist(), tiles, theta)
        assert better.within_max_tiles in (
            least_over(tiles, holders, config.num_workers, costs_N),
            greedy.within_max_tiles,
        )


Case = tuple[Planner, NDArray[np.int64]]


def hot_expert() -> Case:
    """One expert of 60 tiles, N = 8, B = 6: halving wastes the copy budget."""
    config = PlannerConfig(num_experts=1, num_workers=8, slots_per_worker=1, tile_tokens=1, copy_budget=6)
    return Planner(config, [0]), np.array([60])


def little_work() -> Case:
    """The only slot beside the hot expert holds one tile of another."""
    config = PlannerConfig(num_experts=3, num_workers=3, slots_per_worker=(0, 1, 0), tile_tokens=1)
    planner = Planner(config, [0, 2, 2])
    planner.adopt(np.array([[-2], [1], [-2]]))
    planner.plan(np.array([0, 1, 100]), costs=FREE)
    return planner, np.array([40, 1, 0])


def relay() -> Case:
    """Loads 7, 6, 5: only a move along both pairs evens them."""
    config = PlannerConfig(num_experts=3, num_workers=3, slots_per_worker=1, tile_tokens=1, copy_budget=0)
    planner = Planner(config, [0, 1, 2])
    planner.adopt(np.array([[-1], [0], [1]]))
    return planner, np.array([7, 6, 5])


def badly_carried() -> Case:
    """Carried proportions keep a sliver of work in every slot."""
    config = PlannerConfig(num_experts=5, num_workers=5, slots_per_worker=(0, 1, 1, 0, 0), tile_tokens=1)
    planner = Planner(config, [0, 3, 3, 4, 4])
    planner.adopt(np.array([[-2], [1], [3], [-2], [-2]]))
    planner.plan(np.array([0, 1, 100, 1, 100]), costs=FREE)
    return planner, np.array([281, 1, 0, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "greedy_tiles", "least_tiles"),
    [(hot_expert, 15, 9), (little_work, 40, 20), (relay, 7, 6), (badly_carried, 281, 94)],
)
def test_inputs_on_which_the_greedy_is_far_from_the_optimum(
    case: Callable[[], Case], greedy_tiles: int, least_tiles: int
) -> None:
    """Algorithm 1 stays literal; the optimum is proven; ``afore-plus`` reaches it on all four."""
    planner, demand_E = case()
    before_NR = planner.slots_NR
    plus = PlusPlanner(planner.config, planner.primaries_E)
    plus.buffer[:] = planner.buffer
    greedy = planner.plan(demand_E, costs=FREE)
    found = optimum(planner.config, planner.primaries_E, demand_E, before_NR, plan=greedy)
    assert greedy.max_tiles == greedy_tiles
    assert (found.state, found.best_tiles) == ("optimal", least_tiles)
    check_witness(found, planner.config, planner.primaries_E, demand_E, before_NR, None)
    assert plus.plan(demand_E, costs=FREE).max_tiles == least_tiles


def hard() -> Case:
    """Too large for no time at all, and not at the bound."""
    rng = np.random.default_rng(5)
    config = PlannerConfig(num_experts=64, num_workers=8, slots_per_worker=1, tile_tokens=1)
    return Planner(config, np.repeat(np.arange(8), 8)), np.sort(rng.integers(0, 40, 64))[::-1].copy()


def test_what_time_does_not_decide_stays_open() -> None:
    planner, demand_E = hard()
    before_NR = planner.slots_NR
    plan = planner.plan(demand_E, costs=FREE)
    assert plan.max_tiles > plan.bound_tiles
    found = optimum(planner.config, planner.primaries_E, demand_E, before_NR, plan=plan, time_limit_s=1e-6)
    assert found.state == "open"
    assert plan.bound_tiles <= found.lower_tiles < found.best_tiles <= plan.max_tiles


def test_at_the_bound_nothing_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without OR-tools; with something to solve, its absence is named with the remedy."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    config = PlannerConfig(num_experts=2, num_workers=2, slots_per_worker=1, tile_tokens=1)
    planner = Planner(config, [0, 0])
    before_NR = planner.slots_NR
    plan = planner.plan(np.array([4, 4]), costs=FREE)
    found = optimum(config, [0, 0], np.array([4, 4]), before_NR, plan=plan)
    assert (found.state, found.best_tiles, found.solve_s) == ("optimal", 4, 0.0)
    with pytest.raises(HostError, match=r"afore\[optimum\]"):
        optimum(config, [0, 0], np.array([4, 4]), before_NR)
