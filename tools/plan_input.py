"""What ``explain`` is given: a demand file, a slot table, or a target of a recorded run."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.trace import Span
from afore.scheduler.costs import Costs
from afore.tools.trace_files import open_directory


def read_demand(path: Path) -> NDArray[np.int64]:
    """E counts from JSON (a list, or ``{"demand": [...]}``), ``.npy``, or CSV. Raises ``ConfigError``."""
    value = _read(path)
    if isinstance(value, dict):
        value = value.get("demand")
    return _integers(path, value, 1).reshape(-1)


def read_table(path: Path) -> NDArray[np.int32]:
    """A slot table [N, R] of experts, -1 empty, -2 no such slot; formats as ``read_demand``. Raises ``ConfigError``."""
    value = _read(path)
    if isinstance(value, dict):
        value = value.get("slots")
    return _integers(path, value, 2).astype(np.int32)


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            rows = [row for row in csv.reader(text.splitlines()) if row]
            return [[int(cell) for cell in row] for row in rows]
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}", "give counts as JSON, .npy or .csv") from error


def _integers(path: Path, value: Any, dimensions: int) -> NDArray[np.int64]:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, np.object_)
    if dimensions == 1 and array.ndim == 2 and 1 in array.shape:
        array = array.reshape(-1)
    if array.ndim != dimensions or array.dtype.kind not in "iu" or array.size == 0:
        shape = "E counts" if dimensions == 1 else "N rows of R experts"
        raise ConfigError(str(path), f"holds {array.dtype} of shape {array.shape}", f"give {shape}, as integers")
    return array.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A planned target of a trace."""

    sequence: int
    name: str
    policy: str
    demand_E: NDArray[np.int64]
    costs: Costs
    shares: list[tuple[int, int, int, int]]
    """As published: (expert, worker, slot, count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The targets of one layer, in order, up to the one that was asked for."""

    targets: list[Recorded]
    num_workers: int
    num_microbatches: int


def read_trace(directory: Path, sequence: int) -> Recording:
    """The target of ``sequence`` and those of its layer before it. Raises ``ConfigError``."""
    planned: dict[int, Span] = {}
    entries: dict[int, Span] = {}
    files, _problems = open_directory(directory)
    for file in files:
        for _, span in file.records():
            if span.kind == "instant" and span.name in ("planned", "entry"):
                (planned if span.name == "planned" else entries)[span.args["sequence"]] = span
    if sequence not in planned or planned[sequence].target is None:
        known = f"{min(planned)} to {max(planned)}" if planned else "none"
        raise ConfigError(
            "sequence", f"{sequence} is no planned target of {directory}", f"planned sequences there: {known}"
        )
    asked = planned[sequence].target
    assert asked is not None
    targets, microbatches = [], 0
    for number in sorted(planned):
        span = planned[number]
        target = span.target
        if target is None or number > sequence:
            continue
        microbatches = max(microbatches, target.microbatch + 1)
        if target.layer != asked.layer or span.args["costs"] is None:
            continue
        tile_us, copy_us, window_us = span.args["costs"]
        shares = entries[number].args["shares"] if number in entries else []
        targets.append(
            Recorded(
                sequence=number,
                name=f"layer {target.layer}, microbatch {target.microbatch}, step {target.step}",
                policy=span.args["policy"],
                demand_E=np.array(span.args["demand"], np.int64),
                costs=Costs(tile_us=tile_us, copy_us=copy_us, window_us=window_us),
                shares=[(e, w, r, count) for e, w, r, count, *_ in shares],
            )
        )
    if not targets or targets[-1].sequence != sequence:
        raise ConfigError(
            "sequence", f"{sequence} was not planned by demand", "choose a target that was, of --policy afore"
        )
    return Recording(targets=targets, num_workers=planned[sequence].args["workers"], num_microbatches=microbatches)
