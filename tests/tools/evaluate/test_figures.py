"""Figures, page and pictures from given results; the command end to end on the smallest evaluation there is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afore.core.errors import HostError
from afore.scheduler.policies.afore import NOTHING_TO_PLAN_ON
from afore.scheduler.policies.registry import POLICIES
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.command import check, main
from afore.tools.evaluate.fig_ablation import target_us
from afore.tools.evaluate.fig_sensitivity import points
from afore.tools.evaluate.figure import Figure, Row, Setting, vary
from afore.tools.evaluate.figures import FIGURES, SWEPT
from afore.tools.evaluate.findings import findings
from afore.tools.evaluate.measured import measured_rows
from afore.tools.evaluate.pictures import draw
from afore.tools.evaluate.profiles import with_overrides
from afore.tools.evaluate.report import page, shown, to_json
from afore.tools.evaluate.workloads import WORKLOADS
from afore.workers.device.hardware import read_profile

TEMPLATE = Cell(policy="static", layers=2)
NAMES = tuple(WORKLOADS)
RUN = [figure for figure in FIGURES.values() if figure.cells is not None]
PROFILE = read_profile("a100-glm45air")


def setting(names: Sequence[str] = NAMES, *, quick: bool = False) -> Setting:
    return Setting(template=TEMPLATE, workloads=tuple(names), profile=PROFILE, quick=quick)


def result(cell: Cell) -> Mapping[str, Any]:
    """What a run might have shown: numbers that tell cells apart."""
    speed = 1000.0 + 10 * list(POLICIES).index(cell.policy) - cell.redistribute_us / 10 - 50 * cell.imbalance
    spread = {"mean": 100.0, "points": [10.0, 50.0, 90.0]}
    return {
        "tokens_per_s": speed,
        "targets": 10,
        "itl_p50_ms": 9e4 / speed,
        "itl_p95_ms": 1e5 / speed,
        "ttft_p95_ms": 1.0,
        "requests_per_s": 2.0,
        "imbalance": {
            "token": {"before": 1.7, "after": 1.1},
            "tile": {"before": 1.5, "after": 1.02, "bound": 1.01},
        },
        "counters": {NOTHING_TO_PLAN_ON: 3} if cell.policy == "afore-no-prefetch" else {},
        "layers_imbalance": [{"token": {"before": 1.2}}, {"token": {"before": 3.1}}],
        "copies": {
            "targets": 5,
            "copies": 7,
            "exposed_targets": 1,
            "exposed_in_first_layer": 1,
            "ahead": 3,
            "exposed_to_earlier": 2,
            **dict.fromkeys(("d_us", "raw_us", "w_us", "left_us", "exposed_us"), spread),
        },
    }


def rows_of(figure: Figure, one: Setting) -> list[Row]:
    assert figure.cells is not None
    assert figure.rows is not None
    return figure.rows(one, {cell: result(cell) for cell in figure.cells(one)})


@pytest.mark.parametrize("figure", RUN, ids=lambda figure: figure.name)
@pytest.mark.parametrize("names", [NAMES, ("math",)], ids=["all", "one"])
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_every_figure_is_made_of_its_cells_alone(figure: Figure, names: tuple[str, ...], quick: bool) -> None:
    one = setting(names, quick=quick)
    rows = rows_of(figure, one)
    assert rows
    assert len({row.label for row in rows}) == len(rows)
    known = {name for row in rows for name in row.ours}
    assert known <= set(figure.unit)
    assert quick or known == set(figure.unit)
    assert all(set(row.paper) <= set(row.ours) for row in rows)
    assert figure.cells is not None
    assert {cell.workload for cell in figure.cells(one)} <= set(names)


@pytest.mark.parametrize("figure", RUN, ids=lambda figure: figure.name)
def test_a_quick_look_runs_no_other_policies_and_fewer_cells(figure: Figure) -> None:
    assert figure.cells is not None
    few, all_of_them = figure.cells(setting(quick=True)), figure.cells(setting())
    assert len(set(few)) <= len(set(all_of_them))
    assert {cell.policy for cell in few} <= {cell.policy for cell in all_of_them}


def test_every_cell_could_run() -> None:
    for figure in RUN:
        assert figure.cells is not None
        for cell in set(figure.cells(setting())):
            check(cell, PROFILE)


def test_policies_on_the_path_are_there_at_every_cost() -> None:
    assert FIGURES["fig8"].cells is not None
    cells = FIGURES["fig8"].cells(setting(["chat"]))
    for policy in ("eplb-redistribute", "libra", "harmoeny"):
        assert {c.redistribute_us for c in cells if c.policy == policy} == {0.0, 100.0, 200.0}
    assert {c.redistribute_us for c in cells if c.policy == "afore"} == {0.0}
    assert {"eplb", "eplb-redistribute", "lina", "afore-plus"} <= {c.policy for c in cells}
    assert len(rows_of(FIGURES["fig8"], setting(["chat"]))) == len(cells)


def test_each_configuration_has_what_the_paper_says_it_has() -> None:
    for row in rows_of(FIGURES["table3"], setting(["chat"])):
        if row.label != "Static":  # these results moved tiles under every policy
            assert row.ours["prefetch"] == row.paper["prefetch"], row.label


def test_against_the_papers_own_baselines_ours_are_left_out() -> None:
    rows = rows_of(FIGURES["fig8"], setting(["chat"]))
    [text] = [text for text in findings({"fig8": rows}) if text.startswith("Over the best of the paper's own")]
    speeds = {row.label.partition(": ")[2]: row.ours["tokens/s"] for row in rows}
    best = max(speeds[name] for name in ("eplb", "lina", "libra +0 µs", "harmoeny +0 µs"))
    assert f"{speeds['afore'] / best - 1:+.1%} where" in text
    others = ("eplb-redistribute +0 µs", "libra, replicas kept +0 µs")
    faster = [replace(row, ours={**row.ours, "tokens/s": 9e9}) if row.label.endswith(others) else row for row in rows]
    assert text in findings({"fig8": faster})


def test_a_knob_changes_what_it_says() -> None:
    one = setting(["chat"])
    found = points(one)
    assert found["R = 2"].slots == 2
    assert found["B = 1"].copy_budget == 1
    assert (found["EP = 16"].ffn, found["EP = 16"].attention) == (16, 8)
    assert found["one slow worker = 2"].slow_worker == 2.0
    assert found["skew = 2.5"].imbalance == 2.5
    profile = with_overrides(PROFILE, found["bandwidth = 0.5"].overrides)
    assert profile.wires.link_gb_per_s.value == PROFILE.wires.link_gb_per_s.value / 2
    assert profile.wires.link_gb_per_s.kind == "inferred"
    ratio = with_overrides(PROFILE, found["attention / FFN time = 2"].overrides)
    assert ratio.chip.attention_host_us.value == pytest.approx(2 * target_us(one))


def test_the_page_has_the_papers_value_beside_ours() -> None:
    found = [(figure, rows_of(figure, setting())) for figure in RUN]
    text = page(found, setting(), "python -m afore.tools.evaluate", demands={"chat": "made up"})
    assert "| Static | " in text
    assert "11,357" in text
    assert "- `chat`: made up" in text
    assert "| chip.gemm_efficiency | 0.175 | inferred |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    heads = [line for line in rows if set(line) <= set("|-:")]
    assert len(heads) == len(RUN) + 2
    whole = to_json(found, TEMPLATE)
    assert set(whole["figures"]) == {figure.name for figure in RUN}
    json.dumps(whole, allow_nan=False)


def test_findings_are_read_off_the_rows() -> None:
    rows = {figure.name: rows_of(figure, setting()) for figure in RUN}
    texts = findings(rows)
    assert len(texts) == 15
    assert findings({}) == []
    better = [
        replace(row, ours={**row.ours, "over static": 0.5}) for row in rows["fig8"] if row.label.endswith(": afore")
    ]
    [text] = [text for text in findings({"fig8": better}) if text.startswith("Figure 8")]
    assert ": `afore` is +50.0% over static" in text


def test_sweeps_may_run_on_fewer_layers() -> None:
    one = replace(setting(), sweep_layers=3)
    for figure in RUN:
        assert figure.cells is not None
        depths = {cell.layers for cell in figure.cells(one)}
        assert depths == ({3} if figure.name in SWEPT else {TEMPLATE.layers})
        assert rows_of(figure, one)


def test_measured_figures_are_kept(tmp_path: Path) -> None:
    asked = []

    def measure(one: Setting) -> list[Row]:
        asked.append(one)
        return [Row(label="EP 8", ours={"afore": 5.5}, paper={"afore": 14.63})]

    figure = Figure(name="fig9", title="A figure", unit={"afore": "µs"}, measure=measure)
    first = measured_rows(figure, setting(), tmp_path)
    assert measured_rows(figure, setting(), tmp_path) == first
    assert len(asked) == 1
    measured_rows(figure, setting(quick=True), tmp_path)
    assert len(asked) == 2, "a quick look is another measurement"
    (tmp_path / "measured" / "fig9.json").write_text('{"format": 1, "rows": 3}')
    assert measured_rows(figure, setting(), tmp_path) == first
    assert len(asked) == 3


def test_what_cannot_be_measured_says_what_is_missing(tmp_path: Path) -> None:
    def measure(one: Setting) -> list[Row]:
        raise HostError("ortools", "it is not installed", "pip install it")

    figure = Figure(name="table2", title="A table", unit={"optimal": "%"}, measure=measure)
    [row] = measured_rows(figure, setting(), tmp_path)
    assert "ortools" in row.label
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_planner_is_measured_and_held_against_the_optimum() -> None:
    pytest.importorskip("ortools", reason="the optimum needs afore[optimum]")
    latency = FIGURES["fig9"].measure
    quality = FIGURES["table2"].measure
    assert latency is not None
    assert quality is not None
    one = setting(quick=True)
    times = latency(one)
    assert [row.label for row in times] == ["EP 2", "EP 8", "EP 32"]
    assert all(row.ours["afore"] > 0 for row in times)
    for row in quality(one):
        assert 0 <= row.ours["mean gap"] <= row.ours["max gap"]
        assert row.ours["optimal"] == 1.0 or row.ours["max gap"] > 0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.263, "%", "+26.3 %"),
        (-0.01, "%", "-1.0 %"),
        (1.0, "yes", "✓"),
        (0.25, "", "0.25"),
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
    written = draw(figure, rows_of(figure, setting()), tmp_path)
    assert [path.name for path in written] == ["fig3.svg", "fig3.png"]
    before = [path.read_bytes() for path in written]
    assert all(len(content) > 1000 for content in before)
    draw(figure, rows_of(figure, setting()), tmp_path)
    assert [path.read_bytes() for path in written] == before


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
    target = tmp_path / "docs" / "evaluation.md"
    target.parent.mkdir()
    assert main([*arguments, "--json", "--page", str(target)]) == 0
    assert "Approach 3" in target.read_text()
    assert set(json.loads(capsys.readouterr().out)["figures"]) == {"fig4"}
    assert "Approach 3" in (tmp_path / "evaluation.md").read_text()
    assert vary(Cell(policy="static"), seed=3).seed == 3


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--only", "fig99"], "fig99"),
        (["--only", ","], "--only"),
        (["--workloads", "poems"], "poems"),
        (["--profile", "abacus"], "abacus"),
        (["--set", "chip.speed=2"], "chip.speed"),
        (["--layers", "46"], "45"),
        (["--routing", "nowhere.npz"], "nowhere.npz"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--only", "fig4", "--out", str(tmp_path)] if arguments[0] != "--only" else arguments) == 2
    assert names in capsys.readouterr().err
