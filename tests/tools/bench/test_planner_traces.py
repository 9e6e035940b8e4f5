"""Recorded routing as demand: both kinds of files, what is done to them, what is refused, and the real ones where they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.scheduler.traces.calibrate import HOT_PART, SKEW, calibrated, hot_part, normal, skew
from afore.tools.bench.planner_traces import Recorded, read_traces

REAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "routing"


def routing(tokens: int, layers: int, experts: int, seed: int = 0) -> np.ndarray:
    """[tokens, layers, 2] of experts of which low numbers are chosen more often."""
    rng = np.random.default_rng(seed)
    return (experts * rng.random((tokens, layers, 2)) ** 2).astype(np.uint8)


def test_shares_and_skew_by_hand() -> None:
    counts = np.array([[[4.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]])
    shares_GPE = normal(counts)
    assert shares_GPE.tolist() == [[[0.5, 0.25, 0.125, 0.125], [0.25] * 4]]
    assert skew(shares_GPE, 2).tolist() == [[1.5, 1.0]]
    assert hot_part(shares_GPE) == (0.5 + 0.25) / 2


def test_routing_of_tokens_becomes_windows_of_layers_side_by_side(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", ids=routing(400, 4, 64, seed=1))
    np.savez(tmp_path / "a.npz", ids=routing(300, 4, 64), weights=np.zeros(3))
    np.savez(tmp_path / "other.npz", ids=np.arange(3), something_cnt=np.zeros((2, 2)))
    found = read_traces(tmp_path, seed=1)
    assert found.experts == 128
    assert "a.npz then b.npz: 4 layers of 64 experts, 2 side by side: 128, 100 windows of 256 tokens" in found.text
    assert found.shares_GPE.shape == (2, 100, 128)
    assert np.allclose(found.shares_GPE.sum(axis=2), 1)
    demand_TE = found.demands(pairs=4096, targets=210, seed=2)
    assert demand_TE.shape == (210, 128)
    assert (demand_TE.sum(axis=1) == 4096).all()
    assert np.array_equal(demand_TE, read_traces(tmp_path, seed=1).demands(pairs=4096, targets=210, seed=2))
    assert not np.array_equal(demand_TE, found.demands(pairs=4096, targets=210, seed=3))


def test_few_targets_are_of_all_layers_too() -> None:
    few = Recorded(shares_GPE=np.eye(4)[[[0, 1, 1], [2, 3, 3]]], text="").demands(pairs=5, targets=4, seed=0)
    assert few.argmax(axis=1).tolist() == [0, 1, 2, 3]
    more = Recorded(shares_GPE=np.eye(4)[[[0, 1], [2, 3]]], text="").demands(pairs=5, targets=6, seed=0)
    assert more.argmax(axis=1).tolist() == [0, 1, 2, 3, 0, 1]


def test_counts_are_read_layer_after_layer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    chat, code = (rng.integers(1, 900, (2, 3, 32)).astype(np.int32) for _ in range(2))
    np.savez(tmp_path / "counts.npz", chat_cnt=chat, code_cnt=code, chat_tokens=np.arange(2), layers=np.arange(3))
    found = read_traces(tmp_path / "counts.npz", seed=1)
    assert "3 layers of 32 experts, 4 chunks of text each" in found.text
    assert found.shares_GPE.shape == (3, 4, 32)
    # What was hottest in a chunk stays hottest: experts are put in another order, and powers are monotone.
    first = np.sort(normal(chat[:1].astype(float)))[0, 0]
    ours = np.sort(found.shares_GPE[0, 0])
    rises = np.diff(first) > 0
    assert (np.diff(ours) > 0).tolist() == rises.tolist()
    powers = np.diff(np.log(ours))[rises] / np.diff(np.log(first))[rises]
    assert powers == pytest.approx(powers[0])


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), layers=st.integers(1, 5), experts=st.sampled_from([8, 64, 128]))
@settings(deadline=None, max_examples=15)
def test_calibrating_only_raises_to_one_power_and_orders_each_layer(seed: int, layers: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    shares_GPE = normal(rng.gamma(0.5, size=(layers, 6, experts)) + 1e-3)
    found, how = calibrated(shares_GPE, seed)
    power = float(how.split("power ")[1].split(",")[0])
    before, after = (np.sort(one, axis=2) for one in (normal(shares_GPE**power), found))
    assert np.allclose(before, after, atol=0.02)
    # One order for all targets of a layer: the sums over targets are those of some order too.
    assert np.allclose(np.sort(found.sum(axis=1)), np.sort(normal(shares_GPE**power).sum(axis=1)), atol=0.1)
    assert np.allclose(found.sum(axis=2), 1)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (b"", b"PK\x03\x04 no more", b"text", (tmp_path / "array.npy").read_bytes()):
        (tmp_path / "damaged.npz").write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_traces(tmp_path, seed=1)
    (tmp_path / "damaged.npz").unlink()
    for path in (tmp_path, tmp_path / "nowhere.npz"):
        with pytest.raises(ConfigError, match="--traces"):
            read_traces(path, seed=1)
    np.savez(tmp_path / "mixed.npz", chat_cnt=np.ones((2, 3, 8), int), code_cnt=np.ones((2, 3, 16), int))
    with pytest.raises(ConfigError, match="numbers of layers or experts differ"):
        read_traces(tmp_path, seed=1)
    np.savez(tmp_path / "mixed.npz", chat_cnt=np.zeros((2, 3, 8), int))
    with pytest.raises(ConfigError, match="counts no token"):
        read_traces(tmp_path, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "glm52_domain_chunk_counts.npz"])
def test_the_real_recordings_are_as_skewed_as_the_papers_model(name: str) -> None:
    if not REAL.is_dir():
        pytest.skip(f"no recordings in {REAL}")
    found = read_traces(REAL / name, seed=1)
    shares_GPE = found.shares_GPE
    assert hot_part(shares_GPE) == pytest.approx(HOT_PART, abs=0.001)
    assert skew(shares_GPE, 8).mean() == pytest.approx(SKEW, abs=0.05)
    assert 4 < shares_GPE.max(axis=2).mean() * found.experts < 12
