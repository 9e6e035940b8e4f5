"""What is replayed: a trace in the internal form, or a workload made of routing as it was published."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from afore.core.errors import ConfigError
from afore.scheduler.traces import Shape, TraceHeader, TraceReader, TraceTarget, read_corpus, workload_of
from afore.scheduler.traces.corpus import is_corpus

MOST_KEPT = 64 << 20
"""Bytes of targets that stay in memory between two policies; longer traces are read, or made, anew for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Targets that can be asked for again and again."""

    name: str
    header: TraceHeader
    warmup: int
    """Targets before the measured ones: policies see them, figures do not."""
    measured: int
    """So many more are there, or wanted."""
    make: object
    """What makes them: a reader or a workload."""
    kept: list[TraceTarget]
    """All of them, where they are few."""

    @property
    def targets(self) -> int:
        """All of them together."""
        return self.warmup + self.measured

    @property
    def steps(self) -> int:
        """Steps of a microbatch, all microbatches together."""
        return -(-self.targets // self.header.layers)

    def rows(self) -> Iterator[TraceTarget]:
        """The targets, in order."""
        return iter(self.kept) if self.kept else itertools.islice(_rows(self.make), self.targets)


def _rows(make: object) -> Iterator[TraceTarget]:
    if isinstance(make, TraceReader):
        return iter(make)
    return make.targets()  # type: ignore[attr-defined,no-any-return]  # a Workload


def open_source(name: str, shape: Shape, *, targets: int | None, warmup: int, partial: bool) -> Source:
    """A trace, or routing files with commas between them, which are mixed.

    ``targets``: measured ones; none: all of a trace (of a workload without end: 200). Raises ``ConfigError``.
    """
    paths = [Path(part) for part in name.split(",")]
    make: object
    if all(is_corpus(path) for path in paths):
        workload = workload_of(read_corpus(paths), shape)
        header, make = workload.header, workload
        measured = 200 if targets is None else targets
    elif len(paths) > 1:
        odd = next(path for path in paths if not is_corpus(path))
        raise ConfigError(
            str(odd), "it has no routing that could be mixed", "give one trace, or .npz files of ids or counts"
        )
    else:
        reader = TraceReader(paths[0], partial=partial)
        header, make = reader.header, reader
        if targets is None:
            there = sum(1 for _ in reader)
            warmup = min(warmup, there // 2)
            measured = there - warmup
        else:
            measured = targets
    # A target that is kept: its counts, its tokens' experts, and what Python needs around them.
    size = 4 * header.experts + 4 * header.top_k * shape.tokens + 2000
    kept: list[TraceTarget] = []
    if (warmup + measured) * size <= MOST_KEPT:
        kept = list(itertools.islice(_rows(make), warmup + measured))
        if len(kept) <= warmup:
            warmup = 0
        measured = len(kept) - warmup
    if measured < 1:
        raise ConfigError(name, "it has no targets", "give another trace")
    return Source(name=name, header=header, warmup=warmup, measured=measured, make=make, kept=kept)
