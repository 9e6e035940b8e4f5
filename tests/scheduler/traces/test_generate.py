"""Workloads out of real routing: the model that is stated, by seed, as skewed as wanted; and the real files where they lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afore.core.errors import ConfigError
from afore.scheduler.traces import Shape, TraceError, TraceTarget, TraceWriter, Workload, read_corpus, workload_of
from afore.scheduler.traces.calibrate import HOT_PART, SKEW, hot_part, normal, skew
from afore.scheduler.traces.corpus import CountCorpus, TokenCorpus, is_corpus
from afore.scheduler.traces.count_workload import CountWorkload, concentration
from afore.scheduler.traces.shape import Motion

REAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "routing"


def taken(workload: Workload, count: int) -> list[TraceTarget]:
    return list(itertools.islice(workload.targets(), count))


def demands(rows: Sequence[TraceTarget]) -> np.ndarray:
    return np.array([row.demand_E for row in rows])


def tokens_file(path: Path, tokens: int = 60, layers: int = 5, experts: int = 16, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids_GLK = np.argsort(rng.random((tokens, layers, experts)) * np.arange(20, experts + 20), axis=2)[:, :, :3]
    np.savez(path, ids=ids_GLK.astype(np.uint8), sample_lens=np.array([10, 20, tokens - 30], np.int32))
    return ids_GLK


def test_requests_walk_through_documents(tmp_path: Path) -> None:
    ids_GLK = tokens_file(tmp_path / "a.npz")
    corpus = read_corpus([tmp_path / "a.npz"])
    assert isinstance(corpus, TokenCorpus)
    workload = workload_of(corpus, Shape(microbatches=2, tokens=3, layers=3, seed=4))
    assert (workload.header.experts, workload.header.layers, workload.header.top_k) == (16, 3, 3)
    rows = taken(workload, 2 * 3 * 50)
    assert [(row.target.layer, row.target.microbatch, row.target.step) for row in rows[:8]] == [
        (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (0, 0, 1), (0, 1, 1),
    ]  # fmt: skip
    number = {ids.tobytes(): place for place, ids in enumerate(np.ascontiguousarray(ids_GLK[:, 1:4].astype(np.int32)))}
    ends = {9, 29, 59}
    places = []
    for step in range(50):
        of_step = [row for row in rows if row.target.step == step and row.target.microbatch == 0]
        ids_LTK = [row.ids_TK for row in of_step if row.ids_TK is not None]
        for ids_TK, row in zip(ids_LTK, of_step, strict=True):
            assert row.demand_E is not None
            assert np.bincount(ids_TK.reshape(-1), minlength=16).tolist() == row.demand_E.tolist()
        places.append([number[np.ascontiguousarray(np.stack(ids_LTK)[:, t]).tobytes()] for t in range(3)])
    for before, after in itertools.pairwise(places):
        for here, there in zip(before, after, strict=True):
            assert there == here + 1 if here not in ends else there in (0, 10, 30)
    assert np.array_equal(demands(rows), demands(taken(workload, len(rows))))


def test_the_seed_makes_the_trace(tmp_path: Path) -> None:
    tokens_file(tmp_path / "a.npz")
    digests = []
    for number, seed in enumerate((1, 1, 2)):
        workload = workload_of(read_corpus([tmp_path / "a.npz"]), Shape(tokens=4, seed=seed))
        with TraceWriter(tmp_path / f"{number}.npz", workload.header) as out:
            for row in taken(workload, 30):
                out.add(row)
        digests.append(out.digest)
    assert digests[0] == digests[1] != digests[2]


def test_other_numbers_for_experts_change_workers_and_nothing_else(tmp_path: Path) -> None:
    tokens_file(tmp_path / "a.npz", tokens=400, experts=32)
    corpus = read_corpus([tmp_path / "a.npz"])
    real, paper = (taken(workload_of(corpus, Shape(tokens=64, skew=how)), 40) for how in ("real", "paper"))
    assert np.array_equal(np.sort(demands(real), axis=1), np.sort(demands(paper), axis=1))
    found = skew(normal(np.moveaxis(demands(paper).reshape(4, 5, 2, 32)[:, :, 0], 1, 0).astype(float)), 8).mean()
    assert abs(found - SKEW) < 0.1


def counts_file(path: Path, *, chunks: int = 4, kappa: float = 300.0, experts: int = 32) -> np.ndarray:
    rng = np.random.default_rng(5)
    mean = rng.dirichlet(np.full(experts, 0.7), size=2)
    arrays: dict[str, np.ndarray] = {"layers": np.arange(2)}
    for name in ("chat", "math"):
        arrays[f"{name}_cnt"] = np.array(
            [
                [rng.multinomial(40_000, rng.dirichlet(kappa * mean[layer] + 1e-9)) for layer in range(2)]
                for _ in range(chunks)
            ],
            np.int32,
        )
        arrays[f"{name}_tokens"] = np.full(chunks, 10_000)
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return mean


def test_counts_become_demand_around_them(tmp_path: Path) -> None:
    mean = counts_file(tmp_path / "c.npz", chunks=40)
    corpus = read_corpus([tmp_path / "c.npz"])
    assert isinstance(corpus, CountCorpus)
    assert (corpus.top_k, corpus.sources) == (4, ("chat", "math"))
    kappa_L = concentration(corpus.counts_DPLE)
    assert (np.abs(kappa_L / 300 - 1) < 0.25).all()
    workload = workload_of(corpus, Shape(tokens=500, microbatches=1, seed=3))
    rows = taken(workload, 600)
    assert {int(row.demand_E.sum()) for row in rows if row.demand_E is not None} == {2000}
    assert max(int(row.demand_E.max()) for row in rows if row.demand_E is not None) <= 500
    for layer in range(2):
        share_E = demands([row for row in rows if row.target.layer == layer]).mean(axis=0) / 2000
        assert np.abs(share_E - mean[layer]).max() < 0.03
    assert np.array_equal(demands(rows[:20]), demands(taken(workload, 20)))


def test_no_expert_has_more_pairs_than_there_are_tokens() -> None:
    corpus = CountCorpus(counts_DPLE=np.array([[[[900, 80, 10, 10, 0, 0]]]]), sources=("x",), top_k=3)
    for row in taken(CountWorkload(corpus=corpus, shape=Shape(tokens=50, microbatches=1)), 50):
        assert row.demand_E is not None
        assert row.demand_E.sum() == 150
        assert row.demand_E.max() <= 50


def test_a_shape_that_cannot_be() -> None:
    for bad in ({"tokens": 0}, {"microbatches": 0}, {"layers": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=r"workload\."):
            Shape(**bad)  # type: ignore[arg-type]
    corpus = CountCorpus(counts_DPLE=np.ones((1, 1, 1, 4), np.int64), sources=("x",), top_k=0)
    with pytest.raises(ConfigError, match="does not say how many tokens"):
        workload_of(corpus, Shape())


def apart(corpus: CountCorpus, motion: Motion) -> float:
    """How much of the demand moves from a step to the next, 0 to 1, in the mean."""
    shape = Shape(tokens=2000, microbatches=1, layers=1, motion=motion)
    shares = demands(taken(CountWorkload(corpus, shape, np.full(1, 1e6) / motion.jitter), 60)) / 8000
    return float(np.abs(np.diff(shares, axis=0)).sum(axis=1).mean() / 2)


def test_traffic_moves_as_fast_as_it_is_told(tmp_path: Path) -> None:
    counts_file(tmp_path / "c.npz", chunks=40)
    corpus = read_corpus([tmp_path / "c.npz"])
    assert isinstance(corpus, CountCorpus)
    still = apart(corpus, Motion(pace=1e-4))
    assert apart(corpus, Motion()) < 2 * still, "of a step of counted text, sampling is most"
    assert apart(corpus, Motion(pace=64)) > 3 * still
    assert apart(corpus, Motion(jitter=1e4)) > 3 * still
    assert np.array_equal(
        demands(taken(workload_of(corpus, Shape(tokens=50)), 40)),
        demands(taken(workload_of(corpus, Shape(tokens=50, motion=Motion(pace=1.0, jitter=1.0))), 40)),
    )


def test_traffic_turns_to_the_other_half_of_its_domains() -> None:
    of_one, of_other = [8, 8, 0, 0], [0, 0, 8, 8]
    corpus = CountCorpus(counts_DPLE=np.array([[[of_one]], [[of_other]]]), sources=("before", "after"), top_k=2)
    shape = Shape(tokens=100, microbatches=2, motion=Motion(turn_step=3))
    for row in taken(CountWorkload(corpus, shape, np.full(1, 1e6)), 12):
        assert row.demand_E is not None
        away = row.demand_E[2:] if row.target.step < 3 else row.demand_E[:2]
        assert not away.any()
    with pytest.raises(ConfigError, match=r"workload\.turn_step: before alone has nothing to turn to"):
        CountWorkload(CountCorpus(counts_DPLE=corpus.counts_DPLE[:1], sources=("before",), top_k=2), shape)


def test_tokens_in_their_order_move_as_they_do(tmp_path: Path) -> None:
    tokens_file(tmp_path / "a.npz")
    with pytest.raises(ConfigError, match=r"workload\.motion: .* give counts"):
        workload_of(read_corpus([tmp_path / "a.npz"]), Shape(motion=Motion(pace=2.0)))


@pytest.mark.parametrize("bad", [{"pace": 0.0}, {"jitter": -1.0}, {"pace": float("nan")}, {"turn_step": -1}])
def test_a_motion_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"workload\.{next(iter(bad))}"):
        Motion(**bad)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"ids": np.array([[[0, -1]]])}, r"row 0: its experts \[0, -1\]"),
        ({"ids": np.array([[[0, 1]], [[2, 99_999]]])}, r"row 1: its experts"),
        ({"ids": np.array([[[0, 1]], [[2, 2]]])}, r"row 1: an expert is chosen twice"),
        ({"ids": np.array([[[0.0, 1.0]]])}, r"ids is float64"),
        ({"ids": np.zeros((2, 3), int)}, r"ids is int64 of shape \(2, 3\)"),
        ({"ids": np.array([[[0, 1]]]), "sample_lens": np.array([2])}, "sample_lens does not cut its 1 tokens"),
        ({"a_cnt": np.zeros((1, 1, 4), int)}, r"row 0: a_cnt: a chunk's layer counts no token"),
        ({"a_cnt": np.array([[[4, 1]], [[-1, 9]]])}, r"row 1: a_cnt: a chunk's layer"),
        ({"a_cnt": np.ones((2, 1, 4), int), "b_cnt": np.ones((2, 1, 3), int)}, r"b_cnt has layers and experts \(1, 3\), not"),
        ({"a_cnt": np.full((1, 1, 4), np.nan)}, "a_cnt is float64"),
        ({"other": np.zeros(3)}, "it has no routing"),
    ],
)  # fmt: skip
def test_routing_that_cannot_be(tmp_path: Path, arrays: dict[str, np.ndarray], why: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=rf"x\.npz: .*{why}"):
        read_corpus([tmp_path / "x.npz"])


def test_files_that_are_none(tmp_path: Path) -> None:
    tokens_file(tmp_path / "a.npz")
    counts_file(tmp_path / "c.npz")
    with pytest.raises(TraceError, match=r"c\.npz: it is of another kind than .*a\.npz"):
        read_corpus([tmp_path / "a.npz", tmp_path / "c.npz"])
    np.savez(tmp_path / "o.npz", ids=np.array([print], dtype=object))
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for name, why in (("none.npz", "No such file"), ("cut.npz", "not a zip"), ("o.npz", "could carry code")):
        with pytest.raises(TraceError, match=rf"{name}: cannot be read: .*{why}"):
            read_corpus([tmp_path / name])
    assert [is_corpus(tmp_path / name) for name in ("a.npz", "c.npz", "cut.npz", "none.npz")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="no recordings beside the repository")
@pytest.mark.parametrize(
    "names", [["dsv2lite_esft_intent.npz", "dsv2lite_esft_summary.npz"], ["glm52_domain_chunk_counts.npz"]]
)
def test_real_routing_can_have_the_papers_skew(names: list[str]) -> None:
    corpus = read_corpus([REAL / name for name in names])
    workload = workload_of(corpus, Shape(layers=12, skew="paper"))
    shares = normal(demands(taken(workload, 24 * 12)).astype(float))[None]
    assert abs(float(skew(shares, 8).mean()) - SKEW) < 0.15
    if isinstance(corpus, CountCorpus):
        assert abs(hot_part(shares) - HOT_PART) < 0.03
