"""``afore-plus``: valid, deterministic, never worse than Algorithm 1 from the same state, and exact over the replicas there are."""

from __future__ import annotations

import numpy as np
import pytest

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.scheduler.core_layout import parts_of
from afore.scheduler.costs import Costs, exposed_us
from afore.scheduler.plan import Plan, PlannerConfig, ProtectedWindow
from afore.scheduler.planner import Planner
from afore.scheduler.plus_planner import PlusPlanner
from afore.scheduler.policies.base import Assign, PolicyContext
from afore.scheduler.policies.registry import make_policy
from afore.scheduler.validate import validate
from tests.scheduler.brute_force import holders_of, least_over
from tests.scheduler.plan_cases import FREE, Situation, differences

SEQUENCES, STEPS = 60, 8


def net_us(plan: Plan, primaries_E: np.ndarray[tuple[int], np.dtype[np.int32]]) -> float:
    """What the target costs: tiles of its most loaded worker, and copies that show."""
    return plan.costs.tile_us * plan.max_tiles + exposed_us(plan.copies, primaries_E, plan.costs)


def check_chains(planner: Planner) -> None:
    """The buffer's lists agree with its slot table."""
    parts = parts_of.py_func(planner.buffer)
    for e in range(parts.head.size):
        chain, s = [], int(parts.head[e])
        while s >= 0:
            chain.append(s)
            s = int(parts.after[s])
        assert chain == np.flatnonzero(parts.slots == e).tolist()
        places = {int(w): int(parts.where[e * parts.load.size + w]) for w in range(parts.load.size)}
        held = {int(parts.owner[s]): parts.head.size + s for s in chain}
        held[int(parts.primary[e])] = e
        assert places == {w: held.get(w, -1) for w in places}


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(4))
def test_never_worse_than_algorithm_1_on_random_sequences(batch: int) -> None:
    """In all batches 1,920 plans: from the same buffer, accepted by the validator, the same twice."""
    better = exposed = flow_only = 0
    for seed in range(batch * SEQUENCES, (batch + 1) * SEQUENCES):
        rng = np.random.default_rng(seed)
        situation = Situation.random(rng)
        config, primaries_E = situation.config, situation.primaries_E
        planner = Planner(config, primaries_E)
        plus, twin = PlusPlanner(config, primaries_E), PlusPlanner(config, primaries_E)
        for step, demand_E in enumerate(situation.demands(STEPS)):
            if rng.random() < 0.15:
                slots_NR = situation.slots()
                plus.adopt(slots_NR)
            planner.buffer[:] = plus.buffer
            twin.buffer[:] = plus.buffer
            assert twin.scratch is not None
            twin.scratch[:] = rng.integers(-9, 9, twin.scratch.size)  # nothing in it may matter
            before_NR = plus.slots_NR
            protected_NR, costs = situation.protected(), situation.costs()
            greedy = planner.plan(demand_E, protected_NR, costs)
            plan = plus.plan(demand_E, protected_NR, costs)
            where = (seed, step)
            validate(plan, demand_E, before_NR, primaries_E, config, protected_NR)
            check_chains(plus)
            assert not differences(plan, twin.plan(demand_E, protected_NR, costs)), where
            assert plan.max_tiles <= greedy.max_tiles, where
            assert plan.within_max_tiles <= greedy.within_max_tiles, where
            assert net_us(plan, primaries_E) <= net_us(greedy, primaries_E) + 1e-9, where
            if greedy.max_tiles == greedy.bound_tiles:
                assert not differences(plan, greedy), where
            better += plan.max_tiles < greedy.max_tiles
            exposed += bool(plan.copies) and exposed_us(plan.copies, primaries_E, costs) > 0
            flow_only += plan.max_tiles < greedy.max_tiles and not plan.copies
    plans = SEQUENCES * STEPS
    # The cases must reach what they are for.
    assert better > plans // 20
    assert exposed > plans // 200
    assert flow_only > plans // 50


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(2))
def test_flow_over_the_replicas_there_are_is_exact(batch: int) -> None:
    """Without copies the maximum is Hall's bound over all sets of experts."""
    above = 0
    for seed in range(batch * 150, (batch + 1) * 150):
        rng = np.random.default_rng(seed)
        N, E = int(rng.integers(2, 7)), int(rng.integers(2, 9))
        theta = int(rng.choice([0, 0, 2]))
        config = PlannerConfig(
            num_experts=E, num_workers=N, slots_per_worker=2, tile_tokens=4, copy_budget=0, compactness=theta
        )
        primaries_E = rng.integers(0, N, E)
        planner = PlusPlanner(config, primaries_E)
        planner.adopt(rng.integers(-1, E, (N, 2)))
        for _ in range(3):
            demand_E = rng.integers(0, 80, E) * (rng.random(E) < 0.7)
            plan = planner.plan(demand_E, costs=FREE)
            tiles = (-(-demand_E // 4)).tolist()
            holders = holders_of(planner.slots_NR, primaries_E.tolist(), tiles, theta)
            assert plan.max_tiles == least_over(tiles, holders, N), seed
            above += plan.max_tiles > plan.bound_tiles
    assert above > 50


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "slots"), [(4, 2), (8, 2), (33, 1)])
def test_at_model_size_it_is_nearer_to_the_bound(num_workers: int, slots: int) -> None:
    """E = 128, drifting skewed demand, the protected window of M = 2; valid, and over all targets strictly better."""
    rng = np.random.default_rng(num_workers)
    config = PlannerConfig(num_experts=128, num_workers=num_workers, slots_per_worker=slots)
    primaries_E = (np.arange(128) * num_workers // 128).astype(np.int32)
    planner, plus = Planner(config, primaries_E), PlusPlanner(config, primaries_E)
    window = ProtectedWindow(1)
    heat_E = rng.normal(size=128)
    greedy_tiles = plus_tiles = 0
    for _ in range(20):
        heat_E = 0.95 * heat_E + 0.3 * rng.normal(size=128)
        demand_E = rng.multinomial(16384, np.exp(heat_E) / np.exp(heat_E).sum())
        planner.buffer[:] = plus.buffer
        before_NR, protected_NR = plus.slots_NR, window.protected()
        greedy = planner.plan(demand_E, protected_NR, FREE)
        plan = plus.plan(demand_E, protected_NR, FREE)
        validate(plan, demand_E, before_NR, primaries_E, config, protected_NR)
        window.push(plan.used_NR)
        assert plan.max_tiles <= greedy.max_tiles
        greedy_tiles += greedy.max_tiles
        plus_tiles += plan.max_tiles
    assert plus_tiles < greedy_tiles


def test_copies_must_pay_against_what_flow_alone_reaches() -> None:
    """One hot expert: copies hide in the window and are made; exposed ones that cost more than they save are not."""
    config = PlannerConfig(num_experts=1, num_workers=4, slots_per_worker=1, tile_tokens=1)
    demand_E = np.array([40])
    hidden = PlusPlanner(config, [0]).plan(demand_E, costs=Costs(tile_us=1.0, copy_us=5.0, window_us=100.0))
    assert (hidden.max_tiles, len(hidden.copies), hidden.gain_us) == (10, 3, 30.0)
    dear = PlusPlanner(config, [0]).plan(demand_E, costs=Costs(tile_us=1.0, copy_us=100.0, window_us=0.0))
    assert (dear.max_tiles, dear.copies, dear.gain_us) == (40, [], 0.0)


def test_what_cannot_be_planned_is_refused() -> None:
    planner = PlusPlanner(PlannerConfig(num_experts=2, num_workers=2), [0, 1])
    with pytest.raises(ConfigError, match="costs"):
        planner.plan([1, 2])
    with pytest.raises(ValueError, match="2 counts"):
        planner.plan([1, 2, 3], costs=FREE)
    with pytest.raises(ValueError, match="-1 pairs for expert 1"):
        planner.plan([1, -1], costs=FREE)
    assert planner.plan([1, 2], costs=FREE).max_tiles == 1


def test_the_policy_plans_with_it() -> None:
    """Its shares are the planner's, in a case in which Algorithm 1's are others."""
    config = PlannerConfig(num_experts=1, num_workers=8, slots_per_worker=1, tile_tokens=1, copy_budget=6)
    context = PolicyContext(
        planner=config, primaries_E=np.zeros(1, np.int32), num_layers=1, num_microbatches=1, costs=lambda layer: FREE
    )
    maxima = {}
    for name in ("afore", "afore-plus"):
        assign = make_policy(name, context).on_demand(Target(0, 0, 0), np.array([60]), 0.0)[-1]
        assert isinstance(assign, Assign)
        assert assign.plan is not None
        assert list(assign.shares) == assign.plan.shares()
        maxima[name] = assign.plan.max_tiles
    assert maxima == {"afore": 15, "afore-plus": 9}
