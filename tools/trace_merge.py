"""Span files → one Chrome trace (Perfetto opens it): a process per role, the lanes of the paper's Figure 7, and flow arrows.

Arrows: demand_write → plan → copy → first use, the ``experts`` span of the first target whose ``wait`` names the copy's generation.

Two passes, so that a long trace does not need its size in memory: the first keeps a row of numbers for each record (and a key
for each end of an arrow), the second reads the lines again in order of time and writes events as it goes.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import IO, Any, Final, NamedTuple

import numpy as np

from afore.core.spans import Span, parse_line
from afore.core.topology import ATTENTION, DOOR, FFN, PREFILL, SCHEDULER
from afore.tools.trace_files import SpanFile

LANES: Final = {
    "attention": ("compute", ("attention", "gate", "sample")),
    "transfer": ("transfer (demand, A2F)", ("demand_write", "a2f")),
    "scheduler": ("plan and publish", ("plan", "publish")),
    "cpu": ("FFN CPU (read, submit, check)", ("read", "submit", "ready")),
    "model": ("model stream", ("gather", "wait", "partition", "experts", "reduce")),
    "migration": ("migration stream", ("copy",)),
    "reply": ("transfer (F2A)", ("reply",)),
    "prefill": ("prefill", ("prefill",)),
    "events": ("events", ()),
}
"""Lane: its title, and the spans it shows (Figure 7). ``wait`` is the stream's, never the CPU's. Instants, counters: events."""
LANE_OF: Final = {span: index for index, (_, spans) in enumerate(LANES.values()) for span in spans}
EVENTS_LANE: Final = len(LANES) - 1
TITLES: Final = tuple(title for title, _ in LANES.values())
MOST_SUBLANES: Final = 100
ROLE_ORDER: Final = (ATTENTION, SCHEDULER, FFN, PREFILL, DOOR)


class Place(NamedTuple):
    """A record: which file, and which record of it."""

    file: int
    record: int


@dataclass(slots=True)
class MergeSummary:
    """What was merged."""

    files: int = 0
    spans: int = 0
    instants: int = 0
    counters: int = 0
    flows: dict[str, int] = field(default_factory=dict)
    """Arrows by kind."""
    unused_copies: int = 0
    """Copies that no target of this trace waited for."""
    duration_us: float = 0.0
    problems: list[str] = field(default_factory=list)


class _Ends:
    """The ends of arrows, gathered in the first pass. Sequences belong to an epoch; spans may name it."""

    def __init__(self) -> None:
        self.demands: defaultdict[int, list[Place]] = defaultdict(list)
        self.plans: dict[int, Place] = {}
        self.plan_of_sequence: dict[tuple[int, int], Place] = {}
        self.copies: list[tuple[Place, int, int, int, Any]] = []
        self.first_use: dict[tuple[int, int, int, int, Any], tuple[int, int]] = {}
        self.experts: defaultdict[int, tuple[array[int], array[int]]] = defaultdict(lambda: (array("q"), array("q")))
        """Of each file's ``experts`` spans: target words, and records beside them."""

    def note(self, place: Place, span: Span) -> None:
        name, args = span.name, span.args
        word = span.target.word() if span.target is not None else 0
        epoch = args.get("epoch", 0)
        if name == "demand_write" and word:
            self.demands[word].append(place)
        elif name in ("plan", "publish"):
            if name == "plan" and word:
                self.plans.setdefault(word, place)
            if "sequence" in args:
                key = (epoch, args["sequence"])
                if name == "plan" or key not in self.plan_of_sequence:
                    self.plan_of_sequence[key] = place
        elif name == "copy" and "generation" in args:
            layer = args.get("layer", span.target.layer if span.target is not None else -1)
            self.copies.append((place, epoch, layer, args["generation"], args.get("slot")))
        elif name == "wait" and span.target is not None:
            generations = args.get("generations", ())
            slots = args.get("slots") or [None] * len(generations)
            for generation, slot in zip(generations, slots, strict=False):
                key5 = (place.file, epoch, span.target.layer, generation, slot)
                found = (span.start_ns, word)
                self.first_use[key5] = min(found, self.first_use.get(key5, found))
        elif name == "experts" and word:
            words, records = self.experts[place.file]
            words.append(word)
            records.append(place.record)

    def arrows(self, summary: MergeSummary) -> dict[Place, list[tuple[str, int, str]]]:
        """For each record the arrow ends it carries: (``s`` or ``f``, arrow id, kind)."""
        ends: defaultdict[Place, list[tuple[str, int, str]]] = defaultdict(list)
        counts = dict.fromkeys(("demand", "copy", "use"), 0)

        def draw(kind: str, source: Place, sink: Place) -> None:
            arrow = sum(counts.values()) + 1
            counts[kind] += 1
            ends[source].append(("s", arrow, kind))
            ends[sink].append(("f", arrow, kind))

        for word, sources in self.demands.items():
            if word in self.plans:
                for source in sources:
                    draw("demand", source, self.plans[word])
        used = {(key[0], word) for key, (_, word) in self.first_use.items()}
        experts_of: dict[tuple[int, int], Place] = {}
        for number, (words, records) in self.experts.items():
            for word, record in zip(words, records, strict=True):
                if (number, word) in used:
                    experts_of.setdefault((number, word), Place(number, record))
        for place, epoch, layer, generation, slot in self.copies:
            plan = self.plan_of_sequence.get((epoch, generation))
            if plan is not None:
                draw("copy", plan, place)
            use = self.first_use.get((place.file, epoch, layer, generation, slot))
            use = use or self.first_use.get((place.file, epoch, layer, generation, None))
            experts = experts_of.get((place.file, use[1])) if use is not None else None
            if experts is not None:
                draw("use", place, experts)
            else:
                summary.unused_copies += 1
        summary.flows = counts
        return dict(ends)


class _Index:
    """Of each record of one file: where it is, when it ran, on which lane."""

    def __init__(self) -> None:
        self.offset, self.start, self.end, self.lane = array("q"), array("q"), array("q"), array("b")

    def add(self, offset: int, span: Span) -> None:
        self.offset.append(offset)
        self.start.append(span.start_ns)
        # A span of no length would lose its arrows in viewers.
        self.end.append(max(span.end_ns, span.start_ns + 1))
        self.lane.append(LANE_OF.get(span.name, EVENTS_LANE) if span.kind == "span" else EVENTS_LANE)


def merge(files: list[SpanFile], out: IO[str]) -> MergeSummary:
    """Writes one Chrome trace of ``files`` to ``out``. Times become microseconds since the first record."""
    summary = MergeSummary(files=len(files))
    ends = _Ends()
    indexes: list[_Index] = []
    first_ns, last_ns = None, None
    for number, file in enumerate(files):
        index = _Index()
        backwards = strange = 0
        for record, (offset, span) in enumerate(file.records()):
            index.add(offset, span)
            try:
                ends.note(Place(number, record), span)
            except TypeError:  # a sequence or generation that is none
                strange += 1
            backwards += span.end_ns < span.start_ns
            summary.spans += span.kind == "span"
            summary.instants += span.kind == "instant"
            summary.counters += span.kind == "counter"
        indexes.append(index)
        summary.problems += file.problems()
        if backwards:
            summary.problems.append(f"{file.path.name}: {backwards} spans end before they start; shown without length")
        if strange:
            summary.problems.append(
                f"{file.path.name}: {strange} spans have arguments of a wrong type; arrows are missing"
            )
        if index.start:
            begin, finish = min(index.start) + file.shift_ns, max(index.end) + file.shift_ns
            first_ns = begin if first_ns is None else min(first_ns, begin)
            last_ns = finish if last_ns is None else max(last_ns, finish)
    if first_ns is not None and last_ns is not None:
        summary.duration_us = (last_ns - first_ns) / 1e3
    arrows = ends.arrows(summary)
    out.write('{"displayTimeUnit":"ns","traceEvents":[')
    writer = _Writer(out)
    for number in sorted(range(len(files)), key=lambda number: _sort_key(files[number])):
        _write_file(writer, files[number], indexes[number], number, arrows, first_ns or 0)
    out.write("\n]}\n")
    return summary


class _Writer:
    """Puts the commas between events."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._separator = "\n"

    def event(self, text: str) -> None:
        self._out.write(self._separator + text)
        self._separator = ",\n"


def _sort_key(file: SpanFile) -> tuple[int, str, int]:
    role = file.header.role
    return (ROLE_ORDER.index(role) if role in ROLE_ORDER else len(ROLE_ORDER), role, file.header.rank)


def _write_file(
    writer: _Writer,
    file: SpanFile,
    index: _Index,
    number: int,
    arrows: dict[Place, list[tuple[str, int, str]]],
    first_ns: int,
) -> None:
    pid = number + 1
    order_rank = _sort_key(file)[0] * 10_000 + file.header.rank
    _metadata(writer, pid, 0, "process_name", {"name": file.header.process})
    _metadata(writer, pid, 0, "process_sort_index", {"sort_index": order_rank})
    if not index.start:
        return
    order, sublanes = _lay_out(index)
    shown = sorted({(index.lane[record], sublane) for record, sublane in enumerate(sublanes)})
    for lane, sublane in shown:
        title = TITLES[lane] + (f" ({sublane + 1})" if sublane else "")
        tid = _tid(lane, sublane)
        _metadata(writer, pid, tid, "thread_name", {"name": title})
        _metadata(writer, pid, tid, "thread_sort_index", {"sort_index": tid})
    for record in order:
        span = parse_line(file.line_at(index.offset[record]))
        assert isinstance(span, Span)
        ts = _us(index.start[record] + file.shift_ns - first_ns)
        tid = _tid(index.lane[record], sublanes[record])
        where = f'"pid":{pid},"tid":{tid},"ts":{ts}'
        writer.event(_event(span, where, index.end[record] - index.start[record], file.header.role))
        for phase, arrow, kind in arrows.get(Place(number, record), ()):
            enclosing = ',"bp":"e"' if phase == "f" else ""
            writer.event(f'{{"ph":"{phase}","name":"{kind}","cat":"flow","id":{arrow},{where}{enclosing}}}')


def _event(span: Span, where: str, length_ns: int, role: str) -> str:
    args = span.args
    if span.target is not None:
        args = {"layer": span.target.layer, "microbatch": span.target.microbatch, "step": span.target.step, **args}
    rest = f'"name":{json.dumps(span.name)},"cat":{json.dumps(role)},{where},"args":{_json(args)}}}'
    if span.kind == "span":
        return f'{{"ph":"X","dur":{_us(length_ns)},{rest}'
    return f'{{"ph":"i","s":"t",{rest}' if span.kind == "instant" else f'{{"ph":"C",{rest}'


def _json(args: dict[str, Any]) -> str:
    """As JSON proper, which viewers insist on: numbers that are none become texts."""
    try:
        return json.dumps(args, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(args), parse_constant=str))
    except RecursionError:
        return "{}"


def _lay_out(index: _Index) -> tuple[list[int], list[int]]:
    """Records in order of time, and the sub-lane of each: viewers need the spans of one lane to be apart or nested."""
    start, end = np.frombuffer(index.start, np.int64), np.frombuffer(index.end, np.int64)
    order: list[int] = np.lexsort((-end, start)).tolist()
    sublanes = [0] * len(order)
    open_ends: defaultdict[int, list[list[int]]] = defaultdict(list)
    for record in order:
        lane, begin, finish = index.lane[record], index.start[record], index.end[record]
        if lane == EVENTS_LANE:
            continue
        sublanes[record] = _fit(open_ends[lane], begin, finish)
    return order, sublanes


def _fit(stacks: list[list[int]], begin: int, finish: int) -> int:
    """The first sub-lane where a span fits beside or inside what is open there; ``stacks`` holds the ends of the open spans."""
    for sublane, stack in enumerate(stacks):
        while stack and stack[-1] <= begin:
            stack.pop()
        if not stack or finish <= stack[-1]:
            stack.append(finish)
            return sublane
    if len(stacks) < MOST_SUBLANES:
        stacks.append([finish])
    return len(stacks) - 1


def _tid(lane: int, sublane: int) -> int:
    return lane * MOST_SUBLANES + sublane + 1


def _us(ns: int) -> str:
    """Microseconds with all their nanoseconds."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _metadata(writer: _Writer, pid: int, tid: int, name: str, args: dict[str, Any]) -> None:
    writer.event(f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{name}","args":{json.dumps(args)}}}')
