"""Traces of targets: what was demanded, and what was planned on it.

header, targets = read("run.trace.npz")             one internal form (``format``), in constant memory
with TraceWriter("out.trace.npz", header) as out:   written chunk by chunk, there whole or not at all
    out.add(TraceTarget(target=Target(0, 0, 0), demand_E=demand_E))
for one in replay_of(corpus, …):                    targets made from real routing (``generate``)
"""

from afore.scheduler.traces.corpus import read_corpus
from afore.scheduler.traces.generate import workload_of
from afore.scheduler.traces.reader import TraceReader, read
from afore.scheduler.traces.records import Answer, Event, TraceError, TraceHeader, TraceTarget
from afore.scheduler.traces.shape import Shape, Workload
from afore.scheduler.traces.writer import TraceWriter

__all__ = [
    "Answer",
    "Event",
    "Shape",
    "TraceError",
    "TraceHeader",
    "TraceReader",
    "TraceTarget",
    "TraceWriter",
    "Workload",
    "read",
    "read_corpus",
    "workload_of",
]
