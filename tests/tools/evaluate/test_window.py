"""What is counted from is what is counted: of statistics, and of copies."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.clock import WallClock
from afore.core.metrics import ImbalanceStats, Loads
from afore.core.target import Target
from afore.tools.evaluate.copies import CopySamples
from afore.tools.evaluate.window import between, tokens_per_s

LAYERS, WORKERS = 2, 4


def loads(pairs: int, most: int, tiles: int) -> Loads:
    return Loads(
        pairs=pairs,
        tiles=tiles,
        max_pairs_before=most,
        max_pairs_after=max(1, most - 1),
        max_tiles_before=tiles,
        max_tiles_after=max(1, tiles - 1),
        bound_tiles=-(-tiles // WORKERS),
    )


def stats_of(targets: list[tuple[int, Loads]]) -> dict[str, Any]:
    stats = ImbalanceStats([np.arange(WORKERS)] * LAYERS, WORKERS, 8)
    for layer, one in targets:
        stats.add_loads(layer, one)
    return {
        "imbalance": stats.to_json(),
        "layers": stats.layers_to_json(),
        "counters": {"targets": len(targets), "copies_ahead": 2 * len(targets)},
    }


TARGETS = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.builds(loads, pairs=st.integers(1, 500), most=st.integers(1, 500), tiles=st.integers(1, 90)),
    ),
    max_size=12,
)


def flat(value: Any) -> list[Any]:
    """All numbers of it, in one order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in flat(value[key])]
    return [number for one in value for number in flat(one)] if isinstance(value, list) else [value]


@given(TARGETS, TARGETS)
def test_what_came_between_is_what_statistics_of_it_alone_say(first: list[Any], then: list[Any]) -> None:
    found, alone = between(stats_of(first), stats_of(first + then)), stats_of(then)
    assert found["targets"] == len(then)
    assert found["counters"] == alone["counters"]
    for ours, theirs in (("imbalance", "imbalance"), ("layers_imbalance", "layers")):
        assert flat(found[ours]) == [
            None if number is None else pytest.approx(number, abs=1e-6) for number in flat(alone[theirs])
        ]


def test_without_a_look_before_it_is_the_whole_run() -> None:
    whole = stats_of([(0, loads(10, 5, 4)), (1, loads(20, 9, 6))])
    assert flat(between(None, whole)["imbalance"]) == pytest.approx(flat(whole["imbalance"]))


def come(samples: CopySamples, sequence: int, *, worker: int = 0, layer: int = 0, late_ns: int = 0) -> None:
    """A worker's copy for a target, and the target's wait for it."""
    copied = {"layer": layer, "slot": 1, "generation": sequence, "submitted_ns": 0}
    samples.copied(worker, copied, 100, 1000 + late_ns)
    waited = {"sequence": sequence, "slots": [1], "generations": [sequence]}
    samples.waited(worker, Target(layer, 0, 0), 1000, waited)


def test_copies_count_from_the_start_to_the_stop() -> None:
    samples = CopySamples(2)
    come(samples, 1, late_ns=500)
    samples.start(900)
    come(samples, 1, worker=1, late_ns=500)  # a target that was under way is left out whole
    come(samples, 2)
    come(samples, 3, layer=1, late_ns=400)
    come(samples, 4, late_ns=200)
    samples.stop(1500)
    come(samples, 5, late_ns=900)
    found = samples.summary()
    assert (found["targets"], found["copies"]) == (3, 3)
    assert (found["exposed_targets"], found["exposed_in_first_layer"]) == (2, 1)
    assert found["exposed_us"]["mean"] == pytest.approx(0.2)
    assert found["left_us"]["points"][0] == -0.4


def test_copies_that_were_sent_ahead_are_told_from_targets_own_by_when_they_landed() -> None:
    samples = CopySamples(2)
    ahead = {"layer": 3, "slot": 0, "generation": 7, "submitted_ns": 0}
    samples.start(1000)
    samples.copied(0, ahead, 400, 900)  # seen late: it landed before
    samples.copied(1, ahead, 900, 1200)
    come(samples, 8)
    waited = {"sequence": 9, "slots": [0], "generations": [7]}
    samples.waited(1, Target(3, 0, 0), 1100, waited)
    samples.stop(1500)
    samples.copied(0, {**ahead, "slot": 1}, 1200, 1400)  # seen late: it landed while it counted
    samples.copied(0, {**ahead, "slot": 2}, 1400, 1600)
    found = samples.summary()
    assert (found["copies"], found["ahead"]) == (1, 2)
    assert (found["targets"], found["exposed_targets"], found["exposed_to_earlier"]) == (1, 0, 1)


def test_a_tracer_hears_of_ffn_workers_alone() -> None:
    samples = CopySamples(2)
    assert samples.tracer("ffn-1", WallClock()).enabled
    assert not samples.tracer("attention-0", WallClock()).enabled


@given(
    starts=st.lists(st.integers(0, 10_000), min_size=1, max_size=12),
    step_ns=st.integers(1_000, 50_000),
    steps=st.integers(3, 9),
)
def test_throughput_is_the_same_wherever_steps_begin(starts: list[int], step_ns: int, steps: int) -> None:
    times_ns = [[start + step_ns * number for number in range(steps + 2)] for start in starts]
    assert tokens_per_s(times_ns, 1, steps) == pytest.approx(len(starts) / step_ns * 1e9)


@given(gaps=st.lists(st.integers(500, 2_000), min_size=8, max_size=8), seats=st.integers(1, 5))
def test_throughput_of_one_batch_is_what_came_over_how_long_it_took(gaps: list[int], seats: int) -> None:
    times_ns = [list(accumulate(gaps))] * seats
    taken_ns = times_ns[0][6] - times_ns[0][2]
    assert tokens_per_s(times_ns, 2, 6) == pytest.approx(4 * seats / taken_ns * 1e9)
