"""The explanation is the reference's own steps: same plan as the compiled core, and its steps add up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from afore.scheduler.costs import Costs
from afore.scheduler.explain import ExplainingPlanner, Explanation
from afore.scheduler.plan import Plan, PlannerConfig
from afore.scheduler.planner import Planner
from tests.scheduler.plan_cases import Situation, differences


def check_adds_up(told: Explanation, costs_N: Sequence[int]) -> None:
    """Each table of loads follows from the one before by the steps told."""
    loads = list(told.start_N)
    for move in told.moves:
        assert max(loads) == move.max_before
        loads[move.source] -= move.tiles * costs_N[move.source]
        loads[move.destination] += move.tiles * costs_N[move.destination]
        assert max(loads) == move.max_after
        assert move.slot < 0
    assert loads == told.within_N
    for copy in told.copies:
        assert max(loads) == copy.max_before
        loads[copy.source] -= copy.tiles * costs_N[copy.source]
        loads[copy.destination] += copy.tiles * costs_N[copy.destination]
        assert max(loads) == copy.max_after
        if copy.kept:
            kept_loads = list(loads)
    assert told.final_N == (kept_loads if told.plan.copies else told.within_N)
    kept = [(copy.expert, copy.destination, copy.slot) for copy in told.copies if copy.kept]
    assert kept == told.plan.copies
    if kept:
        assert told.copies[len(kept) - 1].net_us == pytest.approx(told.plan.gain_us)
        assert max(copy.net_us for copy in told.copies) == pytest.approx(told.plan.gain_us)
    assert told.plan.copies or told.rejected


@pytest.mark.slow
def test_the_explained_plan_is_the_compiled_cores() -> None:
    """On random sequences; every other target from the compiled planner's state instead of its own."""
    taken_back = with_moves = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        situation = Situation.random(rng)
        planner = Planner(situation.config, situation.primaries_E)
        explaining = ExplainingPlanner(situation.config, situation.primaries_E)
        last: Plan | None = None
        for step, demand_E in enumerate(situation.demands(6)):
            if step % 2:
                explaining = ExplainingPlanner(situation.config, situation.primaries_E)
                explaining.continue_from(planner, last)
            protected_NR, costs = situation.protected(), situation.costs()
            last = planner.plan(demand_E, protected_NR, costs)
            told = explaining.explain(demand_E, protected_NR, costs)
            assert not differences(told.plan, last), (seed, step)
            if costs.tile_us > 0:
                check_adds_up(told, situation.config.costs_N)
            taken_back += any(not copy.kept for copy in told.copies)
            with_moves += bool(told.moves)
    assert taken_back > 20
    assert with_moves > 50


def test_what_was_not_done_is_told_with_its_reason() -> None:
    """A protected slot, a budget of one, and copies that cost more than they save."""
    demand_E = np.array([40, 0, 0])
    config = PlannerConfig(num_experts=3, num_workers=3, slots_per_worker=1, tile_tokens=1, copy_budget=1)
    free = Costs(tile_us=1.0, copy_us=0.0, window_us=0.0)
    told = ExplainingPlanner(config, [0, 1, 2]).explain(demand_E, np.array([[False], [True], [False]]), free)
    assert told.plan.copies == [(0, 2, 0)]
    assert "ffn-1 takes no copy: 1 slot protected by plans in flight" in told.rejected
    assert "further copies: the budget of 1 is used up" in told.rejected
    dear = Costs(tile_us=1.0, copy_us=500.0, window_us=0.0)
    told = ExplainingPlanner(config, [0, 1, 2]).explain(demand_E, None, dear)
    assert told.plan.copies == []
    assert [copy.net_us for copy in told.copies] == [-480.0]
    assert any("1 more copies were tried and taken back" in reason for reason in told.rejected)
