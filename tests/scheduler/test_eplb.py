"""EPLB: the published example, its two steps by hand, and the policy around them: window, interval, modes, slots that drain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from afore.core.errors import ConfigError
from afore.core.policy_options import EplbOptions, PolicyOptions
from afore.core.target import Target
from afore.scheduler.eplb import full_layout, moves, pack, redundant_layout, replicate
from afore.scheduler.load_window import LoadWindow
from afore.scheduler.policies.base import Action
from afore.scheduler.policies.eplb import Eplb
from afore.scheduler.policies.eplb_redistribute import EplbRedistribute
from tests.scheduler.baseline_cases import assigned, context, copied, counts, starts

# The two steps

PUBLISHED_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_LAYOUT = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
"""The example in the algorithm's own README: 12 experts in 4 groups, 16 replicas, 2 nodes, 8 devices."""


@pytest.mark.parametrize(("load", "layout"), list(zip(PUBLISHED_LOAD, PUBLISHED_LAYOUT, strict=True)))
def test_the_published_example(load: list[int], layout: list[int]) -> None:
    held_N = full_layout(np.array(load), np.full(8, 2), groups=4, nodes=2)
    published = np.array(layout).reshape(8, 2).tolist()
    assert [sorted(held) for held in held_N] == [sorted(held) for held in published]


def test_replicas_go_to_the_greatest_load_a_copy() -> None:
    """8/1 → 8/2 = 4 against 5 → 4 against 2.5 and 4: the first of the equals."""
    copies_E, given = replicate(counts(8, 5, 4), 4)
    assert given.tolist() == [0, 1, 0, 2]
    assert copies_E.tolist() == [3, 2, 2]
    copies_E, given = replicate(counts(9, 1), 5, most=2)
    assert (copies_E.tolist(), given.tolist()) == ([2, 2], [0, 1])
    assert replicate(counts(9, 0), 5, most=2)[1].tolist() == [0]


def test_packing_goes_by_decreasing_load_to_the_lightest_with_room() -> None:
    assert pack(counts(3, 9, 5, 5), [2, 2]) == [0, 0, 1, 1]
    # Worker 0 starts with 6, and holds one of kind 1 already.
    held = np.array([[False, False], [True, False]])
    assert pack(counts(4, 4), [1, 1], base_N=counts(6, 0), kinds_X=np.array([0, 1]), held_KN=held) == [1, -1]


def test_redundant_layout_by_hand() -> None:
    """Loads 80, 20 | 10, 10 with one slot each: replicas of 0 (80 → 40 each) and again 0? It is on both workers then, so 1."""
    held_N = redundant_layout(counts(80, 20, 10, 10), np.array([0, 0, 1, 1]), np.array([1, 1]))
    # Given in order: expert 0, then expert 1. Both have their primaries on worker 0, whose slot only 2 or 3 could use.
    assert held_N == [[], [0]]
    held_N = redundant_layout(counts(60, 5, 50, 5), np.array([0, 0, 1, 1]), np.array([1, 1]))
    assert held_N == [[2], [0]]


def test_what_a_worker_keeps_stays_in_its_slot() -> None:
    before = np.array([[3, 1, -1], [2, -2, -2]])
    assert moves(before, [[1, 5, 3], [4]]).tolist() == [[3, 1, 5], [4, -2, -2]]
    assert moves(before, [[1], []]).tolist() == before.tolist()


def test_too_few_slots_and_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold 4 experts"):
        full_layout(counts(1, 1, 1, 1), np.array([2, 1]))
    with pytest.raises(ConfigError, match="3 nodes of 4 workers"):
        full_layout(np.ones(6), np.full(4, 2), groups=3, nodes=3)


def test_the_window_is_of_completed_steps() -> None:
    window = LoadWindow(2, num_layers=1, num_experts=2)
    for step, load in enumerate([(1, 0), (10, 0), (100, 0)]):
        window.add(Target(0, 0, step), counts(*load))
        window.close(0)
    assert window.load_LE.tolist() == [[110, 0]]
    window.add(Target(0, 1, 7), counts(5, 5))  # given up: step 8 takes its place
    window.add(Target(0, 1, 8), counts(0, 3))
    assert window.load_LE.tolist() == [[110, 0]]
    window.close(1)
    window.close(1)
    assert window.load_LE.tolist() == [[100, 3]]
    assert window.completed == 4


# The policy


def eplb(mode: str, *, kind: type[Eplb] = Eplb, window: int = 1, interval: int = 1, **shape: Any) -> Eplb:
    options = PolicyOptions(eplb=EplbOptions(mode=mode, window_steps=window, interval_steps=interval))  # type: ignore[arg-type]
    return kind(context(options=options, **shape))


def step(
    policy: Eplb, number: int, *demands: tuple[int, ...], microbatch: int = 0
) -> tuple[list[list[Action]], list[Action]]:
    """One step: what each layer's target and the step's end are answered with."""
    answers = [
        policy.on_demand(Target(layer, microbatch, number), counts(*demand), 0.0)
        for layer, demand in enumerate(demands)
    ]
    return answers, policy.on_step_end(microbatch, number, 0.0)


SKEWED = (60, 5, 50, 5)
"""As by hand above: experts 0 and 2 change places."""


def test_stop_rebalances_all_layers_at_once_and_exposed() -> None:
    policy = eplb("stop", layers=2, slots=1, interval=2)
    _, end = step(policy, 0, SKEWED, (5, 60, 5, 50))
    assert end == []
    _, end = step(policy, 1, SKEWED, (5, 60, 5, 50))
    assert [(action.layer, action.copies) for action in end] == [  # type: ignore[union-attr]
        (0, ((2, 0, 0), (0, 1, 0))),
        (1, ((3, 0, 0), (1, 1, 0))),
    ]
    assert starts(end) == {"arrival"}
    answers, _ = step(policy, 2, (7, 1, 4, 0), (1, 1, 1, 1))
    # 7 pairs: 4 on the primary, 3 on the replica. One pair stays where the first of its replicas is.
    assert assigned(answers[0]).shares == ((0, 1, 0, 3), (2, 0, 0, 2))
    assert assigned(answers[1]).shares == ()


def test_after_so_many_rebalancings_there_are_no_more() -> None:
    turned = (5, 60, 5, 50)
    for most, times in ((None, 4), (1, 1), (2, 2)):
        options = EplbOptions(mode="stop", window_steps=1, interval_steps=2, most_rebalances=most)
        policy = Eplb(context(options=PolicyOptions(eplb=options), layers=1, slots=1))
        ends = [step(policy, number, SKEWED if number % 4 < 2 else turned)[1] for number in range(8)]
        assert sum(map(bool, ends)) == times
        assert all(bool(end) == (number % 2 == 1 and number < 2 * times) for number, end in enumerate(ends))
    with pytest.raises(ConfigError, match=r"policy_options.eplb.most_rebalances: 0 is below 1"):
        EplbOptions(most_rebalances=0)


def test_async_rebalances_one_layer_a_step_and_waits_before_it_uses_it() -> None:
    policy = eplb("async", layers=2, slots=1, interval=3, microbatches=1)
    ends = [step(policy, number, SKEWED, SKEWED)[1] for number in range(3)]
    assert [len(copied(end)) for end in ends] == [0, 0, 2]
    assert starts(ends[2]) == {"now"}
    assert {action.layer for action in ends[2]} == {0}  # type: ignore[union-attr]
    answers, end = step(policy, 3, SKEWED, SKEWED)
    assert {action.layer for action in end} == {1}  # type: ignore[union-attr]
    assert assigned(answers[0]).shares == ()  # a step later: M more steps must be over
    answers, _ = step(policy, 4, SKEWED, SKEWED)
    assert assigned(answers[0]).shares == ((0, 1, 0, 30), (2, 0, 0, 25))
    assert assigned(answers[1]).shares == ()


def test_it_sees_nothing_but_completed_steps() -> None:
    """The true demand of the target is another one than history's: replicas stay history's."""
    policy = eplb("stop", slots=1, interval=1)
    step(policy, 0, SKEWED)
    answers, end = step(policy, 1, (0, 90, 0, 9))
    assert assigned(answers[0]).shares == ()
    assert copied(end) == [(3, 0, 0), (1, 1, 0)]


def test_a_slot_in_flight_drains_before_it_is_copied_into() -> None:
    """M = 2: the last plan's slots are protected. The new layout's copies wait until one plan has not used them."""
    policy = eplb("stop", slots=1, interval=1, microbatches=2)
    step(policy, 0, SKEWED)
    answers, end = step(policy, 1, SKEWED)
    assert assigned(answers[0]).shares == ((0, 1, 0, 30), (2, 0, 0, 25))
    assert end == []  # the same layout again
    _, end = step(policy, 2, (5, 60, 5, 50))
    assert end == []  # both slots were used by the plan before
    (answer,), end = step(policy, 3, (5, 60, 5, 50))
    assert assigned(answer).shares == ()
    assert copied(answer) == []
    assert copied(end) == [(3, 0, 0), (1, 1, 0)]
    (answer,), _ = step(policy, 4, (5, 60, 5, 50))
    assert assigned(answer).shares == ((1, 1, 0, 30), (3, 0, 0, 25))


def test_a_reset_layer_is_copied_again() -> None:
    policy = eplb("stop", slots=1, interval=1)
    _, first = step(policy, 0, SKEWED)
    policy.reset_layer(0)
    (answer,), again = step(policy, 1, SKEWED)
    assert assigned(answer).shares == ()  # its slots may be those of an entry that is still being judged
    assert copied(again) == copied(first) == [(2, 0, 0), (0, 1, 0)]


def test_without_load_nothing_changes() -> None:
    policy = eplb("stop", slots=1, interval=1)
    assert step(policy, 0, (0, 0, 0, 0))[1] == []


def test_redistribute_keeps_the_replicas_and_splits_by_true_demand() -> None:
    """Experts 0 and 2 have replicas. 40 pairs of 0 and 8 of 2: evenly, expert 0 leaves 20 to each; by demand, 24 and 24 in all."""
    demand = (40, 0, 8, 0)
    plain, better = (eplb("stop", kind=kind, slots=1) for kind in (Eplb, EplbRedistribute))
    shares = {}
    for policy in (plain, better):
        step(policy, 0, SKEWED)
        answers, _ = step(policy, 1, demand)
        shares[policy.name] = assigned(answers[0]).shares
    assert shares["eplb"] == ((0, 1, 0, 20), (2, 0, 0, 4))
    assert shares["eplb-redistribute"] == ((0, 1, 0, 16),)


def test_options_scale_to_a_trace() -> None:
    scaled = EplbOptions().scaled(330, rebalances=10)
    assert (scaled.window_steps, scaled.interval_steps) == (10, 30)
    assert EplbOptions().scaled(3).interval_steps == 1
    with pytest.raises(ConfigError, match=r"policy_options.eplb.window_steps: 0 is below 1"):
        EplbOptions(window_steps=0)
