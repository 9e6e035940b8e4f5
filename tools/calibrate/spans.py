"""What a run's span files say about costs: pieces of work with their size and the time that they took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from afore.core.errors import ConfigError
from afore.core.slots import contiguous_primaries
from afore.core.target import Target
from afore.core.topology import ATTENTION, FFN, MAX_WORKERS, SCHEDULER
from afore.core.trace import Span
from afore.tools.trace_files import open_directory

_MOST_PAIRS = (1 << 31) - 1
"""Of one expert in a target."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One piece of work."""

    size: float
    """Tiles, rows or copies: what its time grows with."""
    took_us: float
    step: int
    """Of its target: halves of a run are told apart by it."""
    target: Target | None = None
    rank: int = 0
    """Of the worker."""


@dataclass(slots=True)
class Recorded:
    """All samples of a run, by span."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    workers: int = 0
    """N."""
    problems: list[str] = field(default_factory=list)


def read_samples(directory: Path, tile_tokens: int) -> Recorded:
    """Samples of every span file in ``directory``. Raises ``ConfigError`` where it holds no run of a cluster, or a record of one
    is not what a run writes.

    Tiles of a target on a worker are counted from the demand and the shares that the scheduler recorded.
    """
    files, problems = open_directory(directory)
    recorded = Recorded(problems=problems)
    planned: dict[int, dict[str, Any]] = defaultdict(dict)
    experts: list[tuple[int, Span, Path]] = []
    for file in files:
        role, rank = file.header.role, file.header.rank
        for _, span in file.records():
            with _named(span, file.path):
                if role == SCHEDULER and span.name in ("planned", "entry"):
                    _plan(planned, recorded, span)
                elif role == FFN and span.name == "experts":
                    experts.append((rank, span, file.path))
                elif span.target is not None and span.kind == "span":
                    _add(recorded, role, rank, span, span.target)
        recorded.problems += file.problems()
    if not planned or not experts:
        raise ConfigError(
            str(directory),
            "holds no scheduler's and FFN workers' spans",
            "record a run with --trace DIR, all roles of it",
        )
    for rank, span, path in experts:
        with _named(span, path):
            args = planned.get(_count(span.args["sequence"]), {})
            if span.target is not None and "demand" in args and "shares" in args:
                tiles = _tiles(args, rank, tile_tokens)
                recorded.samples["experts"].append(_sample(span, span.target, rank, tiles))
    return recorded


@contextmanager
def _named(span: Span, path: Path) -> Iterator[None]:
    """Says whose record is none that a run writes: another version's, or one that somebody has changed."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        what = f"it lacks {error.args[0]!r}" if isinstance(error, KeyError) else str(error)[:200]
        raise ConfigError(
            str(path), f"the record {span.name!r} of {span.target} is damaged: {what}", "record the run again"
        ) from error


def _plan(planned: dict[int, dict[str, Any]], recorded: Recorded, span: Span) -> None:
    if span.args.get("workers") == 0:
        raise ValueError("it is of no workers")
    if "workers" in span.args:
        recorded.workers = max(recorded.workers, _count(span.args["workers"], MAX_WORKERS))
    planned[_count(span.args["sequence"])].update(span.args)


def _count(value: Any, most: int = 1 << 62) -> int:
    """A whole number, 0 to ``most``. Raises ``ValueError``."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]} is no whole number from 0 to {most:,}")
    return value


def _add(recorded: Recorded, role: str, rank: int, span: Span, target: Target) -> None:
    if role == FFN and span.name in ("partition", "gather", "reduce", "copy"):
        recorded.samples[span.name].append(_sample(span, target, rank, 1.0))
    elif role == ATTENTION and span.name == "attention":
        recorded.samples["attention"].append(_sample(span, target, rank, _count(span.args.get("tokens", 0))))
    elif role == SCHEDULER and span.name == "plan":
        recorded.samples["plan"].append(_sample(span, target, rank, 1.0))


def _sample(span: Span, target: Target, rank: int, size: float) -> Sample:
    return Sample(size, (span.end_ns - span.start_ns) / 1e3, target.step, target, rank)


def _tiles(args: dict[str, Any], rank: int, tile_tokens: int) -> float:
    """Tiles that the worker computed: its shares, and of its primaries what others do not take."""
    if not isinstance(args["demand"], list) or not isinstance(args["shares"], list):
        raise ValueError("demand and shares are no lists")
    demand_E = np.array([_count(count, _MOST_PAIRS) for count in args["demand"]], dtype=np.int64)
    mine, left_E = [], demand_E.copy()
    for expert, worker, _slot, count, _generation in args["shares"]:
        taken = min(_count(count), int(left_E[_count(expert, len(demand_E) - 1)]))
        left_E[expert] -= taken
        if worker == rank:
            mine.append(taken)
    primaries_E = np.asarray(contiguous_primaries(demand_E.shape[0], args["workers"]))
    pairs = np.concatenate([left_E[primaries_E == rank], np.array(mine, dtype=np.int64)])
    return float((-(-pairs // tile_tokens)).sum())
