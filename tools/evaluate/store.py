"""Cells' results on disk: one file each, whole or not there, so that an evaluation goes on where it was stopped."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from afore.core.errors import HostError
from afore.tools.bench.files import write_whole
from afore.tools.evaluate.cell import FORMAT, Cell, run_cell

Progress = Callable[[Cell, int, int], None]
"""Called before a cell is run: (cell, cells that are there, cells in all)."""


def to_bytes(value: Any) -> bytes:
    """JSON as it stands in every file here: sorted, so that equal results are equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def results_of(cells: Sequence[Cell], directory: Path, progress: Progress) -> dict[Cell, Mapping[str, Any]]:
    """Every cell's result, run where it is not there yet. Raises ``HostError`` for a directory that cannot be written."""
    folder = directory / "cells"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(str(folder), f"cannot be made: {error.strerror}", "give another --out") from error
    wanted = list(dict.fromkeys(cells))
    found = {cell: result for cell in wanted if (result := _read(folder, cell)) is not None}
    for cell in wanted:
        if cell not in found:
            progress(cell, len(found), len(wanted))
            result = run_cell(cell)
            write_whole(str(folder / f"{cell.key()}.json"), to_bytes(result))
            # As it will be read: tuples are lists, keys are texts.
            found[cell] = json.loads(to_bytes(result))
    return found


def _read(folder: Path, cell: Cell) -> Mapping[str, Any] | None:
    """A result of an earlier run; none where there is none, or one that this version would not write."""
    try:
        result = json.loads((folder / f"{cell.key()}.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        return None
    # A file under another cell's name, or one that somebody has changed, is not what this cell would write.
    if result.get("cell") != json.loads(to_bytes(dataclasses.asdict(cell))):
        return None
    numbers = [value for value in result.values() if isinstance(value, float)]
    return result if all(map(math.isfinite, numbers)) else None
