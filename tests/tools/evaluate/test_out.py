"""The directory of an evaluation: one command at a time, what was left is swept, and what is in the way is said before any run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afore.core.errors import AforeError, ConfigError, HostError
from afore.core.target import Target
from afore.scheduler.traces import TraceHeader, TraceTarget, TraceWriter
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.command import main
from afore.tools.evaluate.demand import DemandKey, demand_of
from afore.tools.evaluate.figure import Figure, Row, Setting
from afore.tools.evaluate.measured import measured_rows
from afore.tools.evaluate.mechanisms import main as mechanisms
from afore.tools.evaluate.out import out_directory
from afore.tools.evaluate.store import results_of, to_bytes
from afore.workers.device.hardware import read_profile

TINY = Cell(policy="static", attention=1, ffn=2, prefill=1, slots=1, layers=1, rows=4, warm=1, steps=1)
KEY = DemandKey(workload="chat", layers=2, experts=16, top_k=2, microbatches=2, tokens=32, steps=2)
"""A small table: X = 4."""


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def nowhere(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


IN_THE_WAY = pytest.mark.parametrize("put", [pipe, folder, nowhere, endless])


def refused_at_once(*_: Any) -> None:
    raise AssertionError("a cell began")


@IN_THE_WAY
def test_what_is_in_a_results_way_is_said_before_any_cell_runs(put: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    put(tmp_path / "cells" / f"{TINY.key()}.json")
    with pytest.raises(HostError, match=r"cells/.*remove it"):
        results_of([TINY], tmp_path, refused_at_once, profile=read_profile(TINY.profile))


@IN_THE_WAY
@pytest.mark.parametrize("name", ["evaluation.json", "evaluation.md", "fig3.svg", "cpu.yaml"])
def test_what_is_in_the_way_of_the_page_is_said_before_any_cell_runs(
    put: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    put(tmp_path / name)
    with pytest.raises(HostError, match="remove it"):
        main(["--quick", "--only", "fig3", "--profile", "cpu", "--out", str(tmp_path)])
    assert not (tmp_path / "cells").exists()


def test_two_at_a_time_are_refused_whatever_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    with out_directory(tmp_path):
        assert main(["--quick", *out]) == 2
        assert main(["plan", "--gpus", "8", *out]) == 2
        assert main(["reality", *out]) == 2
        assert mechanisms(out) == 2
    assert capsys.readouterr().err.count("another evaluation is writing into") == 4
    assert list(tmp_path.iterdir()) == []
    with out_directory(tmp_path):
        pass


def test_what_a_killed_evaluation_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    for name in ("cells", "demand", "measured"):
        (tmp_path / name).mkdir()
    left = [
        "evaluation.md.12345678.partial",
        "cells/a.json.abcdefg_.partial",
        "measured/fig9.json.abcdefg0.partial",
        "demand/chat-1.trace.npz.partial",
    ]
    kept = ["mine.partial", "cells/a.json", "demand/chat-1.trace.npz"]
    for name in left + kept:
        (tmp_path / name).touch()
    with out_directory(tmp_path):
        assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
            Path(name).name for name in kept
        )


# Demand


def table(
    path: Path,
    *,
    experts: int = 16,
    layers: int = 2,
    top_k: int = 2,
    microbatches: int = 2,
    without: int | None = None,
    rows: int = 8,
    each: int = 4,
) -> None:
    """A stored table of a shape of its own: ``rows`` targets, one of them left out."""
    header = TraceHeader(experts=experts, layers=layers, top_k=top_k, microbatches=microbatches, source="elsewhere")
    with TraceWriter(path, header) as out:
        for number in range(rows):
            if number != without:
                row, layer = divmod(number, layers)
                step, microbatch = divmod(row, microbatches)
                out.add(
                    TraceTarget(
                        target=Target(layer, microbatch, step), demand_E=np.full(experts, each, np.int32), tokens=32
                    )
                )


def test_a_stored_table_is_read_where_it_is_the_right_one(tmp_path: Path) -> None:
    table(tmp_path / KEY.file_name())
    assert demand_of(KEY, tmp_path).source == "elsewhere"


@pytest.mark.parametrize(
    "other",
    [
        {"experts": 8},
        {"experts": 32},
        {"top_k": 4},
        {"microbatches": 3},
        {"layers": 3},
        {"without": 0},
        {"without": 3},
        {"rows": 0},
        {"each": 0},
    ],
)
def test_a_table_of_another_shape_under_its_name_is_refused(other: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / KEY.file_name()
    table(path, **other)
    with pytest.raises(ConfigError, match="remove it: it is made anew") as refused:
        demand_of(KEY, tmp_path)
    assert str(path) in str(refused.value)


def savez(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, counts=np.ones(4))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("{}"),
        lambda path: path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2]),
        lambda path: path.write_bytes(path.read_bytes()[:700]),
        savez,
        pipe,
        folder,
    ],
    ids=["empty", "JSON", "half", "cut", "numpy's", "pipe", "folder"],
)
def test_a_damaged_table_is_refused_in_one_sentence(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    demand_of(KEY, tmp_path)
    path = tmp_path / KEY.file_name()
    if spoil in (pipe, folder):
        path.unlink()
    spoil(path)
    with pytest.raises(AforeError) as refused:
        demand_of(KEY, tmp_path)
    assert str(refused.value).count(str(path)) == 1
    assert "4,294,967,295" not in str(refused.value)


# Measured figures


FIGURE = Figure(name="fig9", title="", unit={"afore": "µs"}, measure=lambda _: [Row(label="now", ours={"afore": 2.0})])
SETTING = Setting(template=TINY, workloads=("chat",), profile=read_profile(TINY.profile))


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    first = measured_rows(FIGURE, SETTING, tmp_path)
    path = tmp_path / "measured" / "fig9.json"
    path.write_text(path.read_text().replace('"now"', '"before"'))
    assert [row.label for row in (*first, *measured_rows(FIGURE, SETTING, tmp_path))] == ["now", "before"]


@pytest.mark.parametrize(
    "change",
    [
        {"machine": {"processor": "another"}},
        {"machine": None},
        {"rows": []},
        {"rows": [{"label": "a\nb", "ours": {"afore": 1.0}, "paper": {}}]},
        {"rows": [{"label": "a", "ours": {"afore": float("nan")}, "paper": {}}]},
        {"rows": [{"label": "a", "ours": {"foreign": 1.0}, "paper": {}}]},
        {"rows": [{"label": "a", "ours": {}, "paper": {"afore": "x"}}]},
        {"format": 99},
    ],
)
def test_what_was_measured_elsewhere_or_changed_is_measured_again(change: dict[str, Any], tmp_path: Path) -> None:
    measured_rows(FIGURE, SETTING, tmp_path)
    path = tmp_path / "measured" / "fig9.json"
    path.write_bytes(to_bytes({**json.loads(path.read_text()), **change}))
    assert [row.label for row in measured_rows(FIGURE, SETTING, tmp_path)] == ["now"]


@IN_THE_WAY
def test_what_is_in_the_way_of_a_measurement_is_said_before_it(put: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    put(tmp_path / "measured" / "fig9.json")
    with pytest.raises(HostError, match="remove it"):
        measured_rows(FIGURE, SETTING, tmp_path)
