"""``trace why TARGET``: where one target's time went, who was last at each step, which copies were exposed, who never came."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from afore.core.errors import ConfigError
from afore.core.spans import Span
from afore.core.target import LAYER_BITS, MICROBATCH_BITS, STEP_BITS, Target
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.tools.span_table import LIFE, build, cut, wall
from afore.tools.trace_files import SpanFile

_TARGET: Final = re.compile(r"l(\d{1,9})/m(\d{1,9})/s(\d{1,18})")
_STEPS: Final = {step: index for index, step in enumerate(LIFE)}
RACES: Final = (
    ("demand", ATTENTION, "demand_write", "vector written"),
    ("verdicts", FFN, "read", "entry read and verdicts in"),
    ("inputs", ATTENTION, "a2f", "inputs written"),
    ("experts", FFN, "experts", "experts computed"),
    ("replies", FFN, "reply", "reply written"),
    ("combined", ATTENTION, "reduce", "replies added up"),
)
"""What all peers of a role do for a target, where the last one holds the others up: (name, role, span, its end in words)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the target's wall time, beside what it usually takes."""

    part: str
    us: float
    share: float
    usual_us: float | None
    """Median over the targets of the trace that had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One step that every peer of a role takes: who was last, and by how much."""

    step: str
    what: str
    last: str
    at_us: float
    """After the target's start."""
    behind_first_us: float
    arrived: int
    missing: list[str]
    """Peers that should have taken it and did not: their files go on beyond the target."""
    unknown: list[str]
    """Peers that may have taken it: their files do not reach the target, or lost records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRow:
    """A copy that the target's plan asked for, or whose slot it waited for."""

    worker: str
    expert: int
    slot: int
    generation: int
    took_us: float | None
    """D: submission to completion; none: its span is not in the trace."""
    exposed_us: float
    """How long the model stream waited for it, at most: the target's ``wait`` up to its completion."""


@dataclass(slots=True)
class Why:
    """What was found about one target."""

    target: str
    sequence: int | None = None
    policy: str | None = None
    tokens_A: list[int] = field(default_factory=list)
    wall_us: float | None = None
    """None: it is not whole in the trace."""
    parts: list[Part] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    copies: list[CopyRow] = field(default_factory=list)
    exposed_us: float = 0.0
    """The longest ``wait`` of a worker."""
    exposed_on: str = ""
    events: list[str] = field(default_factory=list)
    """Refusals and aborts."""
    reach: list[str] = field(default_factory=list)
    """How far the files of unknown peers go, in words."""


def parse_target(text: str) -> Target:
    """``l2/m0/s17``. Raises ``ConfigError``."""
    match = _TARGET.fullmatch(text)
    if match is not None:
        layer, microbatch, step = map(int, match.groups())
        if layer < 1 << LAYER_BITS and microbatch < 1 << MICROBATCH_BITS and step < (1 << (STEP_BITS - 1)) - 1:
            return Target(layer, microbatch, step)
    raise ConfigError("TARGET", f"{text!r} is none", "write layer, microbatch and step: l2/m0/s17")


def explain(files: Sequence[SpanFile], target: Target) -> Why:
    """Everything that the trace says of ``target``. Raises ``ConfigError`` where that is nothing."""
    own: list[tuple[str, str, Span]] = []
    copies: dict[tuple[str, int, int], Span] = {}
    members: dict[str, set[str]] = {ATTENTION: set(), FFN: set(), SCHEDULER: set()}
    near: set[int] = set()
    for file in files:
        process, role, shift_ns = file.header.process, file.header.role, file.shift_ns
        members.setdefault(role, set()).add(process)
        for _, span in file.records():
            if span.name == "copy" and "generation" in span.args:
                copies[process, span.args.get("slot", -1), span.args["generation"]] = _shifted(span, shift_ns)
            if span.target == target:
                own.append((process, role, _shifted(span, shift_ns)))
            elif span.target is not None and (span.target.layer, span.target.microbatch) == (
                target.layer,
                target.microbatch,
            ):
                near.add(span.target.step)
    if not own:
        close = ", ".join(f"l{target.layer}/m{target.microbatch}/s{step}" for step in _around(near, target.step))
        raise ConfigError(
            "TARGET", f"nothing of {target} is in the trace", f"near it: {close}" if close else "see summary"
        )
    why = Why(str(target))
    _identify(why, own)
    spans = [(s.start_ns, s.end_ns, _STEPS[role, s.name]) for _, role, s in own if (role, s.name) in _STEPS]
    begin = min(span.start_ns for _, _, span in own if span.kind == "span" or len(own) == 1)
    bounds = wall(spans)
    if bounds is not None:
        begin = bounds[0]
        why.wall_us = (bounds[1] - bounds[0]) / 1e3
        usual = {row.part: row.p50_us for row in build(files).parts}
        why.parts = [
            Part(part=part, us=ns / 1e3, share=ns / (bounds[1] - bounds[0]), usual_us=usual.get(part))
            for part, ns in cut(spans, *bounds).items()
        ]
    until = max(span.end_ns for _, _, span in own)
    sure = {file.header.process for file in files if file.covers(begin - file.shift_ns, until - file.shift_ns)}
    why.races = list(_races(why, own, members, begin, sure))
    unknown = {process for race in why.races for process in race.unknown}
    why.reach = [_reach(file, begin) for file in files if file.header.process in unknown]
    _exposure(why, own, copies)
    return why


def _shifted(span: Span, shift_ns: int) -> Span:
    return span._replace(start_ns=span.start_ns + shift_ns, end_ns=span.end_ns + shift_ns) if shift_ns else span


def _around(steps: set[int], step: int, most: int = 3) -> list[int]:
    return sorted(sorted(steps, key=lambda other: (abs(other - step), other))[:most])


def _identify(why: Why, own: Sequence[tuple[str, str, Span]]) -> None:
    for process, role, span in own:
        if role == SCHEDULER and span.name in ("plan", "entry", "planned"):
            why.sequence = span.args.get("sequence", why.sequence)
        if span.name == "planned":
            why.policy = str(span.args.get("policy"))
        if span.name == "entry" and span.args.get("kind") == "PLAN":
            why.tokens_A = list(span.args.get("tokens", ()))
        if span.kind == "instant" and span.name not in ("planned", "entry"):
            why.events.append(f"{span.name} by {process}")


def _races(
    why: Why, own: Sequence[tuple[str, str, Span]], members: dict[str, set[str]], begin_ns: int, sure: set[str]
) -> Iterator[Race]:
    """``sure`` are the processes of which a record that is not there was never made."""
    for step, role, name, what in RACES:
        ends = sorted((span.end_ns, process) for process, of, span in own if (of, span.name) == (role, name))
        expected = {p for p in members[role] if role != ATTENTION or _has_rows(why, p)}
        absent = expected - {process for _, process in ends}
        if not ends and not absent:
            continue
        yield Race(
            step=step,
            what=what,
            last=ends[-1][1] if ends else "",
            at_us=(ends[-1][0] - begin_ns) / 1e3 if ends else 0.0,
            behind_first_us=(ends[-1][0] - ends[0][0]) / 1e3 if ends else 0.0,
            arrived=len(ends),
            missing=sorted(absent & sure),
            unknown=sorted(absent - sure),
        )


def _reach(file: SpanFile, begin_ns: int) -> str:
    process = file.header.process
    if file.first_ns is None or file.last_ns is None:
        return f"{process}: its file has no records"
    last_ns, first_ns = file.last_ns + file.shift_ns, file.first_ns + file.shift_ns
    if file.bounded and first_ns > begin_ns:
        return f"{process}: its oldest records made room; its file begins {(first_ns - begin_ns) / 1e3:,.0f} µs after the target"
    if file.dropped or file.bad_count:
        return f"{process}: {file.dropped + file.bad_count:,} records of it are lost"
    when = "after" if last_ns >= begin_ns else "before"
    return f"{process}: its last record begins {abs(last_ns - begin_ns) / 1e3:,.0f} µs {when} the target's begin"


def _has_rows(why: Why, process: str) -> bool:
    """Whether an attention worker takes part; where no entry says it, all may."""
    rank = process.rpartition("-")[2]
    if not why.tokens_A or not rank.isdecimal() or int(rank) >= len(why.tokens_A):
        return not why.tokens_A
    return why.tokens_A[int(rank)] > 0


def _exposure(why: Why, own: Sequence[tuple[str, str, Span]], copies: dict[tuple[str, int, int], Span]) -> None:
    for process, role, span in sorted(own, key=lambda one: (one[0], one[2].start_ns)):
        if (role, span.name) != (FFN, "wait"):
            continue
        waited_us = (span.end_ns - span.start_ns) / 1e3
        if waited_us > why.exposed_us:
            why.exposed_us, why.exposed_on = waited_us, process
        named = zip(span.args.get("slots", ()), span.args.get("generations", ()), strict=False)
        for slot, generation in named:
            copy = copies.get((process, slot, generation))
            # Of earlier plans only those that were still under way are of interest.
            if generation != why.sequence and (copy is None or copy.end_ns <= span.start_ns):
                continue
            late_ns = 0 if copy is None else max(0, min(copy.end_ns, span.end_ns) - span.start_ns)
            begun_ns = 0 if copy is None else copy.args.get("submitted_ns", copy.start_ns)
            why.copies.append(
                CopyRow(
                    worker=process,
                    expert=-1 if copy is None else copy.args.get("expert", -1),
                    slot=slot,
                    generation=generation,
                    took_us=None if copy is None else (copy.end_ns - begun_ns) / 1e3,
                    exposed_us=late_ns / 1e3,
                )
            )


def lines(why: Why) -> Iterator[str]:
    """For a terminal."""
    head = [why.target]
    head += [f"sequence {why.sequence}"] if why.sequence is not None else []
    head += [f"policy {why.policy}"] if why.policy else []
    head += [f"rows of attention workers {why.tokens_A}"] if why.tokens_A else []
    yield ", ".join(head)
    yield from (f"  {event}" for event in why.events)
    if why.wall_us is None:
        yield "not whole in the trace: it was aborted, did not finish, or lies at the edge of what files hold"
    else:
        yield f"wall {why.wall_us:,.0f} µs"
        yield ""
        yield f"{'part':<38}{'µs':>10}{'share':>8}{'usually':>10}"
        for part in why.parts:
            usual = "-" if part.usual_us is None else f"{part.usual_us:,.0f}"
            yield f"{part.part:<38}{part.us:>10,.0f}{part.share:>8.1%}{usual:>10}"
    yield ""
    yield f"{'step':<10}{'last':<14}{'at µs':>9}{'after first':>13}  "
    for race in why.races:
        missing = f"; never: {', '.join(race.missing)}" if race.missing else ""
        missing += f"; no record of it from {', '.join(race.unknown)}" if race.unknown else ""
        last = f"{race.last:<14}{race.at_us:>9,.0f}{race.behind_first_us:>13,.0f}" if race.arrived else f"{'-':<36}"
        yield f"{race.step:<10}{last}  {race.what}{missing}"
    yield from (f"  {line}" for line in why.reach)
    yield ""
    if why.exposed_on:
        yield f"exposed: at most {why.exposed_us:,.1f} µs, on {why.exposed_on}"
    for copy in why.copies:
        took = "not in the trace" if copy.took_us is None else f"took {copy.took_us:,.1f} µs"
        yield (
            f"  copy of expert {copy.expert} into {copy.worker} slot {copy.slot} (generation {copy.generation}): {took}, "
            f"exposed {copy.exposed_us:,.1f} µs"
        )
    if not why.copies:
        yield "no copy was awaited"
    if why.parts:
        most = max(why.parts, key=lambda part: part.us)
        over = max(why.parts, key=lambda part: part.us - (part.usual_us or 0.0))
        yield f"most of it: {most.part}, {most.us:,.0f} µs ({most.share:.0%})"
        if over.usual_us is not None and over.us > over.usual_us:
            yield f"most beyond the usual: {over.part}, {over.us - over.usual_us:,.0f} µs more than its median"
