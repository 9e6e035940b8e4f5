"""Demand of the evaluation: as skewed as it says, exactly shared out among attention workers, the same from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.core.slots import contiguous_primaries
from afore.core.target import Target
from afore.scheduler.traces import TraceHeader, TraceReader, TraceTarget, TraceWriter
from afore.tools.evaluate.demand import STATIC_IMBALANCE, DemandKey, StoredDemand, demand_of
from afore.tools.evaluate.workloads import (
    ARRIVALS,
    WORKLOADS,
    Arrivals,
    Workload,
    arrival_times_us,
    drawn,
    output_lengths,
    prompt_lengths,
)

KEY = DemandKey(workload="chat", layers=3, experts=16, top_k=2, microbatches=2, tokens=24, steps=4)
PAPER = DemandKey(workload="chat", layers=24, experts=128, top_k=8, microbatches=2, tokens=1300, steps=4)


def skew(demand: StoredDemand, key: DemandKey, workers: int = 8) -> float:
    """Most loaded worker over the mean, over the layers of a few steps."""
    owner_EN = np.eye(workers)[np.asarray(contiguous_primaries(key.experts, workers))]
    loads = [demand.counts(0, m, s, key.tokens) @ owner_EN for m in range(key.microbatches) for s in range(key.steps)]
    return float(np.mean([(load.max(axis=1) / load.mean(axis=1)).mean() for load in loads]))


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 60),
    attention=st.integers(0, 7),
    microbatch=st.integers(0, 3),
    step=st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_each_layer_routes_every_token_to_different_experts(
    tokens: int, attention: int, microbatch: int, step: int, seed: int
) -> None:
    table_XLE = np.random.default_rng(seed).multivariate_hypergeometric([40] * 9, 80, size=(5, 3)).astype(np.int32)
    demand = StoredDemand(table_XLE, microbatches=2, top_k=2, source="the test")
    counts_LE = demand.counts(attention, microbatch, step, tokens)
    assert counts_LE.shape == (3, 9)
    assert counts_LE.sum(axis=1).tolist() == [tokens * 2] * 3
    assert counts_LE.min() >= 0
    assert counts_LE.max() <= tokens
    assert np.array_equal(counts_LE, demand.counts(attention, microbatch, step, tokens))


@given(workers=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 100))
def test_workers_with_even_parts_take_every_pair_once(workers: int, seed: int) -> None:
    table_XLE = np.random.default_rng(seed).multivariate_hypergeometric([40] * 9, 80, size=(2, 3)).astype(np.int32)
    demand = StoredDemand(table_XLE, microbatches=1, top_k=2, source="the test")
    parts = [demand.counts(attention, 0, 1, 40 // workers) for attention in range(workers)]
    assert np.array_equal(np.sum(parts, axis=0), table_XLE[1])


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_the_static_imbalance_is_the_papers(workload: Workload) -> None:
    key = replace(PAPER, workload=workload.name)
    # One seed is one model, whose experts may happen to lie well.
    found = [skew(demand_of(one), one) for seed in range(2) for one in (replace(key, seed=seed),)]
    assert np.mean(found) == pytest.approx(STATIC_IMBALANCE, abs=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("imbalance", [1.0, 1.3, 2.2])
def test_other_imbalances_are_what_was_asked_for(imbalance: float) -> None:
    key = replace(PAPER, imbalance=imbalance)
    assert skew(demand_of(key), key) == pytest.approx(imbalance, rel=0.08)


def test_a_stored_table_is_the_same_and_its_file_says_what_it_is_of(tmp_path: Path) -> None:
    made, stored = demand_of(KEY), demand_of(KEY, tmp_path)
    again = demand_of(KEY, tmp_path)
    assert made.digest == stored.digest == again.digest
    assert made.source == again.source
    [path] = tmp_path.iterdir()
    assert path.name == KEY.file_name()
    header = TraceReader(path).header
    assert (header.experts, header.layers, header.microbatches) == (16, 3, 2)
    others = (replace(KEY, seed=1), replace(KEY, steps=5), replace(KEY, imbalance=2.0), KEY)
    assert len({other.file_name() for other in others}) == 4


def test_seeds_and_workloads_differ() -> None:
    digests = {demand_of(one).digest for one in (KEY, replace(KEY, seed=1), replace(KEY, workload="math"))}
    assert len(digests) == 3


def recording(path: Path, *, experts: int = 16, whole: bool = True) -> str:
    """Three steps of two layers; without ``whole`` the second layer of each is missing."""
    with TraceWriter(path, TraceHeader(experts=experts, layers=2, top_k=2)) as out:
        for step in range(3):
            for layer in range(2 if whole else 1):
                demand_E = np.zeros(experts, np.int32)
                demand_E[[step, 8 + layer]] = 5
                out.add(TraceTarget(target=Target(layer, 0, step), demand_E=demand_E, tokens=5))
    return str(path)


def test_a_recording_is_met_step_by_step(tmp_path: Path) -> None:
    key = replace(KEY, microbatches=1, routing=recording(tmp_path / "run.trace.npz"))
    demand = demand_of(key)
    for step in range(3):
        counts_LE = demand.counts(0, 0, step, 5)
        # The third layer, which was not recorded, meets the first one's demand.
        assert [np.flatnonzero(counts_E).tolist() for counts_E in counts_LE] == [[step, 8], [step, 9], [step, 8]]
    assert "3 recorded steps" in demand.source
    before = key.file_name()
    recording(tmp_path / "run.trace.npz", whole=True, experts=17)
    assert key.file_name() != before, "named by what is in the file"


@pytest.mark.parametrize(
    ("made", "names"), [({"experts": 17}, "17 experts"), ({"whole": False}, "every layer"), (None, "cannot be read")]
)
def test_recordings_that_do_not_fit_are_refused(made: dict[str, int] | None, names: str, tmp_path: Path) -> None:
    path = tmp_path / "run.trace.npz"
    if made is not None:
        recording(path, **made)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=names):
        demand_of(replace(KEY, routing=str(path)), tmp_path)


def test_published_counts_take_the_corpus_place_by_domain(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"{name}_cnt": rng.integers(1, 300, (4, 3, 16)).astype(np.int32) for name in ("chat", "code_instruct")}
    tokens = {f"{name}_tokens": np.full(4, 1200, np.int64) for name in ("chat", "code_instruct")}
    np.savez(tmp_path / "counts.npz", **arrays, **tokens)  # type: ignore[arg-type]  # numpy's stub lacks it
    routing = str(tmp_path / "counts.npz")
    found = {}
    for workload in ("chat", "code"):
        key = replace(KEY, workload=workload, routing=routing, top_k=2)
        found[workload] = demand_of(key).source
    assert "code_instruct" in found["code"]
    assert "code_instruct" not in found["chat"]


def test_prompts_have_the_workloads_median() -> None:
    for workload in WORKLOADS.values():
        lengths = prompt_lengths(workload, 2001, seed=3)
        assert lengths == prompt_lengths(workload, 2001, seed=3)
        assert all(1 <= length <= 4096 for length in lengths)
        assert np.median(lengths) == pytest.approx(workload.prompt_characters[10] / 4, rel=0.1)


@pytest.mark.parametrize("arrivals", ARRIVALS.values(), ids=ARRIVALS)
def test_requests_come_at_their_rate_and_ask_for_their_mean(arrivals: Arrivals) -> None:
    times_us = arrival_times_us(arrivals, 500, per_s=20.0, seed=1)
    assert times_us == sorted(times_us)
    assert times_us[-1] == pytest.approx(500 / 20 * 1e6)
    wanted = output_lengths(arrivals, 500, mean=50, seed=1)
    assert min(wanted) >= 2
    assert np.mean(wanted) == pytest.approx(50, rel=0.1)


@given(place=st.floats(0, 1))
def test_what_is_drawn_lies_between_quantiles(place: float) -> None:
    values = (0.0, 1.0, 5.0)
    assert 0 <= drawn(values, place) <= 5
    assert drawn(values, 0.5) == 1.0
