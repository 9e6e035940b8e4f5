"""The attention bench on small models: what it prints and writes, and what it refuses. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afore.models.random_families import random_family_checkpoint
from afore.tools.attention_bench import main


@pytest.mark.slow
def test_both_paths_are_measured_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_family_checkpoint(tmp_path / "model", "dots1")
    out = tmp_path / "out.json"
    arguments = ["--model", str(model), "--tokens", "1", "3", "--context", "20", "--steps", "2", "--json", str(out)]
    assert main(arguments) == 0
    assert "fused" in capsys.readouterr().out
    measured = json.loads(out.read_text())
    assert measured["why_not_fused"] is None
    assert [(case["path"], case["tokens"]) for case in measured["cases"]] == [
        ("modules", 1),
        ("fused", 1),
        ("modules", 3),
        ("fused", 3),
    ]
    for case in measured["cases"]:
        assert set(case["pieces_us"]) == {"attend", "combine", "dense", "begin", "logits"}
        assert case["layer_us"] > 0
    assert measured["cases"][0]["ratio"] == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_family_that_cannot_run_fused_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_family_checkpoint(tmp_path, "gpt_oss")
    assert main(["--model", str(model), "--tokens", "2", "--context", "5", "--steps", "1", "--json", "-"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert "sinks" in measured["why_not_fused"]
    assert [case["path"] for case in measured["cases"]] == ["modules"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--context", "0"], "--context"),
        (["--context", "4000"], "--context: the model ends at 2048"),
        (["--steps", "0"], "--steps"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
