"""A line for each cell, with an estimate of the time that is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import IO

from afore.tools.evaluate.cell import Cell, demand_key
from afore.tools.evaluate.profiles import Profiles, profiles_of
from afore.workers.device.hardware import HardwareProfile


def weight(cell: Cell, profile: HardwareProfile) -> float:
    """What a cell costs, in no unit: its targets, by the workers that each passes."""
    layers = demand_key(cell, profile).layers
    steps = cell.steps * 4 if cell.arrivals else cell.warm + cell.steps
    return layers * cell.microbatches * steps * (4 + cell.attention + cell.ffn)


class ProgressLine:
    """Prints where an evaluation stands. Times are the wall's, and nothing but this line depends on them."""

    def __init__(self, stream: IO[str], profiles: Profiles) -> None:
        self._stream = stream
        self._profiles = profiles
        self._began_s = time.monotonic()
        self._left = self._done = 0.0

    def to_run(self, cells: Sequence[Cell]) -> None:
        """What will be run."""
        self._began_s = time.monotonic()
        self._left, self._done = sum(map(self._weight, cells)), 0.0

    def began(self, cell: Cell, done: int, total: int) -> None:
        """A cell begins."""
        bar = "#" * round(20 * done / total)
        spent_s = time.monotonic() - self._began_s
        left = f", {_minutes(spent_s / self._done * self._left)} left" if self._done else ""
        what = f"{cell.policy}, {cell.workload}"
        print(f"[{bar:<20}] {done}/{total}  {_minutes(spent_s)}{left}  {what}", file=self._stream, flush=True)

    def finished(self, cell: Cell) -> None:
        """A cell has been run."""
        this = self._weight(cell)
        self._done += this
        self._left -= this

    def _weight(self, cell: Cell) -> float:
        return weight(cell, profiles_of([cell.profile], self._profiles)[cell.profile])

    def measuring(self, name: str) -> None:
        """Something is measured."""
        print(f"{name}: measured on this machine, or read from an earlier run", file=self._stream, flush=True)


def _minutes(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.1f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
