"""What ``explain`` is given: a demand file, a slot table, or a target of a recorded run."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.trace import Span
from afore.scheduler.costs import Costs
from afore.tools.trace_files import open_directory

MOST_BYTES = 1 << 26
"""Of a file of counts: one that never ends is refused instead of filling the memory."""


def read_demand(path: Path) -> NDArray[np.int64]:
    """E counts from JSON (a list, or ``{"demand": [...]}``), ``.npy``, or CSV. Raises ``ConfigError``."""
    value = _read(path)
    if isinstance(value, dict):
        value = value.get("demand")
    return _integers(path, value, 1, np.iinfo(np.int64)).reshape(-1)


def read_table(path: Path) -> NDArray[np.int32]:
    """A slot table [N, R] of experts, -1 empty, -2 no such slot; formats as ``read_demand``. Raises ``ConfigError``."""
    value = _read(path)
    if isinstance(value, dict):
        value = value.get("slots")
    return _integers(path, value, 2, np.iinfo(np.int32)).astype(np.int32)


def _read(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        if path.suffix == ".npy":
            return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        text = data.decode()
        if path.suffix == ".csv":
            rows = [row for row in csv.reader(text.splitlines()) if row]
            return [[int(cell) for cell in row] for row in rows]
        return json.loads(text)
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    except RecursionError as error:
        raise _unreadable(path, "its lists are nested too deep") from error
    except (ValueError, csv.Error, MemoryError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(str(path), f"cannot be read: {why}", "give counts as JSON, .npy or .csv")


def _integers(path: Path, value: Any, dimensions: int, limits: np.iinfo[Any]) -> NDArray[np.int64]:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, np.object_)
    if dimensions == 1 and array.ndim == 2 and 1 in array.shape:
        array = array.reshape(-1)
    if array.ndim != dimensions or array.dtype.kind not in "iu" or array.size == 0:
        shape = "E counts" if dimensions == 1 else "N rows of R experts"
        raise ConfigError(str(path), f"holds {array.dtype} of shape {array.shape}", f"give {shape}, as integers")
    for number in (int(array.min()), int(array.max())):
        if not limits.min <= number <= limits.max:
            raise ConfigError(str(path), f"holds {number}", f"give whole numbers of {limits.bits} bits")
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
    problems: list[str]
    """What the span files lack, in words."""


def read_trace(directory: Path, sequence: int) -> Recording:
    """The target of ``sequence`` and those of its layer before it. Raises ``ConfigError``."""
    planned: dict[int, Span] = {}
    entries: dict[int, Span] = {}
    files, problems = open_directory(directory)
    for file in files:
        for _, span in file.records():
            number = span.args.get("sequence")
            if span.kind == "instant" and span.name in ("planned", "entry") and isinstance(number, int):
                (planned if span.name == "planned" else entries)[number] = span
        problems += file.problems()
    if sequence not in planned or planned[sequence].target is None:
        known = f"{min(planned)} to {max(planned)}" if planned else "none"
        raise ConfigError(
            "sequence", f"{sequence} is no planned target of {directory}", f"planned sequences there: {known}"
        )
    asked = planned[sequence].target
    assert asked is not None
    targets: list[Recorded] = []
    microbatches = 0
    for number in sorted(planned):
        target = planned[number].target
        if target is None or number > sequence:
            continue
        microbatches = max(microbatches, target.microbatch + 1)
        if target.layer != asked.layer:
            continue
        recorded = _recorded(directory, number, target, planned[number], entries.get(number))
        if recorded is None:
            continue
        if targets and recorded.demand_E.size != targets[0].demand_E.size:
            raise _damaged(directory, number, f"{recorded.demand_E.size} experts, {targets[0].demand_E.size} before")
        targets.append(recorded)
    if not targets or targets[-1].sequence != sequence:
        raise ConfigError(
            "sequence", f"{sequence} was not planned by demand", "choose a target that was, of --policy afore"
        )
    workers = planned[sequence].args.get("workers")
    if not isinstance(workers, int):
        raise _damaged(directory, sequence, f"{workers!r} workers")
    return Recording(targets=targets, num_workers=workers, num_microbatches=microbatches, problems=problems)


def _recorded(directory: Path, number: int, target: Target, span: Span, entry: Span | None) -> Recorded | None:
    """A planned target from its records; None: it was not planned by demand."""
    try:
        if span.args["costs"] is None:
            return None
        tile_us, copy_us, window_us = span.args["costs"]
        demand_E = np.asarray(span.args["demand"])
        if demand_E.ndim != 1 or demand_E.size == 0 or demand_E.dtype.kind != "i" or demand_E.min() < 0:
            raise ValueError("its demand is no vector of counts")
        return Recorded(
            sequence=number,
            name=f"layer {target.layer}, microbatch {target.microbatch}, step {target.step}",
            policy=str(span.args["policy"]),
            demand_E=demand_E.astype(np.int64),
            costs=Costs(tile_us=tile_us, copy_us=copy_us, window_us=window_us),
            shares=[(e, w, r, count) for e, w, r, count, *_ in ([] if entry is None else entry.args["shares"])],
        )
    except KeyError as error:
        raise _damaged(directory, number, f"it lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise _damaged(directory, number, str(error)) from error


def _damaged(directory: Path, number: int, why: str) -> ConfigError:
    return ConfigError(str(directory), f"the record of sequence {number} is damaged: {why}", "record the run again")
