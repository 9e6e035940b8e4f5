"""``python -m afore.tools.replay``: hand-made traces, the window model, predictions, and the command."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afore.core.policy_options import PolicyOptions
from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.traces import Shape, TraceHeader, TraceTarget, TraceWriter
from afore.tools.replay import EVERY, main
from afore.tools.replay_drive import replay
from afore.tools.replay_input import Source, open_source
from afore.tools.replay_measure import Measured, Setting
from afore.tools.replay_plot import draw
from afore.tools.replay_predict import ReplayPredictor
from afore.tools.replay_report import row_of
from afore.tools.replay_window import Pipeline

HEADER = TraceHeader(experts=8, layers=2, top_k=2, microbatches=2)
COSTS = Costs(tile_us=10.0, copy_us=100.0, window_us=150.0)


def targets(steps: int, seed: int = 0, *, ids: bool = True) -> list[TraceTarget]:
    """Low experts are hot; they drift."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(steps):
        for layer in range(2):
            for m in range(2):
                heat = np.arange(8) + 8 * rng.random(8)
                ids_TK = np.argsort(heat + rng.gumbel(size=(40, 8)) * 3, axis=1)[:, :2].astype(np.int32)
                demand_E = np.bincount(ids_TK.reshape(-1), minlength=8).astype(np.int32)
                found.append(
                    TraceTarget(
                        target=Target(layer, m, step), demand_E=demand_E, tokens=40, ids_TK=ids_TK if ids else None
                    )
                )
    return found


def trace(path: Path, steps: int = 12, *, ids: bool = True) -> Path:
    with TraceWriter(path, HEADER) as out:
        for row in targets(steps, ids=ids):
            out.add(row)
    return path


def replayed(policy: str, rows: list[TraceTarget], *, workers: int = 4, slots: int = 2, **changes: Any) -> Measured:
    source = Source(name="x", header=HEADER, warmup=0, measured=len(rows), make=None, kept=rows)
    setting = Setting(
        policy=policy, workers=workers, slots=slots, tile_tokens=4, costs=COSTS, options=PolicyOptions(), accuracy=0.8, seed=1,
        **changes,
    )  # fmt: skip
    return replay(source, setting, lambda: None)


def test_figures_by_hand() -> None:
    demand_E = np.array([12, 4, 0, 0, 3, 1, 0, 0], np.int32)
    rows = [
        TraceTarget(target=Target(0, 0, 0), demand_E=demand_E),
        TraceTarget(target=Target(1, 0, 0), demand_E=demand_E),
    ]
    found = row_of(_setting("static"), replayed("static", rows, workers=2), expert_bytes=7)
    assert found["targets"] == 2
    assert found["token"] == {"before": 16 / 10, "after": 16 / 10}
    # Expert 0 has 3 tiles, expert 1 has 1, experts 4 and 5 have 1 each: 4 against 2, bound 3.
    assert found["tile"] == {"before": 4 / 3, "after": 4 / 3, "bound": 1.0}
    assert found["at_bound"] == 0
    assert found["gap_to_bound"] == pytest.approx(1 / 3)
    assert found["ffn_time"] == 1.0
    assert found["load_by_worker"]["before"] == [1.6, 0.4]
    assert found["hidden"] is None
    certified = dataclasses.replace(_setting("afore"), optimum_limit_s=1.0)
    better = row_of(certified, replayed("afore", rows, workers=2, optimum_limit_s=1.0), expert_bytes=7)
    assert better["tile"]["after"] == 1.0
    assert better["at_bound"] == better["optimal"] == 2
    assert better["copies"] == 2
    assert better["copy_bytes"] == 14
    assert better["hidden"] == 1.0
    assert better["ffn_time"] == 3 / 4


def _setting(policy: str) -> Setting:
    return Setting(
        policy=policy, workers=2, slots=2, tile_tokens=4, costs=COSTS, options=PolicyOptions(), accuracy=1, seed=0
    )


def test_what_hides_copies() -> None:
    primaries_E = np.array([0, 0, 1, 1], np.int32)
    nothing = np.zeros((4, 2), np.int64)
    tiles_EN = np.array([[3, 2], [0, 0], [0, 0], [0, 4]])
    pipeline = Pipeline(COSTS, primaries_E)
    pipeline.target(0, [(0, 1, 0)], "now", [(0, 1, 0, 9)], tiles_EN, 6)
    assert (pipeline.raw_us, pipeline.exposed_us, pipeline.now_us) == (100.0, 0.0, 60.0)
    # Two copies leave one port: 200 µs, of which W hides 150.
    pipeline.target(0, [(0, 1, 0), (1, 1, 1)], "now", [], tiles_EN, 6)
    assert (pipeline.raw_us, pipeline.exposed_us) == (300.0, 50.0)
    # On arrival, worker 1 has expert 3's four tiles to do meanwhile: 40 µs.
    pipeline.target(0, [(0, 1, 0)], "arrival", [], tiles_EN, 6)
    assert pipeline.exposed_us == 110.0
    # Ahead: 300 µs of copies, used after one target of 100 µs; W hides 150 more.
    pipeline.ahead(1, [(0, 1, 0), (1, 1, 1), (0, 1, 2)], "now")
    pipeline.target(0, [], "now", [], nothing, 10)
    pipeline.target(1, [], "now", [(0, 1, 0, 5)], nothing, 0)
    assert pipeline.exposed_us == 160.0
    pipeline.target(1, [], "now", [(1, 1, 1, 5)], nothing, 0)
    assert pipeline.exposed_us == 160.0, "one group waits once"
    pipeline.ahead(1, [(0, 1, 0)], "arrival")
    assert pipeline.exposed_us == 260.0
    assert pipeline.copies == 8


def test_lina_learns_what_follows_what() -> None:
    rows = []
    for step in range(4):
        first = np.array([[0, 1], [2, 3]], np.int32)
        for layer, ids_TK in ((0, first), (1, first + 4)):
            demand_E = np.bincount(ids_TK.reshape(-1), minlength=8).astype(np.int32)
            rows.append(TraceTarget(target=Target(layer, 0, step), demand_E=demand_E, ids_TK=ids_TK))
    predictor = ReplayPredictor("transitions", HEADER, accuracy=0.5, seed=0)
    for row in rows[:-1]:
        predictor.seen(row)
    assert predictor.predict(rows[-2], rows[-1]).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["next-gate", "transitions"])
def test_a_prediction_without_tokens_is_as_good_as_stated(kind: Any) -> None:
    rows = targets(60, ids=False)
    predictor = ReplayPredictor(kind, HEADER, accuracy=0.75, seed=3)
    kept = total = 0
    for row in rows:
        predictor.seen(row)
        assert row.demand_E is not None
        predicted_E = predictor.predict(row, row)
        assert predicted_E.sum() == row.demand_E.sum()
        assert np.array_equal(predicted_E, predictor.predict(row, row))
        kept += int(np.minimum(predicted_E, row.demand_E).sum())
        total += int(row.demand_E.sum())
    assert 0.75 < kept / total < 0.95, "three quarters, and what the rest hits by chance"


@pytest.mark.slow
def test_every_policy_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path / "t.npz")
    out = tmp_path / "r.json"
    status = main([str(path), "--ep", "2,3", "--slots", "1,2", "--tile", "4", "--warmup", "16", "--json", str(out)])
    assert status == 0
    (report,) = json.loads(out.read_text())
    assert (report["targets"], report["warmup"]) == (32, 16)
    assert [(run["ep"], run["slots"]) for run in report["runs"]] == [(2, 1), (3, 1), (2, 2), (3, 2)]
    for run in report["runs"]:
        assert [row["policy"] for row in run["rows"]] == list(EVERY)
        for row in run["rows"]:
            assert row["targets"] == 32
            assert row["token"]["before"] == run["rows"][0]["token"]["before"]
            assert row["tile"]["after"] >= row["tile"]["bound"]
            assert sum(row["load_by_worker"]["after"]) == pytest.approx(run["ep"])
        assert run["rows"][0]["ffn_time"] == 1.0
        assert run["rows"][1]["ffn_time"] < 1.0
    assert sum(run["rows"][1]["copies"] for run in report["runs"]) > 0
    shown = capsys.readouterr().out
    assert "EP 3, R = 2" in shown
    assert "FFN time: Σ" in shown


def test_without_tokens_and_with_other_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path / "t.npz", ids=False)
    command = [str(path), "--ep", "4", "--slots", "2", "--tile", "4", "--policy", "lina,eplb,harmoeny,static"]
    assert main([*command, "--eplb-mode", "stop", "--harmoeny-tokens", "4", "--lina-replan", "--json", "-"]) == 0
    told = capsys.readouterr()
    (report,) = json.loads(told.out)
    lina, eplb, harmoeny, _ = report["runs"][0]["rows"]
    assert lina["options"] == {"replan": True}
    assert eplb["options"]["mode"] == "stop"
    assert harmoeny["copies"] > 0
    assert 0 <= harmoeny["hidden"] < 1, "they start on arrival"
    assert "EP 4, R = 2" in told.err


def test_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path / "t.npz")
    cut = tmp_path / "cut.npz"
    cut.write_bytes(path.read_bytes()[:-600])
    for command, why in (
        ([str(tmp_path / "none.npz")], "none.npz: cannot be read: No such file"),
        ([str(cut)], "cut.npz: it is cut off after"),
        ([f"{path},{path}"], "t.npz: it has no routing that could be mixed"),
        ([str(path), "--verify"], "it is no recording of a run"),
    ):
        assert main([*command, "--policy", "static", "--ep", "2"]) == 2
        assert why in capsys.readouterr().err
    for option, value in (("--policy", "afroe"), ("--ep", "0"), ("--accuracy", "1.5"), ("--targets", "x")):
        with pytest.raises(SystemExit) as ended:
            main([str(path), option, value])
        assert ended.value.code == 2
        assert option in capsys.readouterr().err


@pytest.mark.slow
def test_a_long_trace_is_not_kept(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.npz", 300)
    source = open_source(str(path), Shape(tokens=1 << 20), targets=1000, warmup=100, partial=False)
    assert source.kept == []
    tracemalloc.start()
    try:
        found = replay(source, _setting("static"), lambda: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.targets == 1000
    assert peak < 12 << 20


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra afore[bench]")
    rows = targets(6)
    runs = []
    for ep in (2, 4):
        made = [row_of(_setting(policy), replayed(policy, rows, workers=ep), 1.0) for policy in ("static", "afore")]
        runs.append({"ep": ep, "slots": 2, "rows": made})
    files = draw(runs, tmp_path, "x")
    assert sorted(path.name for path in files) == ["x-imbalance.svg", "x-latency.svg", "x-layers.svg", "x-workers.svg"]
    assert all(b"<svg" in path.read_bytes()[:500] for path in files)
