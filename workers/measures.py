"""What one target cost on this worker, from the device's own stamps: spans, and the numbers of its feedback record.

Only after the target's ``done``: every event it waited for is done then, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from afore.core.record import record
from afore.core.trace import SpanName, Tracer
from afore.workers.device.base import Event
from afore.workers.flight import Flight
from afore.workers.migrator import Readiness
from afore.workers.partition import rows_measured


@record(kw_only=True)
class Measures:
    """One target on one worker. Times in microseconds; 0 where there is nothing to measure."""

    pairs: int
    """Token-expert pairs computed here."""
    replica_pairs: int
    """Those of them on redundant replicas."""
    tiles: int
    tile_us: float
    """Time of the experts, by tiles."""
    copies: int
    """Copies that this target's own entry made here, and those that went ahead of it and that it is the first to use."""
    copy_us: float
    """What one of them kept the port busy: from the stream being past what a batch waited for to its landing, by copies. Not D: a
    copy that starts at its target's turn waits for the target before, and that costs no port anything."""
    window_us: float
    """W: from their submission to the stream reaching its wait; without copies from when they could have been submitted."""
    exposed_us: float
    """Longest time that the stream waited for a slot, of whichever entry."""
    slack_us: float
    """W - D, the least of the copies; 0 without copies."""


def measure(flight: Flight, tile_tokens: int) -> Measures:
    """Reads the stamps and pair counts of a finished target, before its buffers are given back."""
    pairs = flight.staging.pairs
    tiles, replica_pairs = rows_measured(pairs.start_S1, flight.num_primaries, tile_tokens)
    experts_us = (flight.computed.completed_ns - flight.split.completed_ns) / 1e3
    reached_ns = flight.reached.completed_ns
    if not flight.copies:
        return Measures(
            pairs=pairs.count,
            replica_pairs=replica_pairs,
            tiles=tiles,
            tile_us=experts_us / tiles if tiles else 0.0,
            copies=0,
            copy_us=0.0,
            window_us=max(0, reached_ns - flight.taken_ns) / 1e3,
            exposed_us=0.0,
            slack_us=0.0,
        )
    sequence = flight.entry.sequence
    own = [copy for copy in flight.copies if copy.ahead or copy.generation == sequence]
    last_ns = max([copy.event.completed_ns for copy in flight.copies])
    landed_ns = max([copy.event.completed_ns for copy in own]) if own else reached_ns
    submitted_ns = min([copy.submitted_ns for copy in own]) if own else min(reached_ns, flight.taken_ns)
    return Measures(
        pairs=pairs.count,
        replica_pairs=replica_pairs,
        tiles=tiles,
        tile_us=experts_us / tiles if tiles else 0.0,
        copies=len(own),
        copy_us=_port_ns(own) / 1e3 / len(own) if own else 0.0,
        window_us=(reached_ns - submitted_ns) / 1e3,
        exposed_us=max(0, last_ns - reached_ns) / 1e3,
        slack_us=(reached_ns - landed_ns) / 1e3 if own else 0.0,
    )


def _port_ns(copies: Sequence[Readiness]) -> int:
    """How long copies were under way: the batches of a migration stream run one after another."""
    batches = {id(copy.event): copy for copy in copies}
    # What had to be fetched first was under way from its submission: the wire to the other node is what it costs.
    return sum(
        copy.event.completed_ns - (copy.submitted_ns if copy.fetched else copy.begun.completed_ns)
        for copy in batches.values()
    )


_POINTS: dict[SpanName, Callable[[Flight], tuple[Event, Event]]] = {
    "gather": attrgetter("began", "reached"),
    "wait": attrgetter("reached", "ready"),
    "partition": attrgetter("ready", "split"),
    "experts": attrgetter("split", "computed"),
    "reduce": attrgetter("computed", "done"),
}
"""Beginning and end of each span."""


def trace(flight: Flight, tracer: Tracer) -> None:
    """The target's spans on the model stream."""
    if not tracer.enabled:
        return
    target, sequence = flight.entry.target, flight.entry.sequence
    only = tracer.only
    for name in _POINTS if only is None else [name for name in _POINTS if name in only]:
        start, end = _POINTS[name](flight)
        if name == "wait":
            tracer.span(
                name,
                target,
                start.completed_ns,
                end.completed_ns,
                sequence=sequence,
                generations=[copy.generation for copy in flight.copies],
                slots=[copy.slot for copy in flight.copies],
            )
        else:
            tracer.span(name, target, start.completed_ns, end.completed_ns, sequence=sequence)
