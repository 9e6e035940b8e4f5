"""Workers of unequal speed: how far a move evens two loads out, who gets how much, and where limits move."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afore.core.config import CostOptions, PlannerOptions, RunConfig
from afore.core.metrics import imbalance
from afore.core.slots import contiguous_primaries
from afore.core.topology import Topology
from afore.scheduler import Costs, Planner, PlannerConfig, validate
from afore.scheduler.core_within import MAX_TOKENS, to_even
from afore.scheduler.costs import CostModel
from afore.scheduler.optimum import optimum
from afore.scheduler.plus_planner import PlusPlanner
from afore.scheduler.reference import ReferencePlanner
from afore.serving.virtual import run_emulated
from tests.scheduler.plan_cases import FREE, differences, make
from tests.serving.virtual_cases import EMULATION, FFN_BOUND, SMALL, asks, prescribed

HALF = (1.0, 1.0, 0.5, 1.0)


@given(load_c=st.integers(0, 300), more=st.integers(0, 300), cost_h=st.integers(1, 64), cost_c=st.integers(1, 64))
def test_a_move_lowers_the_greater_of_two_loads_as_far_as_whole_tiles_do(
    load_c: int, more: int, cost_h: int, cost_c: int
) -> None:
    """The core's closed form and the reference's two candidates are both the least of all."""
    load_h = load_c + more
    maxima = [max(load_h - q * cost_h, load_c + q * cost_c) for q in range(more + 2)]
    best = maxima.index(min(maxima))
    reference = ReferencePlanner(PlannerConfig(num_experts=1, num_workers=2), [0])
    assert to_even.py_func(more, cost_h, cost_c) == best
    assert reference._tiles_to_even(load_h, load_c, cost_h, cost_c) == best
    if best:
        assert maxima[best] < load_h
    if cost_h == cost_c == 1:
        assert best == more // 2


def demands(count: int, experts: int, pairs: int) -> list[NDArray[np.int64]]:
    """Skewed demand that drifts."""
    rng = np.random.default_rng(5)
    heat_E = rng.normal(size=experts)
    found = []
    for _ in range(count):
        heat_E = 0.9 * heat_E + 0.4 * rng.normal(size=experts)
        found.append(rng.multinomial(pairs, np.exp(heat_E) / np.exp(heat_E).sum()))
    return found


def test_a_worker_of_half_speed_gets_half_the_tiles() -> None:
    """With slots enough, every target takes no longer than whole tiles must; on primaries, and by halves that do not know of the
    slow worker, it takes three quarters longer."""
    E, N = 32, 4
    config = PlannerConfig(num_experts=E, num_workers=N, slots_per_worker=8, tile_tokens=8, worker_speed=HALF)
    blind = dataclasses.replace(config, worker_speed=1.0)
    primaries_E = contiguous_primaries(E, N)
    planner, even = Planner(config, primaries_E), Planner(blind, primaries_E)
    ratios = []
    for demand_E in demands(20, E, 4000):
        before_NR = planner.slots_NR
        plan = planner.plan(demand_E, costs=FREE)
        validate(plan, demand_E, before_NR, primaries_E, config)
        tiles_N = (-(-plan.assign_EN // 8)).sum(axis=0)
        assert plan.load_unit == 1
        assert plan.max_tiles == (tiles_N * [1, 1, 2, 1]).max()
        assert plan.max_tiles == plan.bound_tiles
        others = np.delete(tiles_N, 2)
        assert abs(tiles_N[2] - others.mean() / 2) <= 1
        as_if_equal = even.plan(demand_E, costs=FREE)
        seen = imbalance(demand_E, as_if_equal.assign_EN, primaries_E, 8, config.costs_N)
        mine = imbalance(demand_E, plan.assign_EN, primaries_E, 8, config.costs_N)
        assert seen is not None
        assert mine is not None
        ratios.append((mine.tile_after, seen.tile_after, mine.tile_before))
    planned, unaware, static = np.mean(ratios, axis=0)
    assert planned < 1.01
    assert unaware == pytest.approx(2 * 3.5 / 4, abs=0.01)  # an even share is too much for the slow one
    assert static > 1.7


def test_equal_speeds_of_any_value_change_nothing() -> None:
    plain, same = (make([0, 0, 1, 2], 3, 1, tile_tokens=4, worker_speed=speed) for speed in (1.0, [0.7] * 3))
    for demand in ([31, 8, 0, 0], [0, 9, 50, 3]):
        assert not differences(*(planner.plan(np.array(demand), costs=FREE) for planner in (plain, same)))


def test_figures_are_in_parts_of_the_fastest_workers_tile() -> None:
    """Worker 1 is two thirds as fast: 5 tiles there or 7 to 8 here take as long."""
    planner = make([0], 2, 1, worker_speed=[3.0, 2.0])
    plan = planner.plan(np.array([10]), costs=Costs(tile_us=10.0, copy_us=7.0, window_us=3.0))
    assert plan.assign_EN.tolist() == [[6, 4]]
    assert (plan.load_unit, plan.max_tiles, plan.base_max_tiles, plan.bound_tiles) == (2, 12, 20, 12)
    assert plan.gain_us == 10.0 * (20 - 12) / 2 - (7 - 3)


def test_a_heavier_worker_may_take_what_a_lighter_and_slower_one_cannot() -> None:
    """The lightest worker is so slow that one tile makes it the heaviest: the search goes on to the next."""
    planner = make([0, 1, 2], 3, 1, worker_speed=[1.0, 1.0, 0.1])
    plan = planner.plan(np.array([9, 2, 0]), costs=FREE)
    assert plan.assign_EN.tolist() == [[6, 3, 0], [0, 2, 0], [0, 0, 0]]
    assert plan.max_tiles == 6


def test_a_demand_whose_load_would_overflow_is_refused_and_nothing_changes() -> None:
    planner = make([0, 1], 2, 1, worker_speed=[1.0, 1 / 64])
    most = MAX_TOKENS // 64
    twin = make([0, 1], 2, 1, worker_speed=[1.0, 1 / 64])
    for each in (planner, twin):
        each.plan(np.array([5, 9]), costs=FREE)
    with pytest.raises(ValueError, match=f"at most {most:,}"):
        planner.plan(np.array([most, 1]), costs=FREE)
    demand_E = np.array([0, most])
    plan = planner.plan(demand_E, costs=FREE)
    assert plan.base_max_tiles == 64 * most
    assert not differences(plan, twin.plan(demand_E, costs=FREE))


def test_with_unequal_speeds_afore_plus_keeps_algorithm_1s_plan() -> None:
    """Its flow counts every worker's tile alike."""
    config = PlannerConfig(num_experts=24, num_workers=4, slots_per_worker=1, tile_tokens=2, worker_speed=HALF)
    primaries_E = contiguous_primaries(24, 4)
    planner, plus = Planner(config, primaries_E), PlusPlanner(config, primaries_E)
    above = 0
    for demand_E in demands(20, 24, 300):
        plan = planner.plan(demand_E, costs=FREE)
        assert not differences(plan, plus.plan(demand_E, costs=FREE))
        above += plan.max_tiles > plan.bound_tiles
    assert above > 0


def test_the_optimum_weighs_tiles_by_speed() -> None:
    """60 tiles over four workers and three of half speed: 4 · 12 + 3 · 6 hold them, 4 · 11 + 3 · 5 do not."""
    planner = make([0], 8, 1, budget=6, worker_speed=[1.0] * 4 + [0.5] * 4)
    before_NR, demand_E = planner.slots_NR, np.array([60])
    plan = planner.plan(demand_E, costs=FREE)
    found = optimum(planner.config, planner.primaries_E, demand_E, before_NR, plan=plan)
    assert found.state == "optimal"
    assert found.best_tiles == 12 < plan.max_tiles
    assert (found.tiles_EN.sum(axis=0) * planner.config.costs_N).max() == 12


# θ by the batch


@given(tiles=st.integers(0, 10**6), workers=st.integers(1, 64), share=st.floats(0, 1), least=st.integers(0, 5))
def test_theta_grows_with_the_mean_tiles_of_a_worker(tiles: int, workers: int, share: float, least: int) -> None:
    config = PlannerConfig(
        num_experts=1, num_workers=workers, slots_per_worker=0, compactness=least, compactness_share=share
    )
    theta = config.threshold(tiles)
    assert theta >= least
    assert theta == least or abs(theta - share * tiles / workers) <= 1 + tiles / workers / 2048


def test_no_move_is_smaller_than_its_share_of_a_workers_load() -> None:
    """A quarter of a mean of 36 tiles: experts of up to 9 stay whole; of a small batch, none is held back."""
    strict = make([0, 0, 1, 1], 2, 2, compactness_share=0.25)
    plan = strict.plan(np.array([40, 9, 12, 11]), costs=FREE)
    assert {count > 9 for _e, _w, _r, count in plan.shares()} == {True}
    assert plan.assign_EN[1].tolist() == [9, 0]
    assert strict.plan(np.array([3, 2, 0, 0]), costs=FREE).max_tiles == 3


# In the running system


def test_a_slow_workers_tiles_do_not_make_all_look_slow() -> None:
    seed = Costs(tile_us=10.0, copy_us=1.0, window_us=1.0)
    model = CostModel(seed, num_layers=1, warmup=1, costs_N=(60, 120))
    model.update(0, worker=1, tile_us=30.0)
    assert model.layer(0).tile_us == 15.0
    model.update(0, worker=0, tile_us=16.0)
    model.update(0, worker=1, tile_us=32.0)
    assert model.layer(0).tile_us == 16.0


@pytest.mark.slow
def test_a_known_straggler_gets_less_and_the_run_ends_sooner() -> None:
    """In virtual time, one of three FFN workers takes three times as long for a tile."""
    slow = dataclasses.replace(FFN_BOUND, name="slow", tile_us=3 * FFN_BOUND.tile_us)
    emulation = dataclasses.replace(EMULATION, profiles={"ffn-1": slow})
    requests = asks(6, 4)
    told = dataclasses.replace(SMALL, planner=PlannerOptions(tile_tokens=1, worker_speed=(3.0, 1.0, 3.0)))
    runs = {
        name: run_emulated(dataclasses.replace(config, policy=policy), requests, emulation)
        for name, config, policy in (
            ("static", told, "static"),
            ("blind", SMALL, "afore"),
            ("told", told, "afore"),
        )
    }
    assert all(run.tokens == prescribed(requests) for run in runs.values())
    assert runs["told"].elapsed_ns < min(runs["blind"].elapsed_ns, runs["static"].elapsed_ns)
    # Also `static` says how uneven it is for workers of these speeds.
    static, planned = (runs[name].stats["imbalance"]["tile"] for name in ("static", "told"))
    assert static["after"] == static["before"] > 1.2
    assert planned["after"] < static["after"]


def test_the_config_reaches_every_planner() -> None:
    from afore.models.emulated import emulated_spec
    from afore.scheduler.role import planner_config

    spec = emulated_spec(num_experts=8, experts_per_token=2, moe_layers=1, expert_size=10)
    run = RunConfig(
        topology=Topology(ffn=2),
        planner=PlannerOptions(worker_speed=(1.0, 0.25), compactness_share=0.125),
        costs=CostOptions(adapt=False),
    )
    config = planner_config(run, spec)
    assert config.costs_N == (1, 4)
    assert config.share_1024 == 128
