"""Figures, page and pictures from given results; the command end to end on the smallest evaluation there is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from afore.scheduler.policies.registry import POLICIES
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.command import main
from afore.tools.evaluate.demand import WORKLOADS
from afore.tools.evaluate.figures import FIGURES, Figure, Row, vary
from afore.tools.evaluate.pictures import draw
from afore.tools.evaluate.report import page, shown, to_json
from afore.workers.device.hardware import read_profile

TEMPLATE = Cell(policy="static", layers=2)
NAMES = list(WORKLOADS)


def result(cell: Cell) -> Mapping[str, Any]:
    """What a run might have shown: numbers that tell cells apart."""
    speed = 1000.0 + 10 * list(POLICIES).index(cell.policy) - cell.redistribute_us / 10 - 50 * cell.imbalance
    spread = {"mean": 100.0, "points": [10.0, 50.0, 90.0]}
    return {
        "tokens_per_s": speed,
        "itl_p95_ms": 1e5 / speed,
        "imbalance": {"token": {"before": 1.7, "after": 1.1}, "tile": {"before": 1.5, "after": 1.02}},
        "layers_imbalance": [{"token": {"before": 1.2}}, {"token": {"before": 3.1}}],
        "copies": {
            "targets": 5,
            "exposed_targets": 1,
            **dict.fromkeys(("d_us", "raw_us", "w_us", "left_us", "exposed_us"), spread),
        },
    }


def rows_of(figure: Figure, names: list[str]) -> list[Row]:
    return figure.rows(TEMPLATE, names, {cell: result(cell) for cell in figure.cells(TEMPLATE, names)})


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
@pytest.mark.parametrize("names", [NAMES, ["math"]], ids=["all", "one"])
def test_every_figure_is_made_of_its_cells_alone(figure: Figure, names: list[str]) -> None:
    rows = rows_of(figure, names)
    assert rows
    assert {name for row in rows for name in row.ours} == set(figure.unit)
    assert all(set(row.paper) <= set(row.ours) for row in rows)
    assert {cell.workload for cell in figure.cells(TEMPLATE, names)} <= set(names)


def test_policies_on_the_path_are_there_at_every_cost() -> None:
    cells = FIGURES["fig8"].cells(TEMPLATE, ["chat"])
    assert {c.redistribute_us for c in cells if c.policy == "libra"} == {0.0, 100.0, 200.0}
    assert {c.redistribute_us for c in cells if c.policy == "afore"} == {0.0}
    labels = [row.label for row in rows_of(FIGURES["fig8"], ["chat"])]
    assert len(set(labels)) == len(labels) == len(cells)


def test_the_page_has_the_papers_value_beside_ours() -> None:
    found = [(figure, rows_of(figure, NAMES)) for figure in FIGURES.values()]
    text = page(found, TEMPLATE, read_profile("a100-glm45air"), "python -m afore.tools.evaluate")
    assert "| Static | " in text
    assert "11,357" in text
    assert "| chip.gemm_efficiency | 0.175 | inferred |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    heads = [line for line in rows if set(line) <= set("|-:")]
    assert len(heads) == len(FIGURES) + 2
    whole = to_json(found, TEMPLATE)
    assert set(whole["figures"]) == set(FIGURES)
    json.dumps(whole, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.263, "%", "+26.3 %"),
        (-0.01, "%", "-1.0 %"),
        (11357.3, "tokens/s", "11,357"),
        (281.44, "ms", "281.4"),
        (0.4741, "ms", "0.474"),
        (324.0, "", "324"),
        (None, "ms", ""),
    ],
)
def test_values_as_the_page_has_them(value: float | None, unit: str, text: str) -> None:
    assert shown(value, unit) == text


@pytest.mark.slow
def test_pictures_are_the_same_bytes_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need afore[bench]")
    figure = FIGURES["fig3"]
    written = draw(figure, rows_of(figure, NAMES), tmp_path)
    assert [path.name for path in written] == ["fig3.svg", "fig3.png"]
    before = [path.read_bytes() for path in written]
    assert all(len(content) > 1000 for content in before)
    draw(figure, rows_of(figure, NAMES), tmp_path)
    assert written[1].read_bytes() == before[1]


SHAPE = ["--attention", "1", "--ffn", "2", "--prefill", "1", "--microbatches", "1"]
SMALLEST = ["--quick", "--layers", "1", "--rows", "2", "--steps", "1", *SHAPE, "--no-pictures"]


@pytest.mark.slow
def test_the_command_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALLEST, "--only", "fig4", "--workloads", "code", "--out", str(tmp_path)]
    assert main(arguments) == 0
    first = capsys.readouterr()
    assert first.err.count("code") == 4
    before = (tmp_path / "evaluation.json").read_bytes()
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""
    assert (tmp_path / "evaluation.json").read_bytes() == before
    assert "Approach 3" in (tmp_path / "evaluation.md").read_text()
    assert vary(Cell(policy="static"), seed=3).seed == 3


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--only", "fig99"], "fig99"),
        (["--only", ","], "--only"),
        (["--workloads", "poems"], "poems"),
        (["--profile", "abacus"], "abacus"),
    ],
)
def test_mistakes_are_named(arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert names in capsys.readouterr().err
