"""``afore-ahead``: copies before a target's demand, what is kept for it, and plans that owe nothing to the prediction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.core.metrics import tile_loads
from afore.core.policy_options import AforeAheadOptions, AforePlusOptions, PolicyOptions
from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.policies.afore_ahead import AforeAhead
from afore.scheduler.policies.afore_plus import AforePlus
from tests.scheduler.baseline_cases import assigned, context, copied, counts

SHORT = Costs(tile_us=10.0, copy_us=100.0, window_us=20.0)
"""A copy that starts when the demand is known shows for 80 µs."""
LONG = Costs(tile_us=10.0, copy_us=100.0, window_us=1000.0)
HOT = counts(40, 0, 2, 2)
"""Experts 0, 1 | 2, 3: worker 0 has 40 tiles, worker 1 four."""


def policy(costs: Costs, microbatches: int = 1, slots: int = 2, **options: float | bool | None) -> AforeAhead:
    made = PolicyOptions(afore_ahead=AforeAheadOptions(**options))  # type: ignore[arg-type]  # of these types each
    return AforeAhead(context(layers=2, microbatches=microbatches, slots=slots, costs=costs, options=made))


def test_where_the_window_is_short_copies_go_ahead_and_the_target_needs_none() -> None:
    ahead = policy(SHORT)
    ahead.on_demand(Target(0, 0, 0), counts(1, 1, 1, 1), 0.0)
    assert copied(ahead.on_prediction(Target(1, 0, 0), HOT, 100.0)) == [(0, 1, 0)]
    answer = ahead.on_demand(Target(1, 0, 0), HOT, 4000.0)
    assert copied(answer) == []
    assert assigned(answer).shares == ((0, 1, 0, 18),)


def test_where_the_window_is_long_nothing_is_guessed() -> None:
    ahead = policy(LONG)
    assert ahead.on_prediction(Target(1, 0, 0), HOT, 100.0) == []
    assert copied(ahead.on_demand(Target(1, 0, 0), HOT, 4000.0)) == [(0, 1, 0)]
    assert policy(SHORT, window_copies=0).on_prediction(Target(1, 0, 0), HOT, 100.0) == []


def test_the_first_layer_goes_by_the_step_before() -> None:
    """Once it is known how long before its demand a target is predicted: for 80 µs that show, a copy of 3 tiles does not pay."""
    warm = counts(10, 0, 2, 2)
    for first_layer in (True, False):
        ahead = policy(SHORT, first_layer=first_layer)
        assert copied(ahead.on_demand(Target(0, 0, 0), warm, 0.0)) == []
        assert ahead.on_step_end(0, 0, 10.0) == []
        assert copied(ahead.on_demand(Target(0, 0, 1), warm, 500.0)) == []
        assert copied(ahead.on_step_end(0, 1, 510.0)) == ([(0, 1, 0)] if first_layer else [])
        assert ahead.on_step_end(0, 1, 510.0) == [], "a step ends once"


def test_a_wrong_prediction_is_put_right() -> None:
    ahead = policy(LONG, window_copies=1e9)
    assert copied(ahead.on_prediction(Target(1, 0, 0), counts(2, 2, 40, 0), 0.0)) == [(2, 0, 0)]
    answer = ahead.on_demand(Target(1, 0, 0), HOT, 10.0)
    assert copied(answer) == [(0, 1, 0)]
    assert [share[0] for share in assigned(answer).shares] == [0]


def test_a_slot_is_kept_for_the_target_it_was_bound_for() -> None:
    """One slot a worker: microbatch 1's target of the layer comes first, and may not have it."""
    ahead = policy(LONG, microbatches=2, slots=1, window_copies=1e9)
    assert copied(ahead.on_prediction(Target(1, 0, 0), HOT, 0.0)) == [(0, 1, 0)]
    other = ahead.on_demand(Target(1, 1, 0), counts(0, 40, 2, 2), 5.0)
    assert copied(other) == []
    assert assigned(ahead.on_demand(Target(1, 0, 0), HOT, 10.0)).shares == ((0, 1, 0, 18),)


def test_what_was_kept_is_forgotten_with_the_layer() -> None:
    ahead = policy(LONG, window_copies=1e9)
    ahead.on_prediction(Target(1, 0, 0), HOT, 0.0)
    ahead.on_demand(Target(1, 0, 0), HOT, 0.0)
    ahead.on_prediction(Target(1, 0, 1), HOT, 0.0)
    ahead.reset_layer(1)
    protected = ahead.protected(1)
    assert protected is not None
    assert not protected.any()
    assert copied(ahead.on_demand(Target(1, 0, 1), HOT, 0.0)) == [(0, 1, 0)]


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), right=st.booleans(), microbatches=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_every_target_is_planned_on_its_own_demand(seed: int, right: bool, microbatches: int) -> None:
    """Whatever was predicted: no plan is above what its own copies-free flow reaches, and with ports to spare all meet the bound
    that slots allow as ``afore-plus`` from the same table does."""
    rng = np.random.default_rng(seed)
    costs = Costs(tile_us=10.0, copy_us=1.0, window_us=1e6)
    made = context(
        experts=12, workers=4, slots=3, layers=1, microbatches=microbatches, costs=costs,
        options=PolicyOptions(afore_ahead=AforeAheadOptions(window_copies=1e9)),
    )  # fmt: skip
    ahead = AforeAhead(made)
    for step in range(8):
        for m in range(microbatches):
            target = Target(0, m, step)
            demand_E = (rng.integers(0, 40, 12) * (rng.random(12) < 0.6)).astype(np.int32)
            predicted_E = demand_E if right else rng.permutation(demand_E)
            ahead.on_prediction(target, predicted_E, float(step))
            answer = ahead.on_demand(target, demand_E.copy(), step + 0.5)
            plan = assigned(answer).plan
            assert plan is not None
            assert np.array_equal(plan.assign_EN.sum(axis=1), demand_E)
            assert tile_loads(plan.assign_EN, 1).max() == plan.max_tiles <= plan.within_max_tiles <= plan.base_max_tiles
            if right and microbatches == 1:
                assert copied(answer) == [] or plan.gain_us > 0


@pytest.mark.parametrize(
    ("protected", "microbatches", "depth"), [(None, 3, 2), (1, 3, 1), (1, 1, 0), (5, 2, 1), (0, 3, 0)]
)
def test_how_many_plans_keep_their_slots(protected: int | None, microbatches: int, depth: int) -> None:
    options = PolicyOptions(afore_plus=AforePlusOptions(protected_plans=protected))
    assert AforePlus(context(microbatches=microbatches, options=options)).protected_plans == depth


def test_a_slot_of_an_older_plan_is_free_again() -> None:
    """M = 3, one slot a worker: with one protected plan, the third target may have the slot of the first."""
    for protected, expected in ((None, []), (1, [(1, 1, 0)])):
        options = PolicyOptions(afore_plus=AforePlusOptions(protected_plans=protected))
        plus = AforePlus(context(microbatches=3, slots=1, costs=LONG, options=options))
        assert copied(plus.on_demand(Target(0, 0, 0), HOT, 0.0)) == [(0, 1, 0)]
        assert copied(plus.on_demand(Target(0, 1, 0), counts(1, 1, 1, 1), 0.0)) == []
        assert copied(plus.on_demand(Target(0, 2, 0), counts(0, 40, 2, 2), 0.0)) == expected


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="protected_plans"):
        AforePlusOptions(protected_plans=-1)
    with pytest.raises(ConfigError, match="window_copies"):
        AforeAheadOptions(window_copies=-1.0)
