"""Libra by hand: replicas by prediction, a layer ahead and not kept; pairs by true demand over what is there."""

from __future__ import annotations

import numpy as np
import pytest

from afore.core.policy_options import LibraOptions, PolicyOptions
from afore.core.slots import contiguous_primaries
from afore.core.target import Target
from afore.scheduler.policies.libra import AHEAD, NOT_PREDICTED, Libra, redistribute
from tests.scheduler.baseline_cases import assigned, context, copied, counts, starts

TARGET = Target(0, 0, 0)


def test_the_hottest_expert_of_the_most_loaded_goes_to_the_least_loaded() -> None:
    """Loads 40, 14, 6, 0; mean 15. 0 → worker 3 (15 pairs), then of worker 0's 25 the 15 of expert 1 → worker 2 (9), then 10 of
    expert 0 → worker 1 (1)."""
    policy = Libra(context(experts=8, workers=4))
    actions = policy.on_prediction(TARGET, counts(25, 15, 14, 0, 6, 0, 0, 0), 0.0)
    assert copied(actions) == [(0, 3, 0), (1, 2, 0), (0, 1, 0)]
    assert starts(actions) == {"now"}


def test_each_target_fills_its_part_of_the_slots() -> None:
    """R = 4, double buffer: 2 a target. M = 4 in the making: 1."""
    skewed = counts(5, 5, 5, 5, 5, 5, 0, 0, 0, 0, 0, 0)
    for microbatches, part in ((1, 2), (2, 2), (4, 1)):
        policy = Libra(context(experts=12, slots=4, microbatches=microbatches))
        assert len(copied(policy.on_prediction(TARGET, skewed, 0.0))) == part
    policy = Libra(context(experts=12, slots=4, options=PolicyOptions(libra=LibraOptions(buffers=1))))
    assert len(copied(policy.on_prediction(TARGET, skewed, 0.0))) == 3  # then nobody exceeds the mean
    assert len(copied(Libra(context(experts=12, slots=1)).on_prediction(TARGET, skewed, 0.0))) == 1
    assert Libra(context(experts=12, slots=0)).on_prediction(TARGET, skewed, 0.0) == []


def test_pairs_follow_true_demand_over_predicted_replicas() -> None:
    """Predicted: expert 0 is hot; its replica goes to worker 1. True: expert 1 is, which has none; expert 0 gives what it has."""
    policy = Libra(context(experts=4))
    policy.on_prediction(TARGET, counts(8, 0, 0, 0), 0.0)
    actions = policy.on_demand(TARGET, counts(3, 9, 0, 0), 0.0)
    assert assigned(actions).shares == ((0, 1, 0, 3),)
    assert assigned(actions).skipped == AHEAD
    assert copied(actions) == []


def test_without_a_prediction_it_runs_on_primaries() -> None:
    policy = Libra(context(layers=2))
    policy.on_prediction(Target(0, 0, 1), counts(8, 0, 0, 0), 0.0)
    for target in (TARGET, Target(1, 0, 1)):
        assign = assigned(policy.on_demand(target, counts(8, 0, 0, 0), 0.0))
        assert (assign.shares, assign.skipped) == ((), NOT_PREDICTED)


@pytest.mark.parametrize(("reuse", "copies"), [(False, [(0, 1, 1)]), (True, [])])
def test_replicas_are_not_kept_unless_reuse_is_asked_for(reuse: bool, copies: list[tuple[int, int, int]]) -> None:
    policy = Libra(context(options=PolicyOptions(libra=LibraOptions(reuse=reuse))))
    for step, expected in enumerate(([(0, 1, 0)], copies)):
        target = Target(0, 0, step)
        assert copied(policy.on_prediction(target, counts(8, 0, 0, 0), 0.0)) == expected
        slot = expected[0][2] if expected else 0
        assert assigned(policy.on_demand(target, counts(8, 0, 0, 0), 0.0)).shares == ((0, 1, slot, 4),)


def test_slots_that_wait_for_their_target_are_nobody_elses() -> None:
    """M = 2, R = 2: one slot each. The second microbatch's prediction comes before the first one's target is planned."""
    policy = Libra(context(microbatches=2))
    other = Target(0, 1, 0)
    assert copied(policy.on_prediction(TARGET, counts(8, 0, 0, 0), 0.0)) == [(0, 1, 0)]
    assert copied(policy.on_prediction(other, counts(0, 8, 0, 0), 0.0)) == [(1, 1, 1)]
    assert assigned(policy.on_demand(other, counts(0, 8, 0, 0), 0.0)).shares == ((1, 1, 1, 4),)
    # Nothing is free: one slot is reserved, the other one is in flight.
    assert policy.on_prediction(Target(0, 1, 1), counts(8, 0, 0, 0), 0.0) == []
    assert assigned(policy.on_demand(TARGET, counts(8, 0, 0, 0), 0.0)).shares == ((0, 1, 0, 4),)


def test_a_reset_layer_forgets_what_was_placed() -> None:
    policy = Libra(context())
    policy.on_prediction(TARGET, counts(8, 0, 0, 0), 0.0)
    policy.reset_layer(0)
    assert assigned(policy.on_demand(TARGET, counts(8, 0, 0, 0), 0.0)).shares == ()


def test_redistribution_by_hand() -> None:
    """Loads 20, 10, 0; mean 10. Expert 0 (12 pairs, on 1 and 2) gives min(10, 10) to the lightest holder, worker 2."""
    pairs_EN = redistribute(np.array([12, 8, 10, 0, 0, 0]), contiguous_primaries(6, 3), {(0, 1): 0, (0, 2): 0}, 3)
    assert pairs_EN[0].tolist() == [2, 0, 10]
    assert pairs_EN.sum(axis=0).tolist() == [10, 10, 10]
    # Where no holder of the hottest has room, the next hottest gives: expert 1's replica is on worker 2.
    pairs_EN = redistribute(np.array([12, 8, 10, 0, 0, 0]), contiguous_primaries(6, 3), {(0, 1): 0, (1, 2): 0}, 3)
    assert pairs_EN.sum(axis=0).tolist() == [12, 10, 8]
    assert pairs_EN[1].tolist() == [0, 0, 8]
