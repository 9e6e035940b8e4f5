"""Runs targets strictly by ring sequence on the model stream (paper §6.2). Other coroutines only prepare.

Two coroutines, so that the host never waits for compute before preparing the next target:

- ``run``: turn → inputs (or abort) → submission of the copies that the plan names → enqueue gather, wait, partition, experts;
- ``complete``: awaits the stream, target by target, sends replies, then the feedback.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from afore.core.clock import Clock
from afore.core.handover import Handover
from afore.core.plan import EntryKind, PlanEntry
from afore.core.signal import Signal
from afore.core.topology import ATTENTION, FFN, member_name
from afore.core.trace import Tracer
from afore.workers.device.base import Device, Event, Work, collective_streams
from afore.workers.experts import Store
from afore.workers.flight import Flight, TargetCompute
from afore.workers.group.base import Group
from afore.workers.measures import Measures, measure, trace
from afore.workers.migrator import Migrator, Readiness
from afore.workers.reader import Turn
from afore.workers.staging import Staging

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SequencerCounts:
    """What became of the targets."""

    run: int = 0
    skipped: int = 0
    """Aborted before their inputs came."""
    missing: int = 0
    """Targets whose inputs passed their deadline."""
    mismatched: int = 0
    """Targets whose inputs were not the demand that was planned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencerTimes:
    """Deadlines, in microseconds."""

    target_us: float
    """From a target's plan to its inputs; then it is reported missing, and goes on waiting for them or for an ABORT."""
    submission_us: float
    """For a copy to be submitted once every earlier target has been enqueued: a matter of turns, not of time."""
    compute_us: float
    """For a target's compute to finish."""


class TargetReports(Protocol):
    """Feedback to the scheduler."""

    async def finished(self, flight: Flight, measures: Measures) -> None: ...

    async def missing(self, entry: PlanEntry) -> None: ...

    async def skipped(self, turn: Turn) -> None: ...

    async def aborted(self, sequence: int) -> None: ...


class MakeCompute(Protocol):
    """Makes what a stream runs for one target: ``TargetCompute``, or a device's own."""

    def __call__(self, entry: PlanEntry, staging: Staging, kernels: Any, store: Store) -> TargetCompute: ...


class Sequencer:
    """One FFN worker's execution, in order.

    ``staging_M``: the buffers of each microbatch. ``wake`` is set when inputs may have come; the sequencer sets it itself when
    something is aborted.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: Device,
        store: Store,
        group: Group,
        wake: Signal,
        migrator: Migrator,
        staging_M: list[Staging],
        clock: Clock,
        tracer: Tracer,
        times: SequencerTimes,
        tile_tokens: int,
        reports: TargetReports,
        make_compute: MakeCompute = TargetCompute,
    ) -> None:
        self._make_compute = make_compute
        self._rank = rank
        self._device = device
        self._stream = device.model_stream
        self._collectives = collective_streams(device)
        gathering, reducing = self._collectives
        self._streams = tuple(dict.fromkeys((gathering, self._stream, reducing)))
        """Each of them once, in a target's order."""
        self._store = store
        self._group = group
        self._migrator = migrator
        self._staging_M = staging_M
        self._clock = clock
        self._tracer = tracer
        self._times = times
        self._tile_tokens = tile_tokens
        self._reports = reports
        self._turns: Handover[Turn] = Handover()
        self._flights: Handover[Flight] = Handover()
        self._aborted: set[int] = set()
        self._passed = -1
        self._wake = wake
        self._last_done: Event | None = None
        self.counts = SequencerCounts()

    # Called by the reader

    def put(self, turn: Turn) -> None:
        self._turns.put(turn)

    async def abort(self, sequence: int) -> None:
        # One that has had its turn is computed and replied: its microbatch is announced anew under another step all the same.
        if sequence > self._passed:
            self._aborted.add(sequence)
            self._wake.set()
        await self._reports.aborted(sequence)

    # The two loops

    async def run(self) -> None:
        """One target after another, by sequence. Never returns."""
        while True:
            turn = await self._turns.take()
            entry = turn.entry
            is_target = entry.kind is EntryKind.PLAN
            arrived = is_target and await self._inputs(turn)
            self._migrator.arrived(entry.sequence, self._last_done)
            if arrived:
                copies = await self._submissions(entry)
                staging = self._staging_M[entry.target.microbatch]
                await staging.take()
                self._enqueue(turn, staging, copies)
            elif is_target:
                self._migrator.skipped(entry.sequence)
                self._group.skip(entry)
                self.counts.skipped += 1
                await self._reports.skipped(turn)
            self._passed = entry.sequence
            self._aborted.discard(entry.sequence)

    async def complete(self) -> None:
        """Replies and feedback, in the order of the stream. Never returns."""
        while True:
            flight = await self._flights.take()
            await flight.done.wait(timeout_us=self._times.compute_us)
            flight.compute.settle()
            begin_ns = self._clock.now_ns()
            await self._group.reply(flight.entry)
            target, sequence = flight.entry.target, flight.entry.sequence
            self._tracer.span("reply", target, begin_ns, self._clock.now_ns(), sequence=sequence)
            measures = measure(flight, self._tile_tokens)
            flight.staging.give_back()
            trace(flight, self._tracer)
            self.counts.run += 1
            self.counts.mismatched += flight.compute.mismatched
            await self._reports.finished(flight, measures)

    # Phases

    async def _inputs(self, turn: Turn) -> bool:
        """Awaits all inputs of the target (true) or its ABORT (false). Past the deadline the scheduler is told, once."""
        entry = turn.entry
        due_ns: float | None = turn.read_ns + self._times.target_us * 1e3
        while True:
            self._wake.clear()
            if entry.sequence in self._aborted:
                return False
            if not self._group.missing(entry):
                return True
            if not await self._wake.wait(None if due_ns is None else max(0.0, due_ns - self._clock.now_ns()) / 1e3):
                due_ns = None
                await self._tell_missing(entry)

    async def _tell_missing(self, entry: PlanEntry) -> None:
        missing = self._group.missing(entry)
        if not missing or entry.sequence in self._aborted:
            return
        self.counts.missing += 1
        _log.warning(
            "%s: inputs of %s from %s have not come within %g s of their plan; waiting for them or for an abort",
            member_name(FFN, self._rank),
            entry.target,
            ", ".join(member_name(ATTENTION, a) for a in missing),
            self._times.target_us / 1e6,
        )
        await self._reports.missing(entry)

    async def _submissions(self, entry: PlanEntry) -> list[Readiness]:
        """The copies behind every slot that the plan names here, submitted by now; their completion is the stream's business."""
        layer = entry.target.layer
        return [
            await self._migrator.submitted(layer, share.slot, share.generation, timeout_us=self._times.submission_us)
            for share in entry.shares_of(self._rank)
        ]

    def _enqueue(self, turn: Turn, staging: Staging, copies: list[Readiness]) -> None:
        """gather → wait for the slots → partition → experts → reduce, each behind the one before; nothing is awaited."""
        entry, stream = turn.entry, self._stream
        gathering, reducing = self._collectives
        compute = self._make_compute(entry, staging, self._device.kernels, self._store)
        target, tokens = entry.target, sum(entry.tokens_A)
        begin_ns = self._clock.now_ns()
        began = gathering.record()
        self._group.gather(gathering, entry, staging)
        if gathering is not stream:
            stream.wait(gathering.record())
        reached = stream.record()
        for copy in copies:
            stream.wait(copy.event)
        ready = stream.record()
        stream.run(Work("partition", target, tokens=tokens), compute.partition)
        split = stream.record()
        stream.run(Work("experts", target, tokens=tokens), compute.experts)
        computed = stream.record()
        if reducing is not stream:
            reducing.wait(computed)
        self._group.reduce(reducing, entry, staging)
        done = self._last_done = reducing.record()
        for each in self._streams:
            each.flush()
        self._migrator.enqueued(entry.sequence, computed)
        self._flights.put(
            Flight(
                entry=entry,
                refused=turn.refused,
                taken_ns=turn.taken_ns,
                staging=staging,
                copies=copies,
                compute=compute,
                began=began,
                reached=reached,
                ready=ready,
                split=split,
                computed=computed,
                done=done,
            )
        )
        self._tracer.span("ready", entry.target, begin_ns, self._clock.now_ns(), sequence=entry.sequence)
