"""HarMoEny by hand: whom a move relieves, how much moves, when it stops, what is copied, kept and awaited."""

from __future__ import annotations

import math
from typing import Any

import pytest

from afore.core.policy_options import HarmoenyOptions, PolicyOptions
from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.policies.base import Action
from afore.scheduler.policies.harmoeny import NO_MOVE, Harmoeny, least_move
from tests.scheduler.baseline_cases import assigned, context, copied, counts, starts


def harmoeny(q: int = 1, *, reuse: bool = False, **shape: Any) -> Harmoeny:
    return Harmoeny(context(options=PolicyOptions(harmoeny=HarmoenyOptions(min_tokens=q, reuse=reuse)), **shape))


def decide(policy: Harmoeny, *demand: int, step: int = 0, microbatch: int = 0) -> list[Action]:
    target = Target(0, microbatch, step)
    assert policy.on_demand(target, counts(*demand), 0.0) == []  # it waits for the inputs
    return policy.on_inputs(target, 1.0)


def test_the_largest_expert_of_the_most_loaded_moves_to_the_least_loaded() -> None:
    """Loads 40, 14, 6, 0; mean 15. Expert 0 (25 pairs): 15 to worker 3. Then worker 0 has 25, and 9 of its 15 of expert 1 go to
    worker 2. Then it has 16, and 1 of its 10 of expert 0 goes to worker 1."""
    actions = decide(harmoeny(experts=8, workers=4), 25, 15, 14, 0, 6, 0, 0, 0)
    assert copied(actions) == [(0, 3, 0), (1, 2, 0), (0, 1, 0)]
    assert assigned(actions).shares == ((0, 1, 0, 1), (0, 3, 0, 15), (1, 2, 0, 9))
    assert starts(actions) == {"arrival"}


def test_moves_below_q_are_not_worth_a_copy() -> None:
    """As above with q = 10: worker 2 could take 9 and is left out; that ends it."""
    actions = decide(harmoeny(10, experts=8, workers=4), 25, 15, 14, 0, 6, 0, 0, 0)
    assert assigned(actions).shares == ((0, 3, 0, 15),)
    # An expert with fewer than q pairs ends it as well.
    assert assigned(decide(harmoeny(10), 9, 9, 0, 0)).skipped == NO_MOVE


def test_the_mean_is_rounded_down() -> None:
    """7 pairs on 2 workers: 3 each at most, so the excess of 4 goes as far as the other's 3."""
    assert assigned(decide(harmoeny(), 7, 0, 0, 0)).shares == ((0, 1, 0, 3),)


def test_a_worker_takes_as_many_experts_as_it_has_slots() -> None:
    """Loads 12, 0; mean 6. Each of four experts has 3 pairs: worker 1 would need two of them."""
    actions = decide(harmoeny(experts=8, slots=1), 3, 3, 3, 3, 0, 0, 0, 0)
    assert assigned(actions).shares == ((0, 1, 0, 3),)
    actions = decide(harmoeny(experts=8, slots=2), 3, 3, 3, 3, 0, 0, 0, 0)
    assert assigned(actions).shares == ((0, 1, 0, 3), (1, 1, 1, 3))
    assert assigned(decide(harmoeny(slots=0), 12, 0, 0, 0)).shares == ()


def test_copies_are_dropped_unless_reuse_is_asked_for() -> None:
    for reuse, again in ((False, [(0, 1, 1)]), (True, [])):
        policy = harmoeny(reuse=reuse)
        assert copied(decide(policy, 8, 0, 0, 0)) == [(0, 1, 0)]
        actions = decide(policy, 8, 0, 0, 0, step=1)
        assert copied(actions) == again
        assert assigned(actions).shares == ((0, 1, again[0][2] if again else 0, 4),)


def test_slots_in_flight_are_not_taken() -> None:
    """M = 2: the slots of the plan before stay."""
    policy = harmoeny(experts=8, microbatches=2)
    assert {copy[2] for copy in copied(decide(policy, 3, 3, 3, 3, 0, 0, 0, 0))} == {0, 1}
    assert copied(decide(policy, 3, 3, 3, 3, 0, 0, 0, 0, microbatch=1)) == []
    assert len(copied(decide(policy, 3, 3, 3, 3, 0, 0, 0, 0, step=1))) == 2


def test_inputs_of_a_target_that_was_given_up_are_no_plan() -> None:
    policy = harmoeny()
    policy.on_demand(Target(0, 0, 0), counts(8, 0, 0, 0), 0.0)
    policy.on_demand(Target(0, 0, 1), counts(4, 0, 0, 0), 0.0)
    assert assigned(policy.on_inputs(Target(0, 0, 1), 0.0)).shares == ((0, 1, 0, 2),)
    assert assigned(policy.on_inputs(Target(0, 0, 1), 0.0)).shares == ()


@pytest.mark.parametrize(
    ("options", "tile_us", "copy_us", "q"),
    [
        (HarmoenyOptions(), 20.0, 100.0, 320),  # five tiles of 64 compute for as long as a copy takes
        (HarmoenyOptions(), 20.0, 101.0, 324),
        (HarmoenyOptions(), 20.0, 1.0, 64),
        (HarmoenyOptions(), 0.0, 1.0, math.inf),
        (HarmoenyOptions(), 0.0, 0.0, 64),
        (HarmoenyOptions(min_tokens=150), 20.0, 1e6, 150),
        (HarmoenyOptions(min_tokens=3), 20.0, 1e6, 64),
    ],
)
def test_q_by_the_published_rule_or_as_given(
    options: HarmoenyOptions, tile_us: float, copy_us: float, q: float
) -> None:
    assert least_move(options, Costs(tile_us=tile_us, copy_us=copy_us, window_us=0.0), 64) == q
