"""The compiled core equals the literal reference bit for bit, over carried state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.planner import Planner, ProtectedWindow
from afore.scheduler.reference import ReferencePlanner
from tests.scheduler.plan_cases import FREE, Situation, differences, equal_plans

BATCHES = 8
SEQUENCES = 160
STEPS = 8


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_core_equals_reference_on_random_sequences(batch: int) -> None:
    """In all batches 10,240 plans, each also accepted by the validator."""
    with_copies = exposed = moved = 0
    for seed in range(batch * SEQUENCES, (batch + 1) * SEQUENCES):
        for plan in equal_plans(Situation.random(np.random.default_rng(seed)), STEPS):
            costs = plan.costs
            with_copies += bool(plan.copies)
            exposed += bool(plan.copies) and plan.gain_us < costs.tile_us * (plan.within_max_tiles - plan.max_tiles)
            moved += bool(plan.shares())
    plans = SEQUENCES * STEPS
    # The cases must reach what they are for.
    assert with_copies > plans // 20
    assert moved > plans // 5
    assert exposed > plans // 200


RECEIVERS_THAT_GIVE_AGAIN = (680, 794, 1555, 1585, 1614, 2366, 2494, 3652, 4901, 5361)
"""Seeds in which a worker that had nothing to give receives tiles and then gives some: about one of 900."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [RECEIVERS_THAT_GIVE_AGAIN, range(60), range(60, 120)], ids=lambda seeds: str(seeds[0])
)
def test_core_equals_reference_in_crowded_placements(seeds: Sequence[int]) -> None:
    for seed in seeds:
        situation, slots_NR, demand_E = Situation.crowded(seed)
        planner = Planner(situation.config, situation.primaries_E)
        reference = ReferencePlanner(situation.config, situation.primaries_E)
        planner.adopt(slots_NR)
        reference.adopt(slots_NR)
        for _ in range(2):
            assert not differences(planner.plan(demand_E, costs=FREE), reference.plan(demand_E, costs=FREE)), seed
            demand_E = situation.rng.permutation(demand_E)


SLOTS_FREED_BY_A_LATER_COPY = (2884, 3037, 8434, 13768, 14306, 17133, 26769, 36521, 45524, 47783)
"""Seeds in which a worker without a safe slot gets one, because a later copy takes the work out of it."""
COPIES_LEFT_WITHOUT_WORK = (829, 950, 5285, 9255, 26930, 27309, 28747, 28858, 29872, 33326)
"""Seeds in which a new replica's tiles have all moved on when the search ends: its slot is in use nevertheless."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [SLOTS_FREED_BY_A_LATER_COPY, COPIES_LEFT_WITHOUT_WORK, range(100)], ids=lambda seeds: str(seeds[0])
)
def test_core_equals_reference_in_long_chains_of_copies(seeds: Sequence[int]) -> None:
    for seed in seeds:
        situation, slots_NR = Situation.copying(seed)
        planner = Planner(situation.config, situation.primaries_E)
        reference = ReferencePlanner(situation.config, situation.primaries_E)
        planner.adopt(slots_NR)
        reference.adopt(slots_NR)
        rng, E = situation.rng, situation.config.num_experts
        for _ in range(3):
            demand_E = rng.integers(0, 60, E) * (rng.random(E) < 0.6)
            assert not differences(planner.plan(demand_E, costs=FREE), reference.plan(demand_E, costs=FREE)), seed


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "slots"), [(2, 8), (4, 8), (8, 8), (8, 2), (16, 2), (33, 1)])
def test_core_equals_reference_at_model_size(num_workers: int, slots: int) -> None:
    """E = 128, drifting skewed demand, the protected window of M = 2, copies that are partly exposed."""
    rng = np.random.default_rng(num_workers * 100 + slots)
    config = PlannerConfig(num_experts=128, num_workers=num_workers, slots_per_worker=slots)
    primaries_E = (np.arange(128) * num_workers // 128).astype(np.int32)
    planner, reference = Planner(config, primaries_E), ReferencePlanner(config, primaries_E)
    window = ProtectedWindow(1)
    heat_E = rng.normal(size=128) * 1.2
    copies = 0
    for _ in range(10):
        heat_E = 0.95 * heat_E + 0.35 * rng.normal(size=128)
        demand_E = rng.multinomial(16384, np.exp(heat_E) / np.exp(heat_E).sum())
        costs = Costs(tile_us=20.0, copy_us=130.0, window_us=300.0)
        plan = planner.plan(demand_E, window.protected(), costs)
        assert not differences(plan, reference.plan(demand_E, window.protected(), costs))
        window.push(plan.used_NR)
        copies += len(plan.copies)
    assert copies > 0
