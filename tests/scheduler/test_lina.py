"""Lina by hand: replicas by predicted load a copy, an even split, and phase 2 where the prediction was wrong."""

from __future__ import annotations

import pytest

from afore.core.policy_options import LinaOptions, PolicyOptions
from afore.core.target import Target
from afore.scheduler.policies.lina import AHEAD, NOT_PREDICTED, Lina
from tests.scheduler.baseline_cases import assigned, context, copied, counts, starts

TARGET = Target(0, 0, 0)


def test_replicas_until_the_slots_are_used() -> None:
    """Three workers with a slot each; predicted 30 | 6, 9 | 3. Expert 0 at 30 → the lightest, worker 2 (3); then at 15 → worker 1;
    then it is everywhere, and 9 (expert 2 on worker 1) would be next: worker 0's slot takes it. Then there is no slot."""
    policy = Lina(context(experts=6, workers=3, slots=1))
    actions = policy.on_prediction(TARGET, counts(30, 0, 9, 6, 3, 0), 0.0)
    assert copied(actions) == [(0, 2, 0), (0, 1, 0), (2, 0, 0)]
    assert starts(actions) == {"now"}
    actions = policy.on_demand(TARGET, counts(7, 1, 2, 0, 0, 0), 0.0)
    # 7 over three: 3 on the primary, then 2 and 2 by rank. 2 over two: one each.
    assert assigned(actions).shares == ((0, 1, 0, 2), (0, 2, 0, 2), (2, 0, 0, 1))
    assert assigned(actions).skipped == AHEAD


def test_the_split_is_even_whatever_the_demand() -> None:
    """The prediction was wrong: expert 1 is the hot one, and without replan nothing is done about it."""
    policy = Lina(context(slots=1))
    policy.on_prediction(TARGET, counts(8, 0, 0, 0), 0.0)
    assert assigned(policy.on_demand(TARGET, counts(2, 20, 0, 0), 0.0)).shares == ((0, 1, 0, 1),)


def test_replicas_that_are_there_are_used_and_not_copied() -> None:
    policy = Lina(context(slots=2))
    first = copied(policy.on_prediction(TARGET, counts(8, 0, 6, 0), 0.0))
    assert first == [(0, 1, 0), (2, 0, 0)]
    policy.on_demand(TARGET, counts(8, 0, 6, 0), 0.0)
    again = Target(0, 0, 1)
    assert copied(policy.on_prediction(again, counts(8, 7, 6, 0), 0.0)) == [(1, 1, 1)]
    assert assigned(policy.on_demand(again, counts(8, 8, 8, 0), 0.0)).shares == (
        (0, 1, 0, 4),
        (1, 1, 1, 4),
        (2, 0, 0, 4),
    )


@pytest.mark.parametrize(("slots", "microbatches", "most"), [(4, 1, 4), (4, 2, 2), (4, 3, 1), (1, 3, 1), (0, 1, 0)])
def test_a_target_fills_its_part_of_the_slots(slots: int, microbatches: int, most: int) -> None:
    policy = Lina(context(experts=12, slots=slots, microbatches=microbatches))
    assert len(copied(policy.on_prediction(TARGET, counts(*[9] * 6, *[0] * 6), 0.0))) == most


def test_what_is_reserved_for_a_target_is_not_rebound_before_it() -> None:
    policy = Lina(context(slots=2, microbatches=2))
    other = Target(0, 1, 0)
    assert copied(policy.on_prediction(TARGET, counts(8, 0, 0, 0), 0.0)) == [(0, 1, 0)]
    assert copied(policy.on_prediction(other, counts(0, 8, 0, 0), 0.0)) == [(1, 1, 1)]
    policy.on_demand(other, counts(0, 8, 0, 0), 0.0)
    later = Target(0, 1, 1)
    # Both slots are spoken for; what the other one's slot holds may be used all the same.
    assert copied(policy.on_prediction(later, counts(8, 0, 0, 0), 0.0)) == []
    assert assigned(policy.on_demand(later, counts(8, 0, 0, 0), 0.0)).shares == ((0, 1, 0, 4),)
    assert assigned(policy.on_demand(TARGET, counts(8, 0, 0, 0), 0.0)).shares == ((0, 1, 0, 4),)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_targets_in_flight_never_leave_one_another_without_slots(microbatches: int) -> None:
    """Popularity wanders: what was fetched long ago must make room, however much of what is there each target could use."""
    policy = Lina(context(experts=24, slots=6, microbatches=microbatches))
    fetched = []
    for step in range(24):
        load = [8 + 4 * max(0, 14 - (expert - step) % 24) for expert in range(24)]
        for microbatch in range(microbatches):
            target = Target(0, microbatch, step)
            fetched += [step] * len(copied(policy.on_prediction(target, counts(*load), 0.0)))
            policy.on_demand(target, counts(*load), 0.0)
    assert max(fetched) > 20


def test_without_a_prediction_it_runs_on_primaries() -> None:
    policy = Lina(context())
    assign = assigned(policy.on_demand(TARGET, counts(8, 0, 0, 0), 0.0))
    assert (assign.shares, assign.skipped) == ((), NOT_PREDICTED)


def test_phase_2_places_again_on_true_demand_and_exposed() -> None:
    """K = 1: the predicted top 2 are {0, 2}. A true top 2 of the same experts is no mistake, whatever their order."""
    policy = Lina(context(slots=2, options=PolicyOptions(lina=LinaOptions(replan=True))))
    policy.on_prediction(TARGET, counts(8, 0, 6, 0), 0.0)
    assert copied(policy.on_demand(TARGET, counts(5, 0, 9, 1), 0.0)) == []
    wrong = Target(0, 0, 1)
    policy.on_prediction(wrong, counts(8, 0, 6, 0), 0.0)
    actions = policy.on_demand(wrong, counts(0, 8, 0, 6), 0.0)
    assert starts(actions) == {"arrival"}
    assert copied(actions) == [(1, 1, 1), (3, 0, 1)]
    assert assigned(actions).shares == ((1, 1, 1, 4), (3, 0, 1, 3))
