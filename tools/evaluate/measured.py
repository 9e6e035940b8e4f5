"""Figures that are measured here, kept as files: an evaluation that goes on does not measure again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from afore.core.errors import HostError
from afore.tools.bench.files import check_place, read_kept, write_whole
from afore.tools.bench.machine import describe_machine, machine_facts
from afore.tools.evaluate.figure import Figure, Row, Setting
from afore.tools.evaluate.out import MEASURED
from afore.tools.printable import printable

FORMAT = 1


def measured_rows(figure: Figure, setting: Setting, directory: Path) -> Sequence[Row]:
    """The figure's rows, from ``directory``/measured where an earlier run of the same size on such a machine left them. None where
    a part that it needs is not installed; its note says so on the page. Raises ``HostError`` where they cannot be kept."""
    assert figure.measure is not None
    path = _path(figure, setting, directory)
    check_place(path)
    kept = _read(path, figure)
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


def _read(path: Path, figure: Figure) -> list[Row] | None:
    try:
        content: Any = json.loads(read_kept(path))
        # What another kind of machine measured is not what the page would call it.
        if content["format"] != FORMAT or content["machine"]["processor"] != machine_facts()["processor"]:
            return None
        rows = [
            Row(label=_line(row["label"]), ours=_floats(row["ours"], figure), paper=_floats(row["paper"], figure))
            for row in content["rows"]
        ]
        return rows or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _line(text: Any) -> str:
    if not isinstance(text, str) or not text.isprintable():
        raise ValueError(text)
    return text


def _floats(values: Any, figure: Figure) -> dict[str, float]:
    """The figure's own columns, finite. Raises ``ValueError`` for any other."""
    found = {str(name): float(value) for name, value in values.items()}
    if not found.keys() <= figure.unit.keys() or not all(map(math.isfinite, found.values())):
        raise ValueError(found)
    return found


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
    return directory / MEASURED / f"{figure.name}{'-quick' if setting.quick else ''}.json"
