"""A recording's experts by token, which attention workers write beside it: ``run.trace.npz``, ``run.trace.attention-0.npz``, ….

Such a file is a trace whose targets are the worker's own rows of each target. A microbatch's targets come in the same order there
and in the recording, those of different microbatches do not; so one is looked for ahead, and what was passed over is kept a while.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from afore.core.target import Target
from afore.core.topology import ATTENTION, member_name
from afore.scheduler.traces.format import PARTIAL, ids_dtype
from afore.scheduler.traces.records import TraceError, TraceHeader, TraceTarget

LOOKAHEAD: Final = 4096
"""Rows of one worker that are kept for later targets; one further ahead is not found."""
_SAME: Final = ("experts", "layers", "top_k", "microbatches", "model", "policy")
"""Fields of headers that files of one run share."""


def ids_path(record: str | Path, rank: int) -> Path:
    """Where attention worker ``rank`` writes its tokens' experts, beside the file ``record``."""
    path = Path(record)
    name = path.name.removesuffix(".npz")
    return path.with_name(f"{name}.{member_name(ATTENTION, rank)}.npz")


class Reader(Protocol):
    """``TraceReader``, of one worker's file."""

    header: TraceHeader
    cut_off: bool
    rows: int

    def __iter__(self) -> Iterator[TraceTarget]: ...


class IdsBeside:
    """One pass over a recording: its targets, with the experts that the files beside it have of them.

    ``open_one`` reads a worker's file as far as it is whole. ``say`` is told what is missing.
    Raises ``TraceError`` for what is there and cannot be.
    """

    def __init__(
        self,
        path: Path,
        header: TraceHeader,
        *,
        partial: bool,
        open_one: Callable[[Path], Reader],
        say: Callable[[str], None],
    ) -> None:
        self._path, self._header, self._say = path, header, say
        self._short = False
        """It was said that a target lacks some, although no file is short."""
        self._workers_A = [
            _Worker(path, rank, header, partial=partial, open_one=open_one, say=say) for rank in range(header.ids_files)
        ]

    def joined(self, row: TraceTarget, number: int) -> TraceTarget:
        """The recording's target, row ``number`` there, with its experts if all of its tokens' are found."""
        if row.ids_TK is not None or row.demand_E is None:
            return row
        workers_A, target = self._workers_A, row.target
        parts_A = [worker.found(target) for worker in workers_A]
        tokens = _tokens(parts_A)
        while tokens < row.tokens:
            reading = [a for a, part in enumerate(parts_A) if part is None and workers_A[a].may_come(target)]
            if not reading:
                if not self._short and not any(worker.short for worker in workers_A):
                    files = f"experts of {tokens:,} of its {row.tokens:,} tokens are beside it"
                    self._say(f"{self._path}: row {number}: {files}; it and others like it are without")
                    self._short = True
                return row
            for a in reading:  # in step with one another: who has no rows of this target is not read to its end
                parts_A[a] = workers_A[a].read_on(target)
            tokens = _tokens(parts_A)
        there = [part for part in parts_A if part is not None]
        ids_TK = np.concatenate(there).astype(np.int32) if there else np.zeros((0, self._header.top_k), np.int32)
        if not np.array_equal(np.bincount(ids_TK.reshape(-1), minlength=len(row.demand_E)), row.demand_E):
            files = ", ".join(
                worker.path.name for worker, part in zip(workers_A, parts_A, strict=True) if part is not None
            )
            raise TraceError(
                self._path,
                f"its experts by token, of {files}, are not its counts",
                "put the files of one run beside each other, or remove those of attention workers",
                row=number,
            )
        return dataclasses.replace(row, ids_TK=ids_TK)


class _Worker:
    """One worker's file, and what was read of it and not used yet."""

    def __init__(
        self,
        record: Path,
        rank: int,
        header: TraceHeader,
        *,
        partial: bool,
        open_one: Callable[[Path], Reader],
        say: Callable[[str], None],
    ) -> None:
        self.path = ids_path(record, rank)
        self.short = False
        """It is not there, or cut off, which was said."""
        self._say = say
        self._dtype = ids_dtype(header)
        self._kept_M: dict[int, deque[tuple[Target, NDArray[Any]]]] = {}
        self._last_M: dict[int, tuple[int, int]] = {}
        """(step, layer) that was read last of each microbatch."""
        self._kept = 0
        self._reader: Reader | None = None
        self._rows: Iterator[TraceTarget] = iter(())
        unfinished = self.path.with_name(self.path.name + PARTIAL)
        if not self.path.exists() and partial:
            self.path = unfinished
        if not self.path.exists():
            hint = f"; {unfinished.name} is, which --partial reads" if unfinished.exists() else ""
            self.short = True
            say(
                f"{self.path}: it is not there{hint}; targets with rows of this worker are without their tokens' experts"
            )
            return
        reader = self._reader = open_one(self.path)
        for name in _SAME:
            ours, theirs = getattr(header, name), getattr(reader.header, name)
            if ours != theirs:
                raise TraceError(
                    self.path,
                    f"it is of another run than {record.name}: its {name} is {theirs!r}, not {ours!r}",
                    "remove it",
                )
        self._rows = iter(reader)

    def found(self, target: Target) -> NDArray[Any] | None:
        """The target's rows if they were read; what was kept of earlier targets of its microbatch is forgotten."""
        kept = self._kept_M.get(target.microbatch)
        while kept and _key(kept[0][0]) < _key(target):
            kept.popleft()
            self._kept -= 1
        return kept[0][1] if kept and kept[0][0] == target else None

    def may_come(self, target: Target) -> bool:
        """Whether reading on can still find the target."""
        return (
            self._reader is not None
            and self._kept < LOOKAHEAD
            and self._last_M.get(target.microbatch, (-1, -1)) < _key(target)
        )

    def read_on(self, target: Target) -> NDArray[Any] | None:
        """Reads a row: the target's, or one that is kept for later."""
        assert self._reader is not None
        row = next(self._rows, None)
        if row is None:
            if self._reader.cut_off:
                self.short = True
                self._say(
                    f"{self.path}: it is cut off after {self._reader.rows:,} rows; later targets are without their ids"
                )
            self._reader = None
            return None
        m, key = row.target.microbatch, _key(row.target)
        if row.ids_TK is None or key <= self._last_M.get(m, (-1, -1)):
            why = "without experts by token" if row.ids_TK is None else f"{row.target} after a later one"
            raise TraceError(self.path, why, "it is none that attention workers write", row=self._reader.rows)
        self._last_M[m] = key
        if m != target.microbatch or key >= _key(target):
            self._kept_M.setdefault(m, deque()).append((row.target, row.ids_TK.astype(self._dtype)))
            self._kept += 1
        return self.found(target)


def _key(target: Target) -> tuple[int, int]:
    return target.step, target.layer


def _tokens(parts_A: list[NDArray[Any] | None]) -> int:
    return sum(len(part) for part in parts_A if part is not None)
