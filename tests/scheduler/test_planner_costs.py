"""Costs, exposure, and the model that follows what workers measure."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.scheduler.costs import CostModel, Costs, exposed_us, migration_us

SEED = Costs(tile_us=10.0, copy_us=100.0, window_us=1000.0)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("field", ["tile_us", "copy_us", "window_us"])
def test_a_cost_that_is_no_time_is_refused(field: str, value: float) -> None:
    values = {"tile_us": 1.0, "copy_us": 1.0, "window_us": 1.0, field: value}
    with pytest.raises(ConfigError) as caught:
        Costs(**values)
    assert caught.value.field == f"costs.{field}"


def test_migration_counts_the_busiest_port() -> None:
    """Experts 0 and 1 leave worker 0, experts 2 and 3 leave workers 1 and 2: three copies enter worker 3."""
    primaries = [0, 0, 1, 2]
    costs = Costs(tile_us=1, copy_us=10, window_us=25)
    assert migration_us([], primaries, costs) == 0
    assert migration_us([(0, 1, 0), (1, 2, 0)], primaries, costs) == 20  # one source
    assert migration_us([(0, 3, 0), (2, 3, 1), (3, 3, 2)], primaries, costs) == 30  # one destination
    assert migration_us([(0, 1, 0), (2, 0, 0)], primaries, costs) == 10  # in and out of a worker do not share a port
    assert exposed_us([(0, 3, 0), (2, 3, 1), (3, 3, 2)], primaries, costs) == 5
    assert exposed_us([(0, 1, 0)], primaries, costs) == 0


@pytest.mark.slow
@given(
    values=st.lists(st.floats(0, 1e6), max_size=40),
    recent=st.integers(1, 9),
    warmup=st.integers(1, 9),
)
def test_the_model_is_the_median_of_recent_values(values: list[float], recent: int, warmup: int) -> None:
    warmup = min(warmup, recent)
    model = CostModel(SEED, num_layers=2, recent=recent, warmup=warmup)
    for count, value in enumerate(values, start=1):
        model.update(1, copy_us=value)
        last = sorted(values[max(0, count - recent) : count])
        expected = last[len(last) // 2] if len(last) >= warmup else SEED.copy_us
        assert model.layer(1) == Costs(tile_us=SEED.tile_us, copy_us=expected, window_us=SEED.window_us)
    assert model.layer(0) == SEED


@given(values=st.lists(st.floats(0, 1e6), min_size=5, max_size=60))
def test_few_of_a_layer_s_last_windows_are_shorter_than_what_is_believed(values: list[float]) -> None:
    """So that copies planned for it stay hidden; a single record that is off by a time slice is not believed."""
    model = CostModel(SEED, num_layers=1)
    for value in values:
        model.update(0, window_us=value)
    last = sorted(values[-31:])
    window_us = model.layer(0).window_us
    assert sum(value < window_us for value in last) <= len(last) / 8
    assert window_us <= last[len(last) // 2]
    if len(last) >= 8:
        assert window_us >= last[1], "one short record of many decides nothing"


def test_a_frozen_model_keeps_its_seeds() -> None:
    model = CostModel(SEED, num_layers=1, frozen=True, warmup=1)
    model.update(0, tile_us=1.0, copy_us=1.0, window_us=1.0)
    assert model.layer(0) is SEED


def test_what_is_no_time_is_ignored_and_counted() -> None:
    model = CostModel(SEED, num_layers=1, warmup=1)
    model.update(0, tile_us=math.nan, copy_us=-1.0, window_us=math.inf)
    assert model.layer(0) == SEED
    assert model.ignored == 3


def test_seeds_for_each_layer() -> None:
    other = Costs(tile_us=1.0, copy_us=2.0, window_us=3.0)
    model = CostModel([SEED, other], num_layers=2)
    assert (model.layer(0), model.layer(1)) == (SEED, other)
    with pytest.raises(ConfigError, match="2 seeds for 3 layers"):
        CostModel([SEED, other], num_layers=3)
    with pytest.raises(ConfigError, match="warmup"):
        CostModel(SEED, num_layers=1, recent=3, warmup=4)
