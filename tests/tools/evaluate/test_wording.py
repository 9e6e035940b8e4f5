"""What the page says of numbers: an order where there is one, one number where two read alike, shares unsigned, whose times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afore.tools.bench.machine import describe_machine, machine_facts
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.figure import Figure, Row, Setting
from afore.tools.evaluate.figures import FIGURES
from afore.tools.evaluate.findings import findings, spread
from afore.tools.evaluate.measured import measured
from afore.tools.evaluate.report import page, shown
from afore.workers.device.hardware import read_profile

SETTING = Setting(
    template=Cell(policy="static", layers=2), workloads=("chat",), profile=read_profile("a100-glm45air"), quick=True
)


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((0.186, 0.249, 0.285), "in the paper's order"),
        ((0.285, 0.249, 0.186), "in another order than the paper's"),
        ((0.186, 0.285, 0.249), "in another order than the paper's"),
        ((-0.001, -0.001, 0.003), "too close together for an order"),
        ((0.186, 0.189, 0.285), "too close together for an order"),
    ],
)
def test_an_order_is_one_only_beyond_noise(gains: tuple[float, float, float], words: str) -> None:
    rows = [Row(label="Static", ours={"over static": 0.0})]
    rows += [Row(label=f"Approach {number}", ours={"over static": gain}) for number, gain in enumerate(gains, 1)]
    [text] = findings({"fig3": rows})
    assert f", {words} (" in text


def test_a_range_of_one_value_is_one_value() -> None:
    assert spread([0.039, 0.0391]) == "+3.9%"
    assert spread([0.0632], ".1%") == "6.3%"
    assert spread([0.3, -0.01, 0.1]) == "-1.0% to +30.0%"
    rows = [Row(label="chat: w/o Prefetch", ours={"below AFORE": 0.039})]
    rows += [Row(label="chat: AFORE", ours={"below AFORE": 0.0, "copies a target": 0.25})]
    [text] = findings({"fig10": rows})
    assert "w/o Prefetch 3.9% below AFORE" in text
    assert "makes 0.25 copies a target" in text


def test_a_share_is_no_gain() -> None:
    assert shown(1.0, "share") == "100.0 %"
    assert shown(0.0194, "share") == "1.9 %"
    assert set(FIGURES["table2"].unit.values()) == {"share", ""}


def measured_figure(calls: list[Setting]) -> Figure:
    def measure(one: Setting) -> list[Row]:
        calls.append(one)
        return [Row(label="EP 8", ours={"afore": 5.5})]

    return Figure(name="fig9", title="A figure", unit={"afore": "µs"}, measure=measure, note="Median.")


def test_the_page_names_the_machine_that_measured(tmp_path: Path) -> None:
    calls: list[Setting] = []
    figure, rows = measured(measured_figure(calls), SETTING, tmp_path)
    facts = machine_facts()
    assert f"Median. Measured on this machine: {facts['usable_cores']} of {facts['cores']} cores" in figure.note
    assert f"{facts['processor']}, " in figure.note
    assert "load average" in figure.note
    assert figure.note in page([(figure, rows)], SETTING, "python -m afore.tools.evaluate")
    # What an earlier run left is its machine's then, as busy as it was.
    path = tmp_path / "measured" / "fig9-quick.json"
    content = json.loads(path.read_bytes())
    content["machine"] |= {"load_average_1min": 77.25, "usable_cores": 96}
    path.write_text(json.dumps(content))
    kept, _ = measured(measured_figure(calls), SETTING, tmp_path)
    assert len(calls) == 1
    assert describe_machine(content["machine"]) in kept.note
    assert "load average 77.25" in kept.note


def test_what_is_not_measured_has_no_machine(tmp_path: Path) -> None:
    figure = Figure(name="fig9", title="A figure", unit={}, measure=lambda one: [Row(label="not measured", ours={})])
    assert measured(figure, SETTING, tmp_path)[0].note == ""
