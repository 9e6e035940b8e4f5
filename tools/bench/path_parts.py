"""A target's way from demand to plan, cut out of span files: pure arithmetic on the times that the roles took.

All processes of a host share one monotonic clock, so that a time of one process minus a time of another is a duration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.core.metrics import percentile
from afore.core.target import Target
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.tools.trace_files import SpanFile

PARTS: Final = (
    ("gate done → demand written", "the last vector's attention worker: end of gate and counting → its one-sided write returned"),
    ("written → scheduler turns to it", "notification, and the scheduler's turn in its event loop"),
    ("turns to it → planning begins", "feedback that lies there is heard; refusals; targets before it"),
    ("planning begins → published", "the compiled call (gather, plan, write, publish), or a policy's answer and its entry"),
    ("published → read by the first", "bells, wake-up, and the first FFN worker has the entry decoded"),
    ("first → last FFN worker", "until the last of them has"),
    ("read → verdicts in", "the last worker judges; all N verdicts are in, where the entry names slots; copies are handed over"),
)  # fmt: skip
"""What a target goes through, one after another: the parts of a target add up to its whole way."""
TOTALS: Final = (
    ("demand ready → vector accepted", "each vector: end of gate and counting → the scheduler has found it whole in the mailbox"),
    ("demand complete → readable", "the last vector is written → the entry is published: any FFN worker may read it"),
    ("demand complete → read by the first", "… → the first FFN worker has it decoded"),
    ("demand complete → read by the last", "… → the last FFN worker has it decoded"),
    ("published → read by the last", "the entry is published → the last FFN worker has it decoded"),
    ("demand ready → verdicts in", "the whole way: the sum of the parts"),
)  # fmt: skip
PERCENTS: Final = (50.0, 99.0, 99.9)

Windows = Sequence[tuple[int, int]]
"""(begin, end) in ns of what is to be counted."""


@dataclass(slots=True)
class Way:
    """What was recorded of one target, in ns; empty or 0: not recorded."""

    gate_A: dict[int, int] = field(default_factory=dict)
    """End of the gate on each attention worker."""
    written_A: dict[int, int] = field(default_factory=dict)
    turned: int = 0
    accepted_A: dict[int, int] = field(default_factory=dict)
    """Of workers with rows."""
    began: int = 0
    published: int = 0
    read_N: list[int] = field(default_factory=list)
    judged_N: list[int] = field(default_factory=list)

    def whole(self, num_workers: int) -> bool:
        """Whether every step was recorded by everybody."""
        senders = self.accepted_A.keys()
        return bool(
            senders
            and self.turned
            and senders <= self.gate_A.keys()
            and senders <= self.written_A.keys()
            and len(self.read_N) == num_workers
        )

    def moments(self) -> tuple[int, ...]:
        """The borders of the parts, in order. A border that another process stamped a little later than what follows is moved
        back to it: a writer may be without a core before it can say that it has written."""
        last = max(self.accepted_A, key=lambda a: (self.accepted_A[a], self.gate_A[a]))
        # The compiled call accepts within itself: there the turn counts. The plain way accepts first.
        turned = min(self.turned, self.accepted_A[last])
        found = [self.gate_A[last], min(self.written_A[last], turned), turned, self.began, self.published]
        found += [min(self.read_N), max(self.read_N), max(self.judged_N)]
        for index in range(1, len(found)):
            found[index] = max(found[index], found[index - 1])
        return tuple(found)


def collect(files: Sequence[SpanFile], windows: Windows) -> tuple[list[Way], int]:
    """The whole targets that lie within one of ``windows``, and how many others were planned there."""
    by_sequence: dict[int, Target] = {}
    ways: defaultdict[Target, Way] = defaultdict(Way)
    reads: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    workers: set[int] = set()
    for file in files:
        role, rank, shift_ns = file.header.role, file.header.rank, file.shift_ns
        if role == FFN:
            workers.add(rank)
        for _, span in file.records():
            target, start, end = span.target, span.start_ns + shift_ns, span.end_ns + shift_ns
            if target is None:
                continue
            if role == ATTENTION and span.name == "gate":
                ways[target].gate_A[rank] = end
            elif role == ATTENTION and span.name == "demand_write":
                ways[target].written_A[rank] = end
            elif role == SCHEDULER and span.name == "plan":
                ways[target].turned = start
            elif role == SCHEDULER and span.name == "planned":
                way = ways[target]
                way.began, way.published = int(span.args["began_ns"]) + shift_ns, end
                stamps = enumerate(span.args["accepted_ns"])
                way.accepted_A = {a: int(at_ns) + shift_ns for a, at_ns in stamps if at_ns}
                by_sequence[span.args["sequence"]] = target
            elif role == FFN and span.name == "read":
                reads[span.args["sequence"]].append((start, end))
    for sequence, target in by_sequence.items():
        ways[target].read_N = [start for start, _ in reads[sequence]]
        ways[target].judged_N = [end for _, end in reads[sequence]]
    planned = [
        ways[target]
        for target in by_sequence.values()
        if any(begin <= ways[target].published <= end for begin, end in windows)
    ]
    whole = [way for way in planned if way.whole(len(workers))]
    return whole, len(planned) - len(whole)


def figures_us(ways: Sequence[Way]) -> dict[str, NDArray[np.float64]]:
    """Of each part and each total, the durations of all targets (of all vectors: ``demand ready → vector accepted``)."""
    moments_XP = np.array([way.moments() for way in ways], np.int64).reshape(len(ways), len(PARTS) + 1)
    parts_XP = np.diff(moments_XP, axis=1) / 1e3
    found = {name: parts_XP[:, p] for p, (name, _) in enumerate(PARTS)}
    accepted = [at_ns - way.gate_A[a] for way in ways for a, at_ns in way.accepted_A.items()]
    ready, written, published, first, last, judged = (moments_XP[:, p] for p in (0, 1, 4, 5, 6, 7))
    totals = (published - written, first - written, last - written, last - published, judged - ready)
    names = [name for name, _ in TOTALS]
    found[names[0]] = np.array(accepted, np.float64) / 1e3
    found.update({name: values / 1e3 for name, values in zip(names[1:], totals, strict=True)})
    return found


def summary(values_us: NDArray[np.float64]) -> dict[str, Any]:
    """p50, p99, p99.9, max in µs, and of how many; nothing but the count of none."""
    if not len(values_us):
        return {"n": 0}
    return {
        **{f"p{percent:g}_us": percentile(values_us, percent) for percent in PERCENTS},
        "max_us": float(values_us.max()),
        "n": len(values_us),
    }


def summarise(ways: Sequence[Way]) -> Mapping[str, dict[str, Any]]:
    """Every part and total of a set of targets."""
    return {name: summary(values) for name, values in figures_us(ways).items()}
