"""The bench of virtual time: its figures, its file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afore.tools.bench.command import main

SMALL = ["--layers", "2", "--rows", "4", "--ffn", "2", "--attention", "1", "--prefill", "1", "--steps", "4"]


@pytest.mark.slow
def test_its_figures_are_those_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["virtual", *SMALL, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["targets"] >= 2 * 3 * 4, "layers x M x steps, and those before and after what is measured"
    assert figures["cpu_s"] > 0 < figures["peak_mib"]
    assert figures["cell"]["policy"] == "afore"
    assert "ms of CPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--ffn", "0"], "ffn"),
        (["--steps", "1"], "steps"),
        (["--rows", "many"], "rows"),
        (["--policy", "nobody"], "policy"),
        (["--profile", "nothing"], "profile"),
    ],
)
def test_it_refuses_by_name(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["virtual", *SMALL, *options]) == 2
    assert named in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["virtual", "--json", str(tmp_path / "no" / "such" / "file"), "--ffn", "0"]) == 2
    assert "ffn" in capsys.readouterr().err, "the shape is looked at before anything runs"
