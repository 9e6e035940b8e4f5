"""Where literal Algorithm 1 is far from the best plan under the same constraints: it stays literal, and this is by how much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afore.scheduler import Plan, Planner, validate
from afore.scheduler.plan import build_plan
from tests.scheduler.plan_cases import FREE, make


def better_plan(
    planner: Planner,
    before_NR: NDArray[np.int32],
    greedy: Plan,
    assign: dict[tuple[int, int], int],
    copies: Sequence[tuple[int, int, int]] = (),
) -> Plan:
    """A plan by hand for the same target: counts by (expert, worker)."""
    assign_EN = np.zeros_like(greedy.assign_EN)
    for place, count in assign.items():
        assign_EN[place] = count
    slots_NR = before_NR.copy()
    for e, w, r in copies:
        slots_NR[w, r] = e
    within = greedy.within_max_tiles
    plan = build_plan(
        planner.config,
        planner.primaries_E,
        assign_EN=assign_EN,
        slots_NR=slots_NR,
        copies=copies,
        within_max_tiles=within if copies else None,
        costs=greedy.costs,
    )
    gain_us = float(within - plan.max_tiles) if copies else 0.0
    return build_plan(
        planner.config,
        planner.primaries_E,
        assign_EN=assign_EN,
        slots_NR=slots_NR,
        copies=copies,
        gain_us=gain_us,
        within_max_tiles=within if copies else None,
        costs=greedy.costs,
    )


def test_halving_wastes_the_copy_budget() -> None:
    """One expert of 60 tiles, N = 8, B = 6: 15 against 9."""
    planner = make([0], 8, 1, budget=6)
    before_NR = planner.slots_NR
    demand_E = np.array([60])
    greedy = planner.plan(demand_E, costs=FREE)
    assert greedy.max_tiles == 15
    counts = {(0, w): 9 if w < 4 else 8 for w in range(7)}
    best = better_plan(planner, before_NR, greedy, counts, [(0, w, 0) for w in range(1, 7)])
    validate(best, demand_E, before_NR, planner.primaries_E, planner.config)
    assert best.max_tiles == 9


def test_a_slot_with_a_little_work_is_not_given_up() -> None:
    """The only slot beside the hot expert holds one tile of another: 40 against 20."""
    planner = make([0, 2, 2], 3, (0, 1, 0))
    planner.adopt(np.array([[-2], [1], [-2]]))
    planner.plan(np.array([0, 1, 100]), costs=FREE)  # expert 1's tile moves off its busy primary
    before_NR = planner.slots_NR
    demand_E = np.array([40, 1, 0])
    greedy = planner.plan(demand_E, costs=FREE)
    assert greedy.max_tiles == 40
    best = better_plan(planner, before_NR, greedy, {(0, 0): 20, (0, 1): 20, (1, 2): 1}, [(0, 1, 0)])
    validate(best, demand_E, before_NR, planner.primaries_E, planner.config)
    assert best.max_tiles == 20


def test_no_relay_over_two_replicas() -> None:
    """Loads 7, 6, 5: no pair differs by two and shares an expert, but moving along both pairs would even them: 7 against 6."""
    planner = make([0, 1, 2], 3, 1, budget=0)
    planner.adopt(np.array([[-1], [0], [1]]))
    before_NR = planner.slots_NR
    demand_E = np.array([7, 6, 5])
    greedy = planner.plan(demand_E, costs=FREE)
    assert greedy.max_tiles == 7
    best = better_plan(planner, before_NR, greedy, {(0, 0): 6, (0, 1): 1, (1, 1): 5, (1, 2): 1, (2, 2): 5})
    validate(best, demand_E, before_NR, planner.primaries_E, planner.config)
    assert best.max_tiles == 6


def test_a_badly_carried_assignment() -> None:
    """Carried proportions keep a sliver of work in every slot: 281, against 140 when A_{t-1} is forgotten (94 is possible)."""
    planner = make([0, 3, 3, 4, 4], 5, (0, 1, 1, 0, 0))
    planner.adopt(np.array([[-2], [1], [3], [-2], [-2]]))
    planner.plan(np.array([0, 1, 100, 1, 100]), costs=FREE)  # experts 1 and 3 leave their busy primaries
    before_NR = planner.slots_NR
    demand_E = np.array([281, 1, 0, 1, 0])
    greedy = planner.plan(demand_E, costs=FREE)
    assert greedy.max_tiles == 281
    planner.adopt(before_NR)
    assert planner.plan(demand_E, costs=FREE).max_tiles == 140
    counts = {(0, 0): 94, (0, 1): 94, (0, 2): 93, (1, 3): 1, (3, 4): 1}
    best = better_plan(planner, before_NR, greedy, counts, [(0, 1, 0), (0, 2, 0)])
    validate(best, demand_E, before_NR, planner.primaries_E, planner.config)
    assert best.max_tiles == 94


def test_a_fixed_compactness_leaves_imbalance() -> None:
    """θ = 3 forbids the moves of at most three tiles that would even this out: 12 against 9."""
    demand_E = np.array([6, 6, 3, 3])
    loose, strict = (make([0, 0, 1, 1], 2, 2, compactness=theta).plan(demand_E, costs=FREE) for theta in (0, 3))
    assert (loose.max_tiles, strict.max_tiles) == (9, 12)
