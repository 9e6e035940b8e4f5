"""Whether the rows of a chunk can be: the first that cannot is named, with what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.target import STEP_BITS, Phase
from afore.scheduler.traces import format as form
from afore.scheduler.traces.records import MOST_PAIRS, Event, TraceError, TraceHeader

_STEP = (1 << (STEP_BITS - 1)) - 2


def check_rows(
    header: TraceHeader,
    rows: NDArray[Any],
    parts: dict[str, NDArray[Any]],
    refuse: Callable[[int, str], TraceError],
) -> None:
    """Raises ``refuse(row, why)`` for the first row that cannot be."""

    def must(holds_X: Any, why: Callable[[int], str]) -> None:
        wrong = np.flatnonzero(~np.asarray(holds_X))
        if wrong.size:
            raise refuse(int(wrong[0]), why(int(wrong[0])))

    def within(name: str, most: int) -> None:
        values_X = rows[name]
        must((values_X >= 0) & (values_X <= most), lambda x: f"{name} {values_X[x]} is none of 0 to {most}")

    E, flags_X = header.experts, rows["flags"]
    within("step", _STEP)
    within("layer", header.layers - 1)
    within("microbatch", header.microbatches - 1)
    within("event", max(Event))
    within("phase", max(Phase))
    within("tokens", MOST_PAIRS)
    within("source", max(0, len(header.sources) - 1))
    for name in form.PARTS:
        within(name, MOST_PAIRS)
    counts_XE = rows["counts"]
    least_X = counts_XE.min(axis=1)
    must(least_X >= 0, lambda x: f"expert {int(counts_XE[x].argmin())} has {least_X[x]} pairs")
    sums_X = counts_XE.sum(axis=1, dtype=np.int64)
    must(sums_X <= MOST_PAIRS, lambda x: f"{sums_X[x]:,} pairs")
    demanded = (flags_X & form.HAS_DEMAND) != 0
    must(demanded | (rows["event"] != Event.DEMAND), lambda x: "a target without its demand")
    costs_X = rows["costs"]
    fine_X = (np.isfinite(costs_X) & (costs_X >= 0)).all(axis=1)
    must(fine_X | ((flags_X & form.HAS_COSTS) == 0), lambda x: f"costs {costs_X[x].tolist()} are no times")
    for name in form.PARTS:
        total = int(rows[name].sum(dtype=np.int64))
        there = len(parts.get(name, ()))
        if total != there:
            raise refuse(0, f"its chunk has {there} {name}, its rows {total}")
    _check_parts(header, rows, parts, refuse)
    if "ids" in parts:
        ids_XK = parts["ids"]
        if int(ids_XK.max(initial=0)) >= E:
            at = _row_of(rows["ids"], int(np.flatnonzero(ids_XK.max(axis=1) >= E)[0]))
            raise refuse(at, f"expert {int(ids_XK.max())}, of {E}")
        _check_counts(rows, ids_XK, refuse)


def _check_counts(rows: NDArray[Any], ids_XK: NDArray[Any], refuse: Callable[[int, str], TraceError]) -> None:
    at = 0
    for x, count in enumerate(rows["ids"].tolist()):
        if count:
            counted_E = np.bincount(ids_XK[at : at + count].reshape(-1), minlength=rows["counts"].shape[1])
            at += count
            if not np.array_equal(counted_E, rows["counts"][x]):
                raise refuse(x, "its experts by token are not its counts")


def _check_parts(
    header: TraceHeader,
    rows: NDArray[Any],
    parts: dict[str, NDArray[Any]],
    refuse: Callable[[int, str], TraceError],
) -> None:
    E, L, N, R = header.experts, header.layers, header.workers, header.slots
    for name, limits in (("shares", (E, N, R, MOST_PAIRS)), ("copies", (L, E, N, R, 2))):
        if name not in parts:
            continue
        wrong = np.flatnonzero(((parts[name] < 0) | (parts[name] >= limits)).any(axis=1))
        if wrong.size:
            at = _row_of(rows[name], int(wrong[0]))
            raise refuse(at, f"{name} {parts[name][wrong[0]].tolist()} lie beyond {limits}")


def _row_of(counts_X: NDArray[np.int32], part: int) -> int:
    """The row that has this part."""
    return int(np.searchsorted(np.cumsum(counts_X), part, side="right"))
