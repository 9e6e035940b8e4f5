"""Relative speeds as whole tile costs, and the least load that no assignment of whole tiles can be below."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.config import PlannerOptions, RunConfig
from afore.core.errors import ConfigError
from afore.core.speeds import FINENESS, GREATEST_RATIO, check_speeds, even_workers, least_load, tile_costs
from afore.core.topology import Topology

SPEEDS = st.lists(st.floats(0.5, 20.0), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("speeds", "costs"),
    [
        ([1.0, 1.0, 1.0], (1, 1, 1)),
        ([0.3, 0.3], (1, 1)),
        ([7.0], (1,)),
        ([1.0, 0.5, 1.0], (1, 2, 1)),
        ([3.0, 2.0], (2, 3)),
        ([1.0, 0.8, 0.75], (12, 15, 16)),
        ([1.0, 0.9], (60, 67)),
        ([64.0, 1.0], (1, 64)),
    ],
)
def test_costs_are_the_coarsest_that_tell_speeds_apart(speeds: list[float], costs: tuple[int, ...]) -> None:
    assert tile_costs(speeds) == costs


@given(SPEEDS)
def test_costs_are_in_proportion_to_the_time_of_a_tile(speeds: list[float]) -> None:
    costs = tile_costs(speeds)
    unit = min(costs)
    assert unit == costs[speeds.index(max(speeds))]
    for speed, cost in zip(speeds, costs, strict=True):
        assert cost / unit == pytest.approx(max(speeds) / speed, abs=0.5 / FINENESS + 1e-9)
    assert math.gcd(*costs) == 1
    assert max(costs) <= GREATEST_RATIO * FINENESS


@pytest.mark.parametrize(
    ("speeds", "workers", "problem"),
    [
        ([1.0, 1.0], 3, "2 numbers for 3 workers"),
        ([], None, "0 numbers"),
        ([1.0, 0.0], None, "0.0 for worker 1 is no speed"),
        ([-1.0], None, "-1.0 for worker 0 is no speed"),
        ([1.0, math.nan], None, "nan for worker 1 is no speed"),
        ([math.inf, 1.0], None, "inf for worker 0 is no speed"),
        ([True], None, "True for worker 0 is no number"),
        (["fast"], None, "'fast' for worker 0 is no number"),
        ([None], None, "None for worker 0 is no number"),
        ([1.0, 65.0], None, "worker 1 is 65 times as fast as worker 0"),
    ],
)
def test_what_is_no_speed_is_refused_by_field_worker_and_value(
    speeds: list[float], workers: int | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check_speeds("planner.worker_speed", speeds, workers)
    assert caught.value.field == "planner.worker_speed"


def test_speeds_come_in_any_numeric_type() -> None:
    assert check_speeds("x", np.array([1, 2], np.int32), 2) == (1.0, 2.0)
    assert check_speeds("x", [float(np.float32(0.5)), 1], None) == (0.5, 1.0)


def test_the_run_knows_how_many_workers_there_are() -> None:
    planner = PlannerOptions(worker_speed=(1.0, 0.5))
    assert RunConfig(topology=Topology(ffn=2), planner=planner).planner.worker_speed == (1.0, 0.5)
    assert RunConfig(planner=PlannerOptions(worker_speed=())).planner.worker_speed == ()
    with pytest.raises(ConfigError, match=r"planner\.worker_speed: 2 numbers for 4 workers"):
        RunConfig(topology=Topology(ffn=4), planner=planner)
    for share in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match=r"planner\.compactness_share"):
            PlannerOptions(compactness_share=share)


@given(tiles=st.integers(0, 12), costs=st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_the_least_load_is_what_trying_everything_finds(tiles: int, costs: list[int]) -> None:
    splits = itertools.product(range(tiles + 1), repeat=len(costs))
    loads = [max(n * c for n, c in zip(split, costs, strict=True)) for split in splits if sum(split) == tiles]
    assert least_load(tiles, costs) == min(loads)


@given(tiles=st.integers(0, 2**31), speeds=SPEEDS)
def test_the_least_load_holds_all_tiles_and_one_less_does_not(tiles: int, speeds: list[float]) -> None:
    costs = tile_costs(speeds)
    load = least_load(tiles, costs)
    assert sum(load // cost for cost in costs) >= tiles
    assert load == 0 or sum((load - 1) // cost for cost in costs) < tiles
    assert load >= Fraction(tiles) / sum(Fraction(1, cost) for cost in costs)


@given(tiles=st.integers(0, 10**6), workers=st.integers(1, 300))
def test_with_equal_speeds_it_is_the_even_share(tiles: int, workers: int) -> None:
    assert least_load(tiles, (1,) * workers) == -(-tiles // workers)
    assert even_workers((1,) * workers) == workers
