"""What spans of a real run say of the host between pieces of work: wake-ups, hand-overs, publishing. Fitted on even steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.tools.trace_files import open_directory
from afore.workers.device.profile import CostProfile

_Times = dict[tuple[Target, str], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handovers:
    """Means, in µs, between two spans of one target: their sum is the mean of the sum, however ragged a busy host is."""

    after_attention: float
    """From attention's end until its demand is written: gate, counting, writing."""
    message: float
    """Until another process has woken up for what was written: the scheduler for demand, FFN workers for a plan."""
    plan: float
    """From the plan's beginning until it is published."""
    before_gather: float
    """On an FFN worker from reading the plan until its compute begins: verdict, copies, inputs, the compute thread's turn."""
    after_reduce: float
    """On an FFN worker from its last compute until the reply is written."""

    def on(self, costs: CostProfile) -> CostProfile:
        """The costs with the host's part where a target passes it."""
        return replace(
            costs,
            attention_us=costs.attention_us + self.after_attention,
            planner_us=self.plan,
            gather_us=costs.gather_us + self.before_gather,
            reduce_us=costs.reduce_us + self.after_reduce,
        )


def handovers(directory: Path) -> Handovers:
    """Of a run's spans. Raises ``ConfigError`` where a part of the targets' way was not recorded."""
    attention: _Times = {}
    scheduler: _Times = {}
    ffn: dict[int, _Times] = defaultdict(dict)
    files, _ = open_directory(directory)
    for file in files:
        role = file.header.role
        into = {ATTENTION: attention, SCHEDULER: scheduler, FFN: ffn[file.header.rank]}.get(role)
        if into is None:
            continue
        for _, span in file.records():
            if span.target is None or span.kind != "span" or span.target.step % 2:
                continue
            key = (span.target, span.name)
            known = into.get(key, (span.start_ns, span.end_ns))
            # Of several attention workers the last one counts: the scheduler waits for it.
            into[key] = (max(known[0], span.start_ns), max(known[1], span.end_ns))
    workers = [times for times in ffn.values() if times]

    def between(name: str, before: list[tuple[_Times, str, int]], after: tuple[_Times, str, int]) -> float:
        times, last, end = after
        found = [
            (times[target, last][end] - earlier[target, first][begin]) / 1e3
            for earlier, first, begin in before
            for target, span in times
            if span == last and (target, first) in earlier
        ]
        if not found:
            raise ConfigError(str(directory), f"no target shows {name}", "record a run of all roles with --trace")
        return max(0.0, statistics.mean(found))

    def pooled(name: str, first: str, begin: int, last: str, end: int) -> float:
        return statistics.mean(between(name, [(one, first, begin)], (one, last, end)) for one in workers)

    if not workers:
        raise ConfigError(str(directory), "no FFN worker's spans", "record a run of all roles with --trace")
    to_scheduler = between("its plan", [(attention, "demand_write", 1)], (scheduler, "plan", 0))
    to_ffn = statistics.mean(
        between("a worker reading its plan", [(scheduler, "publish", 1)], (one, "read", 0)) for one in workers
    )
    return Handovers(
        after_attention=between("its demand", [(attention, "attention", 1)], (attention, "demand_write", 1)),
        message=(to_scheduler + to_ffn) / 2,
        plan=between("its publication", [(scheduler, "plan", 0)], (scheduler, "publish", 1)),
        before_gather=pooled("its compute", "read", 0, "gather", 0),
        after_reduce=pooled("its reply", "reduce", 1, "reply", 1),
    )
