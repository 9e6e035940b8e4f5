"""Figures that are measured here, kept as files: an evaluation that goes on does not measure again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from afore.core.errors import HostError
from afore.tools.bench.files import write_whole
from afore.tools.bench.machine import describe_machine, machine_facts
from afore.tools.evaluate.figure import Figure, Row, Setting
from afore.tools.printable import printable

FORMAT = 1


def measured_rows(figure: Figure, setting: Setting, directory: Path) -> Sequence[Row]:
    """The figure's rows, from ``directory``/measured where an earlier run of the same size left them. None where a part that it
    needs is not installed; its note says so on the page."""
    assert figure.measure is not None
    path = _path(figure, setting, directory)
    kept = _read(path)
    if kept is not None:
        return kept
    try:
        rows = figure.measure(setting)
    except HostError as error:
        return [Row(label=f"not measured: {error}", ours={})]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(str(path.parent), f"cannot be made: {error.strerror}", "give another --out") from error
    content = {"format": FORMAT, "machine": machine_facts(), "rows": [asdict(row) for row in rows]}
    write_whole(str(path), (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return rows


def _read(path: Path) -> list[Row] | None:
    try:
        content: Any = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            return None
        return [
            Row(label=str(row["label"]), ours=_floats(row["ours"]), paper=_floats(row["paper"]))
            for row in content["rows"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _floats(values: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def measured(figure: Figure, setting: Setting, directory: Path) -> tuple[Figure, Sequence[Row]]:
    """``measured_rows``, and the figure with a note that says which machine they are of, and how busy it was: that of an earlier
    run, where that one left them."""
    rows = measured_rows(figure, setting, directory)
    if not any(row.ours for row in rows):
        return figure, rows
    note = f"{figure.note} Measured on this {_machine(_path(figure, setting, directory))}.".lstrip()
    return replace(figure, note=note), rows


def _machine(path: Path) -> str:
    """In words, as the file has it."""
    try:
        return printable(describe_machine(json.loads(path.read_bytes())["machine"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "machine: its file does not say"


def _path(figure: Figure, setting: Setting, directory: Path) -> Path:
    return directory / "measured" / f"{figure.name}{'-quick' if setting.quick else ''}.json"
