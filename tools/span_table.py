"""Where the time of a target goes: its wall time cut into steps and waits that add up, and what each role's spans took.

A moment of a target belongs to the earliest step of its life that still runs in any process: the one that holds it up. A moment
in which none of its spans runs is a wait, named after the step that ends it: the target was on its way, behind other targets, or
without a core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from afore.core.target import Target
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.core.trace import SPANS, Span
from afore.tools.trace_files import SpanFile

LIFE: Final = (
    (ATTENTION, "attention"),
    (ATTENTION, "gate"),
    (ATTENTION, "demand_write"),
    (ATTENTION, "a2f"),
    (SCHEDULER, "plan"),
    (SCHEDULER, "publish"),
    (FFN, "read"),
    (FFN, "ready"),
    (FFN, "gather"),
    (FFN, "wait"),
    (FFN, "partition"),
    (FFN, "experts"),
    (FFN, "reduce"),
    (FFN, "reply"),
    (ATTENTION, "reduce"),
)
"""The steps on a target's way, in order. ``submit`` and ``copy`` run beside it."""
_ORDER: Final = {step: index for index, step in enumerate(LIFE)}
WAITING: Final = frozenset({"read", "wait"})
"""Spans that are mostly waiting: for the verdicts of the others, for copies."""
MOVING: Final = frozenset({"demand_write", "a2f", "publish", "reply", "submit", "ready", "copy"})
"""Spans that move bytes or prepare work. All others compute."""
BETWEEN_LAYERS: Final = "between layers"
BETWEEN_STEPS: Final = "between steps (sampling, report, engine, dense layers)"
DEFINITIONS: Final = (
    "wall of a target: start of its first attention span → end of its last reduce on an attention worker",
    "a moment belongs to the earliest step that still runs in any process; none runs: a wait, named after the step that ends it",
    "spans are wall time: on a busy machine they include the time in which their process had no core",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """One span of one role, over all its processes."""

    role: str
    span: str
    kind: str
    """``computes``, ``moves`` or ``waits``."""
    count: int
    p50_us: float
    p99_us: float
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """One part of the wall time of targets."""

    part: str
    """``ffn experts``, or ``wait for ffn gather``."""
    kind: str
    targets: int
    """How many targets had it."""
    p50_us: float
    """Of the targets that had it."""
    p99_us: float
    share: float
    """Of the wall time of all targets: the shares add up to 1."""


@dataclass(slots=True)
class SpanTable:
    """What ``build`` found."""

    targets: int = 0
    """Targets that are whole in the trace."""
    wall_p50_us: float | None = None
    wall_p99_us: float | None = None
    waiting_share: float | None = None
    parts: list[PartRow] = field(default_factory=list)
    gaps: dict[str, dict[str, float]] = field(default_factory=dict)
    """Between the targets of one microbatch: count, p50_us, and how it compares with the targets' own wall time."""
    roles: list[RoleRow] = field(default_factory=list)


def build(files: Sequence[SpanFile], *, since_ns: int | None = None, until_ns: int | None = None) -> SpanTable:
    """The table of span files; ``since_ns`` … ``until_ns`` (on the files' own clock) leaves out what is not wholly within."""
    by_role: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    by_target: defaultdict[Target, list[tuple[int, int, int]]] = defaultdict(list)
    for file in files:
        role = file.header.role
        for _, span in file.records():
            if not _within(span, since_ns, until_ns):
                continue
            by_role[role, span.name].append(span.end_ns - span.start_ns)
            step = _ORDER.get((role, span.name))
            if step is not None and span.target is not None:
                by_target[span.target].append((span.start_ns + file.shift_ns, span.end_ns + file.shift_ns, step))
    table = SpanTable(roles=_role_rows(by_role))
    walls: dict[Target, tuple[int, int]] = {}
    parts: defaultdict[str, list[int]] = defaultdict(list)
    for target, spans in by_target.items():
        bounds = wall(spans)
        if bounds is not None:
            walls[target] = bounds
            for part, length_ns in cut(spans, *bounds).items():
                parts[part].append(length_ns)
    _sum_up(table, walls, parts)
    return table


def wall(spans: Iterable[tuple[int, int, int]]) -> tuple[int, int] | None:
    """(start, end) of a target in ns from its (start, end, step) spans; none for one that is not whole."""
    starts = [start for start, _, step in spans if LIFE[step] == (ATTENTION, "attention")]
    ends = [end for _, end, step in spans if LIFE[step] == (ATTENTION, "reduce")]
    return (min(starts), max(ends)) if starts and ends and max(ends) > min(starts) else None


def cut(spans: Iterable[tuple[int, int, int]], begin: int, end: int) -> dict[str, int]:
    """The parts of [begin, end), in ns; they add up to its length."""
    edges = sorted(
        edge
        for start, stop, step in spans
        if min(stop, end) > max(start, begin)
        for edge in ((max(start, begin), 1, step), (min(stop, end), 0, step))
    )
    running = [0] * len(LIFE)
    parts: defaultdict[str, int] = defaultdict(int)
    at = begin
    for moment, opens, step in edges:
        if moment > at:
            now = next((index for index, count in enumerate(running) if count), None)
            parts[_name(step, waits=True) if now is None else _name(now, waits=False)] += moment - at
            at = moment
        running[step] += 1 if opens else -1
    if end > at:
        parts["wait for its end"] += end - at
    return dict(parts)


def _name(step: int, *, waits: bool) -> str:
    role, span = LIFE[step]
    return f"wait for {role} {span}" if waits else f"{role} {span}"


def kind_of(span: str) -> str:
    """What a span mostly does."""
    return "waits" if span in WAITING else "moves" if span in MOVING else "computes"


def _within(span: Span, since_ns: int | None, until_ns: int | None) -> bool:
    return (
        span.kind == "span"
        and span.end_ns >= span.start_ns
        and (since_ns is None or span.start_ns >= since_ns)
        and (until_ns is None or span.end_ns <= until_ns)
    )


def _role_rows(lengths_ns: Mapping[tuple[str, str], list[int]]) -> list[RoleRow]:
    order = {name: index for index, name in enumerate(SPANS)}
    roles = {role: index for index, role in enumerate(dict.fromkeys(role for role, _ in LIFE))}
    rows = []
    for role, span in sorted(
        lengths_ns, key=lambda key: (roles.get(key[0], len(roles)), key[0], order.get(key[1], 99))
    ):
        p50, p99 = np.percentile(np.asarray(lengths_ns[role, span], np.float64), (50, 99))
        rows.append(
            RoleRow(
                role=role,
                span=span,
                kind=kind_of(span),
                count=len(lengths_ns[role, span]),
                p50_us=float(p50) / 1e3,
                p99_us=float(p99) / 1e3,
                total_ms=sum(lengths_ns[role, span]) / 1e6,
            )
        )
    return rows


def _sum_up(table: SpanTable, walls: Mapping[Target, tuple[int, int]], parts: Mapping[str, list[int]]) -> None:
    if not walls:
        return
    lengths_ns = [end - start for start, end in walls.values()]
    total_ns = sum(lengths_ns)
    table.targets = len(walls)
    table.wall_p50_us, table.wall_p99_us = (
        float(value) / 1e3 for value in np.percentile(np.asarray(lengths_ns, np.float64), (50, 99))
    )
    order = [_name(step, waits=waits) for step in range(len(LIFE)) for waits in (True, False)]
    for part in sorted(parts, key=lambda part: order.index(part) if part in order else len(order)):
        p50, p99 = np.percentile(np.asarray(parts[part], np.float64), (50, 99))
        table.parts.append(
            PartRow(
                part=part,
                kind="waits" if part.startswith("wait for") else kind_of(part.rpartition(" ")[2]),
                targets=len(parts[part]),
                p50_us=float(p50) / 1e3,
                p99_us=float(p99) / 1e3,
                share=sum(parts[part]) / total_ns,
            )
        )
    table.waiting_share = sum(row.share for row in table.parts if row.kind == "waits")
    for name, found in _gaps(walls).items():
        table.gaps[name] = {
            "count": len(found),
            "p50_us": float(np.percentile(np.asarray(found, np.float64), 50)) / 1e3,
            "of_targets_wall": sum(found) / total_ns,
        }


def _gaps(walls: Mapping[Target, tuple[int, int]]) -> dict[str, list[int]]:
    """Lengths in ns between one target of a microbatch and its next one, within a step and from step to step."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    in_life = sorted(walls, key=lambda target: (target.microbatch, target.step, target.layer))
    for early, late in pairwise(in_life):
        if early.microbatch != late.microbatch:
            continue
        gap_ns = max(0, walls[late][0] - walls[early][1])
        if early.step == late.step and late.layer == early.layer + 1:
            found[BETWEEN_LAYERS].append(gap_ns)
        elif late.step == early.step + 1 and late.layer == 0:
            found[BETWEEN_STEPS].append(gap_ns)
    return dict(found)
