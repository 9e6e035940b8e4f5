"""Cells' results on disk: one file each, whole or not there, so that an evaluation goes on where it was stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from afore.core.errors import AforeError, HostError
from afore.tools.bench.files import check_place, read_kept, write_whole
from afore.tools.evaluate.cell import FORMAT, Cell, demand_key, run_cell
from afore.tools.evaluate.demand import demand_of
from afore.tools.evaluate.out import CELLS, DEMAND
from afore.tools.evaluate.pool import Pool
from afore.tools.evaluate.profiles import Profiles, profiles_of
from afore.workers.device.hardware import HardwareProfile

Progress = Callable[[Cell, int, int], None]
"""Called when a cell begins: (cell, cells that are done or began before it, cells in all)."""
Finished = Callable[[Cell], None]
"""Called when a cell has been run."""


class CellFailedError(AforeError):
    """What ended a cell, and which."""

    def __init__(self, cell: Cell, error: AforeError) -> None:
        super().__init__(f"{cell.policy}, {cell.workload}: {error}")


def to_bytes(value: Any) -> bytes:
    """JSON as it stands in every file here: sorted, so that equal results are equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def results_of(
    cells: Sequence[Cell],
    directory: Path,
    progress: Progress,
    *,
    profile: Profiles = None,
    jobs: int = 1,
    to_run: Callable[[Sequence[Cell]], None] = lambda cells: None,
    finished: Finished = lambda cell: None,
) -> dict[Cell, Mapping[str, Any]]:
    """Every cell's result, run where it is not there yet, ``jobs`` at a time. How many makes no difference to results.

    ``profile``: what cells' profile names stand for (``profiles_of``). ``to_run`` hears of the cells that are not there.
    Demand is stored beside the cells. Raises ``HostError`` for a directory that cannot be written, ``CellFailedError``.
    """
    folder, demands = directory / CELLS, directory / DEMAND
    for one in (folder, demands):
        try:
            one.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(str(one), f"cannot be made: {error.strerror}", "give another --out") from error
    wanted = list(dict.fromkeys(cells))
    profiles = profiles_of((cell.profile for cell in wanted), profile)
    found = {cell: result for cell in wanted if (result := _read(folder, cell, profiles[cell.profile])) is not None}
    missing = [cell for cell in wanted if cell not in found]
    began = len(found)
    to_run(missing)

    def begin() -> Iterator[Cell]:
        nonlocal began
        for cell in missing:
            progress(cell, began, len(wanted))
            began += 1
            # Before the cell runs, and by one process: cells share demands.
            demand_of(demand_key(cell, profiles[cell.profile]), demands)
            yield cell

    for cell, result in _run(begin(), profiles, demands, min(jobs, len(missing))):
        write_whole(str(folder / f"{cell.key(profiles[cell.profile])}.json"), to_bytes(result))
        # As it will be read: tuples are lists, keys are texts.
        found[cell] = json.loads(to_bytes(result))
        finished(cell)
    return {cell: found[cell] for cell in wanted}


def _run(
    cells: Iterator[Cell], profiles: Mapping[str, HardwareProfile], demands: Path, jobs: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if jobs <= 1:
        for cell in cells:
            with _of(cell):
                result = one_cell(cell, profiles[cell.profile], demands)
            yield cell, result
        return
    pool = Pool(jobs)
    running: dict[Future[dict[str, Any]], Cell] = {}
    try:
        for cell in cells:
            running[pool.submit(one_cell, cell, profiles[cell.profile], demands)] = cell
            if len(running) >= jobs:
                yield from _done(running)
        while running:
            yield from _done(running)
    except BaseException:
        pool.kill()
        raise
    pool.close()


def _done(running: dict[Future[dict[str, Any]], Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in list(running):
        if future in done:
            cell = running.pop(future)
            with _of(cell):
                result = future.result()
            yield cell, result


@contextmanager
def _of(cell: Cell) -> Iterator[None]:
    """Says which cell an error ended."""
    try:
        yield
    except HostError:
        raise  # the machine's fault, whichever the cell
    except BrokenProcessPool as error:
        raise HostError(
            "a process that runs cells",
            "it was ended from outside, as where memory lacks",
            "give fewer --jobs; what is done is kept, and the same command goes on",
        ) from error
    except AforeError as error:
        raise CellFailedError(cell, error) from error


def one_cell(cell: Cell, profile: HardwareProfile, demands: Path) -> dict[str, Any]:
    """A cell on its stored demand: what a worker process runs."""
    return run_cell(cell, profile, demand_of(demand_key(cell, profile), demands))


def _read(folder: Path, cell: Cell, profile: HardwareProfile | None) -> Mapping[str, Any] | None:
    """A result of an earlier run; none where there is none, or one that this version would not write.

    Raises ``HostError`` for what is in the way of one.
    """
    path = folder / f"{cell.key(profile)}.json"
    check_place(path)
    try:
        result = json.loads(read_kept(path))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        return None
    # A file under another cell's name, or one that somebody has changed, is not what this cell would write.
    if result.get("cell") != json.loads(to_bytes(asdict(cell))) or result.get("content") != cell.content(profile):
        return None
    return result if _finite(result) and _complete(result) else None


_DRAWN = ("d_us", "w_us", "left_us", "raw_us", "exposed_us")
_NEEDED = (
    "tokens_per_s",
    "itl_p50_ms",
    "itl_p95_ms",
    "layers",
    "targets",
    *(f"imbalance.tile.{name}" for name in ("before", "after", "bound")),
    *(f"imbalance.token.{name}" for name in ("before", "after")),
    *(f"copies.{name}" for name in ("copies", "ahead", "targets")),
    *(f"copies.exposed_{name}" for name in ("targets", "in_first_layer", "to_earlier")),
    *(f"copies.{name}.mean" for name in _DRAWN),
)
"""Numbers that figures read."""


def _finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _complete(result: dict[str, Any]) -> bool:
    """Whether what figures read is there: a file can be changed or cut by hand, and still be JSON."""
    try:
        for name in _NEEDED:
            value: Any = result
            for part in name.split("."):
                value = value[part]
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
        texts = (result["demand"]["digest"], result["demand"]["source"])
        lists = (
            result["layers_imbalance"],
            *(result["copies"][name]["points"] for name in _DRAWN),
        )
    except (KeyError, TypeError):
        return False
    kinds = all(isinstance(text, str) for text in texts) and all(isinstance(one, list) for one in lists)
    return kinds and isinstance(result.get("counters"), dict) and result["tokens_per_s"] > 0
