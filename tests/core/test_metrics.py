"""The figures: against literal references, with the invariants that make them worth printing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.metrics import (
    FORMULAS,
    Imbalance,
    ImbalanceStats,
    MigrationStats,
    imbalance,
    percentile,
    percentiles,
    primary_assignment,
    shared_assignment,
    shared_loads,
    tile_loads,
    token_loads,
)
from afore.core.plan import Share


@st.composite
def executed(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(demand_E, assign_EN, primaries_E, tile_tokens): any assignment that adds up to its demand."""
    num_experts, num_workers = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    assign = draw(
        st.lists(
            st.lists(st.integers(0, 40), min_size=num_workers, max_size=num_workers),
            min_size=num_experts,
            max_size=num_experts,
        )
    )
    primaries = draw(st.lists(st.integers(0, num_workers - 1), min_size=num_experts, max_size=num_experts))
    assign_EN = np.array(assign, np.int32)
    return assign_EN.sum(axis=1), assign_EN, np.array(primaries, np.int32), draw(st.integers(1, 16))


def literal_imbalance(
    demand: Sequence[int], assign: Any, primaries: Sequence[int], tile_tokens: int, costs: Sequence[int]
) -> list[Fraction]:
    """The definitions, word by word, in exact fractions."""
    workers = range(len(assign[0]))
    experts = range(len(demand))

    def over_mean(loads: list[int], total: int) -> Fraction:
        even = Fraction(total) / sum(Fraction(1, cost) for cost in costs)
        return max(Fraction(load) * cost for load, cost in zip(loads, costs, strict=True)) / even

    def tiles(pairs: int) -> int:
        return ceil(Fraction(pairs, tile_tokens))

    before = [[demand[e] if primaries[e] == w else 0 for w in workers] for e in experts]
    all_tiles = sum(tiles(demand[e]) for e in experts)
    bound = next(Fraction(load) for load in itertools.count() if sum(load // cost for cost in costs) >= all_tiles)
    return [
        over_mean([sum(before[e][w] for e in experts) for w in workers], sum(demand)),
        over_mean([sum(assign[e][w] for e in experts) for w in workers], sum(demand)),
        over_mean([sum(tiles(before[e][w]) for e in experts) for w in workers], all_tiles),
        over_mean([sum(tiles(assign[e][w]) for e in experts) for w in workers], all_tiles),
        bound / (Fraction(all_tiles) / sum(Fraction(1, cost) for cost in costs)),
    ]


def values(one: Imbalance) -> list[float]:
    return [one.token_before, one.token_after, one.tile_before, one.tile_after, one.tile_bound]


@settings(deadline=None)
@given(executed(), st.none() | st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_imbalance_equals_its_definition(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int], costs: list[int] | None
) -> None:
    demand_E, assign_EN, primaries_E, tile_tokens = case
    costs_N = None if costs is None else costs[: assign_EN.shape[1]]
    one = imbalance(demand_E, assign_EN, primaries_E, tile_tokens, costs_N)
    if demand_E.sum() == 0:
        assert one is None
        return
    assert one is not None
    each = costs_N or [1] * assign_EN.shape[1]
    expected = literal_imbalance(demand_E.tolist(), assign_EN.tolist(), primaries_E.tolist(), tile_tokens, each)
    assert values(one) == pytest.approx([float(value) for value in expected], rel=1e-12)


@settings(deadline=None)
@given(executed())
def test_nothing_is_below_its_bound(case: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    one = imbalance(*case)
    if one is not None:
        assert one.tile_after >= one.tile_bound * (1 - 1e-12)
        assert one.tile_before >= one.tile_bound * (1 - 1e-12)
        assert min(values(one)) >= 1 - 1e-12


def test_wasteful_splitting_does_not_look_even() -> None:
    demand_E = np.array([8, 8])
    split_EN = np.array([[4, 4], [4, 4]])
    one = imbalance(demand_E, split_EN, np.array([0, 1]), 8)
    assert one is not None
    assert (one.tile_before, one.tile_after, one.tile_bound) == (1.0, 2.0, 1.0)
    assert (one.token_before, one.token_after) == (1.0, 1.0)


def test_an_assignment_that_loses_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="does not add up"):
        imbalance(np.array([3, 1]), np.array([[2, 0], [0, 1]]), np.array([0, 1]), 8)


def test_loads() -> None:
    assign_EN = np.array([[9, 0], [1, 8]], np.int32)
    assert token_loads(assign_EN).tolist() == [10, 8]
    assert tile_loads(assign_EN, 8).tolist() == [3, 1]
    assert primary_assignment(np.array([5, 7]), np.array([1, 0]), 2).tolist() == [[0, 5], [7, 0]]


def share(expert: int, worker: int, count: int) -> Share:
    return Share(expert=expert, worker=worker, slot=0, count=count, generation=1)


def test_shares_are_clipped_in_rank_order_and_the_primary_takes_the_rest() -> None:
    demand_E, primaries_E = np.array([10, 4, 0]), np.array([0, 1, 2])
    shares = [share(0, 2, 3), share(0, 1, 4), share(1, 2, 3), share(1, 0, 3), share(2, 0, 5)]
    assert shared_assignment(demand_E, shares, primaries_E, 3).tolist() == [[3, 4, 3], [3, 0, 1], [0, 0, 0]]


@settings(deadline=None)
@given(
    demand=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    shares=st.lists(st.builds(share, st.integers(0, 3), st.integers(0, 2), st.integers(0, 20)), max_size=8),
)
def test_any_shares_execute_every_pair_once(demand: list[int], shares: list[Share]) -> None:
    assign_EN = shared_assignment(np.array(demand), shares, np.array([0, 1, 2, 0]), 3)
    assert assign_EN.sum(axis=1).tolist() == demand
    assert assign_EN.min() >= 0


@settings(deadline=None)
@given(
    demand=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    shares=st.lists(st.builds(share, st.integers(0, 3), st.integers(0, 2), st.integers(0, 20)), max_size=8),
    tile_tokens=st.integers(1, 9),
)
def test_loads_of_shares_are_those_of_their_assignment(
    demand: list[int], shares: list[Share], tile_tokens: int
) -> None:
    demand_E, primaries_E = np.array(demand, np.int32), np.array([0, 1, 2, 0], np.int32)
    loads = shared_loads(demand_E, shares, primaries_E, 3, tile_tokens)
    before_EN = primary_assignment(demand_E, primaries_E, 3)
    after_EN = shared_assignment(demand_E, shares, primaries_E, 3)
    assert (loads.max_pairs_before, loads.max_pairs_after) == (
        token_loads(before_EN).max(),
        token_loads(after_EN).max(),
    )
    assert (loads.max_tiles_before, loads.max_tiles_after) == (
        tile_loads(before_EN, tile_tokens).max(),
        tile_loads(after_EN, tile_tokens).max(),
    )
    assert loads.imbalance(3) == imbalance(demand_E, after_EN, primaries_E, tile_tokens)


def plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(plain(inner) for inner in value.values())
    if isinstance(value, list):
        return all(plain(inner) for inner in value)
    return type(value) in (int, float, str, bool, type(None))


def test_imbalance_is_meaned_in_all_and_by_layer() -> None:
    primaries_E = np.array([0, 1], np.int32)
    stats = ImbalanceStats([primaries_E, primaries_E], 2, 8)
    assert stats.to_json() == {
        "token": {"before": None, "after": None},
        "tile": {"before": None, "after": None, "bound": None},
    }
    assert stats.add(0, np.zeros(2, np.int32), np.zeros((2, 2), np.int32)) is None
    stats.add(0, np.array([16, 0], np.int32), np.array([[8, 8], [0, 0]], np.int32))
    stats.add_loads(1, shared_loads(np.array([8, 8], np.int32), [], primaries_E, 2, 8))
    assert stats.targets == 2
    assert stats.to_json() == {
        "token": {"before": 1.5, "after": 1.0},
        "tile": {"before": 1.5, "after": 1.0, "bound": 1.0},
    }
    first, second = stats.layers_to_json()
    assert (first["layer"], first["targets"], first["tile"]["before"]) == (0, 1, 2.0)
    assert (second["layer"], second["targets"], second["tile"]["before"]) == (1, 1, 1.0)
    assert plain(stats.to_json())
    assert plain(stats.layers_to_json())


def test_without_copies_times_are_unknown_and_not_zero() -> None:
    stats = MigrationStats()
    stats.add(1, 0, 100.0, 100.0)
    assert stats.to_json() == {
        "targets": 0,
        "copies": 0,
        "raw_ms_mean": None,
        "window_ms_mean": None,
        "exposed_ms_mean": None,
        "exposed_targets": None,
        "slack_ms_min": None,
    }


def test_a_target_is_as_bad_as_its_worst_worker() -> None:
    stats = MigrationStats()
    stats.add(1, 2, np.float64(500), np.float64(2_000))
    stats.add(2, 1, 400, 3_000)
    stats.add(1, np.int32(1), 1_000, 750)  # type: ignore[arg-type]  # what arrives may be numpy's
    assert stats.to_json() == {
        "targets": 2,
        "copies": 4,
        "raw_ms_mean": 0.7,
        "window_ms_mean": 1.875,
        "exposed_ms_mean": 0.125,
        "exposed_targets": 1,
        "slack_ms_min": -0.25,
    }
    assert plain(stats.to_json())
    assert json.loads(json.dumps(stats.to_json())) == stats.to_json()


reports = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 3), st.integers(0, 4_000), st.integers(0, 4_000)),
    max_size=30,
)


@settings(deadline=None)
@given(reports, st.randoms())
def test_migration_equals_its_definition_in_any_order(rows: list[tuple[int, int, int, int, int]], random: Any) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    stats = MigrationStats()
    for sequence, epoch, copies, copy_us, window_us in shuffled:
        stats.add(sequence, copies, copy_us, window_us, epoch=epoch)
    targets: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for sequence, epoch, copies, copy_us, window_us in rows:
        if copies:
            targets.setdefault((epoch, sequence), []).append((copy_us, window_us))
    got = stats.to_json()
    assert got == stats.to_json()
    assert got["targets"] == len(targets)
    assert got["copies"] == sum(row[2] for row in rows)
    if targets:
        exposed = [max(max(0, d - w) for d, w in workers) for workers in targets.values()]
        raw = [max(d for d, _ in workers) for workers in targets.values()]
        assert got["raw_ms_mean"] == pytest.approx(sum(raw) / len(raw) / 1e3)
        assert got["exposed_ms_mean"] == pytest.approx(sum(exposed) / len(exposed) / 1e3)
        assert got["exposed_targets"] == sum(value > 0 for value in exposed)
        assert got["slack_ms_min"] == min(w - d for workers in targets.values() for d, w in workers) / 1e3


def test_a_long_run_stays_small() -> None:
    stats = MigrationStats()
    for sequence in range(5_000):
        stats.add(sequence, 1, 100, 50)
    assert len(stats._open) <= 1024
    assert stats.to_json()["targets"] == stats.to_json()["exposed_targets"] == 5_000


def test_percentiles() -> None:
    assert percentile([], 50) is None
    assert percentiles([]) == {"p50": None, "p95": None}
    assert percentiles(np.arange(101, dtype=np.int64), (0, 50, 95, 99, 100)) == {
        "p0": 0.0,
        "p50": 50.0,
        "p95": 95.0,
        "p99": 99.0,
        "p100": 100.0,
    }
    assert percentile([1, 2], 50) == 1.5
    assert plain(percentiles(np.array([1.5], np.float32)))


def test_every_figure_has_its_formula() -> None:
    for figure in ("token imbalance", "tile imbalance", "bound", "raw D", "window W", "exposed O", "slack"):
        assert FORMULAS[figure]
