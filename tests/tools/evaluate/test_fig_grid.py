"""The grid on which no mechanism may lose: every seed's cells are held against ``afore`` on the same demand."""

from __future__ import annotations

import pytest

from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.fig_compare import BEYOND, COMPARE_FIGURES
from afore.tools.evaluate.figure import Setting
from afore.tools.evaluate.findings import findings
from afore.workers.device.hardware import read_profile

[GRID] = [figure for figure in COMPARE_FIGURES if figure.name == "grid"]
SETTING = Setting(
    template=Cell(policy="static", seed=7), workloads=("chat", "web"), profile=read_profile("a100-glm45air")
)


def speed(cell: Cell) -> float:
    """One cell loses 0.513 %, and all of its seed differ from others'."""
    lost = (cell.policy, cell.workload, cell.microbatches, cell.slots, cell.seed) == ("afore-plus", "web", 4, 2, 9)
    return (1000.0 + 100 * cell.seed) * (1.0 if cell.policy == "afore" else 0.99487 if lost else 1.01)


def test_each_cell_of_three_seeds_counts_and_the_least_says_where_it_is() -> None:
    assert GRID.cells is not None
    assert GRID.rows is not None
    cells = GRID.cells(SETTING)
    assert {cell.seed for cell in cells} == {7, 8, 9}
    assert len(set(cells)) == (1 + len(BEYOND)) * 2 * 12 * 3
    rows = GRID.rows(SETTING, {cell: {"tokens_per_s": speed(cell)} for cell in cells})
    found = {row.label: row.ours for row in rows}
    least = found["web: afore-plus"]
    assert least["least"] == pytest.approx(-0.00513)
    assert (least["least at M"], least["least at R"], least["least at seed"]) == (4, 2, 9)
    assert (least["losing more than 0.5 %"], least["of"]) == (1, 36)
    assert found["chat: afore-plus"]["losing more than 0.5 %"] == 0
    [said] = findings({"grid": rows})
    assert f"1 of {36 * len(rows)} cells" in said
    assert "-0.51% (web: afore-plus, M = 4, R = 2, seed 9)" in said


def test_a_quick_look_takes_one_seed() -> None:
    assert GRID.cells is not None
    quick = Setting(template=SETTING.template, workloads=("chat",), profile=SETTING.profile, quick=True)
    assert {cell.seed for cell in GRID.cells(quick)} == {7}
