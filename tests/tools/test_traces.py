"""``python -m afore.tools.traces``: import, look at, export; nothing half written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from afore.scheduler.traces import TraceReader
from afore.scheduler.traces.placement import read_placement
from afore.tools.traces import main


def test_counts_in_figures_and_placements_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = np.arange(2 * 3 * 8).reshape(2, 3, 8)
    counts[:, 0] = 0
    source, trace = tmp_path / "c.json", tmp_path / "t.npz"
    source.write_text(json.dumps({"logical_count": counts.tolist()}))
    assert main(["import", str(source), "-o", str(trace), "--top-k", "2", "--model", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert "4 targets, E 8, K 2, L 2; sglang; digest " in shown
    assert "1 layers count nothing and are left out; layer 0 is its layer 1" in shown
    assert main(["import", str(source), "-o", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"] == 4
    assert main(["info", str(trace)]) == 0
    assert "4 targets of 2 steps; E 8, K ?, L 2, M 1" in capsys.readouterr().out
    assert main(["info", str(trace), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pairs"] == counts.sum()
    assert told["hottest_expert"] > 1
    for system, name in (("sglang", "p.json"), ("tensorrt-llm", "p.yaml"), ("vllm-ascend", "p.json")):
        out = tmp_path / name
        command = ["export", str(trace), "--to", system, "--workers", "2", "--slots", "1", "-o", str(out)]
        assert main([*command, "--dense-layers", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["slots_of_a_worker"] == 5
        assert read_placement(out, experts=8, workers=2, first_layer=1).first_layer == 1


def test_routing_goes_straight_into_a_placement(tmp_path: Path) -> None:
    ids = np.argsort(np.random.default_rng(0).random((30, 2, 8)), axis=2)[:, :, :2].astype(np.uint8)
    np.savez(tmp_path / "r.npz", ids=ids)
    out = tmp_path / "p.json"
    assert (
        main(["export", str(tmp_path / "r.npz"), "--to", "sglang", "--workers", "4", "--slots", "1", "-o", str(out)])
        == 0
    )
    assert len(json.loads(out.read_text())["physical_to_logical_map"]) == 2


def test_nothing_is_half_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, trace = tmp_path / "c.csv", tmp_path / "t.npz"
    source.write_text("1,2\n3,-4\n")
    trace.write_bytes(b"as it was")
    assert main(["import", str(source), "-o", str(trace)]) == 2
    assert "c.csv: row 1: (step 0, layer 1) has an expert with less than 0 tokens; mend it" in capsys.readouterr().err
    assert trace.read_bytes() == b"as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.csv", "t.npz"]
    source.write_text("1,2\n3,4\n")
    assert main(["import", str(source), "-o", str(tmp_path / "no" / "t.npz")]) == 1
    assert main(["import", str(tmp_path / "none.pt"), "-o", str(trace)]) == 2
    capsys.readouterr()


def test_no_output_takes_the_place_of_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, trace = tmp_path / "c.csv", tmp_path / "t.npz"
    source.write_text("1,2\n3,4\n")
    assert main(["import", str(source), "-o", str(trace)]) == 0
    (tmp_path / "same").symlink_to(trace)
    for command in (
        ["import", str(source), "-o", str(source)],
        ["export", str(trace), "--to", "sglang", "--workers", "2", "--slots", "1", "-o", str(tmp_path / "same")],
    ):
        kept = source.read_bytes(), trace.read_bytes()
        assert main(command) == 2
        assert "is what is read; name another file" in capsys.readouterr().err
        assert (source.read_bytes(), trace.read_bytes()) == kept


def test_what_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "c.npy", rng.integers(1, 1 << 20, (3000, 2, 64)))
    trace, cut = tmp_path / "t.npz", tmp_path / "cut.npz"
    assert main(["import", str(tmp_path / "c.npy"), "-o", str(trace), "--format", "eplb"]) == 0
    cut.write_bytes(trace.read_bytes()[:-5000])
    assert main(["info", str(cut)]) == 2
    assert "cut.npz: it is cut off after" in capsys.readouterr().err
    assert main(["info", str(cut), "--partial", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cut_off"]
    assert 0 < told["targets"] < 6000
    assert main(["info", str(cut), "--partial"]) == 0
    assert "it is cut off" in capsys.readouterr().out
    assert TraceReader(trace).header.layers == 2
