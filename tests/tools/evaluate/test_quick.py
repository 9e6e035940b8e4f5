"""The first look that the documentation offers: the case study ends in the paper's order, and copies hide, each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afore.tools.evaluate.command import main


def test_a_quick_look_shows_the_papers_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--quick", "--only", "fig3,fig4,fig11", "--workloads", "chat", "--no-pictures", "--out", str(tmp_path)]
    assert main(asked) == 0
    figures = json.loads((tmp_path / "evaluation.json").read_text())["figures"]
    gains = [row["ours"]["over static"] for row in figures["fig3"]["rows"]]
    assert gains[0] == 0.0
    assert gains == sorted(gains)
    assert gains[-1] > 0.03
    tiles = [row["ours"]["tile imbalance"] for row in figures["fig4"]["rows"]]
    assert tiles == sorted(tiles, reverse=True)
    [hidden] = [row["ours"] for row in figures["fig11"]["rows"]]
    assert hidden["targets"] > 10
    assert hidden["exposed"] == hidden["of the first layer"]
    assert "4 cells" in capsys.readouterr().out
    # Deterministic: what was kept is what the same command reads back.
    before = (tmp_path / "evaluation.json").read_bytes()
    assert main(asked) == 0
    assert (tmp_path / "evaluation.json").read_bytes() == before
