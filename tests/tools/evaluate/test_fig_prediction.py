"""How often the next layer's gate is right: it reaches the model, decides what is predicted, and no other policy."""

from __future__ import annotations

import math

import pytest

from afore.core.errors import ConfigError
from afore.tools.evaluate.cell import Cell, run_cell
from afore.tools.evaluate.command import check
from afore.tools.evaluate.fig_prediction import PREDICTION
from afore.tools.evaluate.figure import Setting, vary
from afore.workers.device.hardware import read_profile

PROFILE = read_profile("a100-glm45air")
SMALL = Cell(policy="libra", attention=2, ffn=4, prefill=1, slots=4, rows=60, layers=4, warm=2, steps=2)


@pytest.mark.parametrize("accuracy", [-0.1, 1.1, math.nan, math.inf])
def test_what_is_no_part_is_refused(accuracy: float) -> None:
    with pytest.raises(ConfigError, match="next_gate_accuracy"):
        check(vary(SMALL, next_gate_accuracy=accuracy), PROFILE)


def test_rows_are_held_against_policies_that_predict_nothing() -> None:
    setting = Setting(template=SMALL, workloads=("chat",), profile=PROFILE)
    assert PREDICTION.cells is not None
    assert PREDICTION.rows is not None
    cells = PREDICTION.cells(setting)
    assert len(cells) == 10
    speed = {"static": 100.0, "afore": 120.0, "libra": 110.0, "afore-ahead": 126.0}
    results = {
        cell: {
            "tokens_per_s": speed[cell.policy],
            "targets": 10,
            "imbalance": {"tile": {"after": 2 - cell.next_gate_accuracy}},
            "copies": {
                "targets": 5,
                "copies": 7,
                "exposed_targets": 0,
                "exposed_in_first_layer": 0,
                "ahead": 2,
                "exposed_to_earlier": 0,
                "exposed_us": {"mean": 0.0},
            },
        }
        for cell in cells
    }
    rows = {row.label: row.ours for row in PREDICTION.rows(setting, results)}
    assert rows["libra, 50% right"]["tile imbalance"] == 1.5
    assert rows["libra, 50% right"]["over static"] == pytest.approx(0.1)
    assert rows["afore-ahead, 100% right"]["over afore"] == pytest.approx(0.05)


@pytest.mark.slow
def test_what_was_foreseen_is_what_is_evened_out() -> None:
    """``libra`` has replicas of nothing else; a policy that asks no gate is served alike, whatever gates would say."""
    skewed = vary(SMALL, attention=4, ffn=8, rows=120, layers=2, warm=1, steps=1)
    wrong, right = (run_cell(vary(skewed, next_gate_accuracy=accuracy)) for accuracy in (0.0, 1.0))
    assert wrong["demand"] == right["demand"]
    assert right["imbalance"]["tile"]["after"] < wrong["imbalance"]["tile"]["after"] - 0.05
    afore = [run_cell(vary(SMALL, policy="afore", next_gate_accuracy=accuracy)) for accuracy in (0.0, 1.0)]
    assert afore[0]["tokens_per_s"] == afore[1]["tokens_per_s"]
