"""Moves experts into redundant slots without ever touching weights that someone still reads (paper §6.2, S and Copy of Figure 7).

The three rules:

1. A copy is held until every earlier target that uses its slot has *enqueued* its compute. Then it is submitted behind a stream
   wait for that use. (Waiting on an event that nobody has recorded yet would be no wait at all.)
2. Before the sequencer enqueues a target's waits, it awaits the *submission* (never the completion) of every copy that the
   target's plan names: ``submitted``. The same reason, seen from the other side.
3. Readiness belongs to (layer, slot, generation), generation being the sequence of the entry that copies: a target waits for
   what its own plan names, also where an earlier plan is still filling the slot.

A copy that nobody needs any more still lands, and an ABORT cancels none: the scheduler's projection stays true.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from afore.core.clock import Clock, deadline
from afore.core.errors import DeadlineExceeded, SlotError
from afore.core.handover import Handover
from afore.core.plan import PlanEntry
from afore.core.record import record
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.workers.device.base import CopyJob, Device, Event, Work
from afore.workers.slot_table import HeldCopy, SlotTable

_log = logging.getLogger(__name__)


@record
class Readiness:
    """A submitted copy: (layer, slot, generation) may be read after ``event``."""

    layer: int
    slot: int
    expert: int
    generation: int
    target: Target
    """Of the entry that asked for the copy."""
    submitted_ns: int
    begun: Event
    """The migration stream is past the uses that the copy waited for."""
    event: Event
    ahead: bool = False
    """It came ahead of any target, and none has asked for it yet: the first that does counts it as its own."""
    fetched: bool = False
    """Its source was brought from another node, from ``submitted_ns`` on."""


@record
class _Fetch:
    """A copy that waits for its source."""

    held: HeldCopy
    before: Event | None
    since_ns: int


@dataclass(slots=True)
class MigrationCounts:
    """What the progress watch looks at."""

    submitted: int = 0
    landed: int = 0
    overdue: int = 0
    """Times a copy was found still running after the watch's patience."""


class RemoteExperts(Protocol):
    """Primaries on other nodes, which must be brought here before they can be copied."""

    def has(self, held: HeldCopy) -> bool: ...

    async def fetch(self, held: HeldCopy) -> None: ...


class Migrator:
    """One worker's copies. The reader gives it entries, the sequencer tells it what has run; ``run`` watches copies land.

    ``make_job`` turns a held copy into the device's job: source, destination, bytes and the closure that copies.
    """

    def __init__(
        self,
        *,
        name: str,
        table: SlotTable,
        device: Device,
        clock: Clock,
        tracer: Tracer,
        make_job: Callable[[HeldCopy], CopyJob],
        patience_us: float,
        remote: RemoteExperts | None = None,
    ) -> None:
        self._name = name
        self._remote = remote
        self._to_fetch: Handover[_Fetch] = Handover()
        self._coming: Counter[tuple[int, int]] = Counter()
        """Copies into each slot whose sources are being fetched: what comes after them into the slot waits for its turn."""
        self._table = table
        self._stream = device.migration_stream
        self._clock = clock
        self._tracer = tracer
        self._make_job = make_job
        self._patience_us = patience_us
        self._ready: dict[tuple[int, int], Readiness] = {}
        """The newest *submitted* copy of each slot. Its generation cannot be overtaken while a target still needs it: the next
        copy into the slot is held until that target has enqueued."""
        self._last_use: dict[tuple[int, int], Event] = {}
        self._any_submitted = asyncio.Event()
        self._flying: Handover[list[Readiness]] = Handover()
        self.counts = MigrationCounts()

    # Called by the reader

    def take(self, entry: PlanEntry) -> None:
        """Takes an entry that all N accepted, in ring order: notes which slots its target uses, and its copies."""
        self._table.apply(entry)
        self._start()

    # Called by the sequencer

    def arrived(self, sequence: int, before: Event | None) -> None:
        """The entry's turn has come: its start=arrival copies may go, once the stream is past ``before`` (the target ahead of it).

        The host runs ahead of the stream: without that wait the copies would overlap with compute after all.
        """
        if self._table.arrived(sequence):
            self._start(sequence, before)

    def enqueued(self, sequence: int, use: Event) -> None:
        """The target's compute is enqueued and ``use`` recorded behind it: after ``use`` its slots may be overwritten."""
        for key in self._table.let_go(sequence, enqueued=True):
            self._last_use[key] = use
        self._start()

    def skipped(self, sequence: int) -> None:
        """The target will not run here: it lets go of its slots. Its copies stay."""
        self._table.let_go(sequence, enqueued=False)
        self._start()

    async def submitted(self, layer: int, slot: int, generation: int, *, timeout_us: float) -> Readiness:
        """Awaits the submission of the copy that made this generation; its event is recorded by then.

        Raises ``DeadlineExceeded`` when the copy stays held, ``SlotError`` when the slot was filled anew meanwhile (a defect).
        """
        key = (layer, slot)
        ready = self._ready.get(key)
        if ready is None or ready.generation < generation:
            async with deadline(
                timeout_us,
                peer=self._name,
                operation=f"submission of the copy of generation {generation} into layer {layer} slot {slot}",
                hint="an earlier target still holds the slot; see the trace of this worker",
            ):
                while ready is None or ready.generation < generation:
                    self._any_submitted.clear()
                    await self._any_submitted.wait()
                    ready = self._ready.get(key)
        if ready.generation != generation:
            raise SlotError(
                f"{self._name}: layer {layer} slot {slot} holds generation {ready.generation}, but a target of generation "
                f"{generation} has not run yet"
            )
        if ready.ahead:
            self._ready[key] = replace(ready, ahead=False)
        return ready

    # Watching

    async def run(self) -> None:
        """Awaits each batch of copies, in order; warns about copies that do not land, and goes on waiting. Never returns."""
        while True:
            batch = await self._flying.take()
            while True:
                try:
                    await batch[0].event.wait(timeout_us=self._patience_us)
                    break
                except DeadlineExceeded:
                    self.counts.overdue += 1
                    self._tracer.counter("copies_overdue", self._clock.now_ns(), self.counts.overdue)
                    _log.warning(
                        "%s: %d copies submitted for %s have not landed after %g s; later targets that need them wait",
                        self._name,
                        len(batch),
                        batch[0].target,
                        (self._clock.now_ns() - batch[0].submitted_ns) / 1e9,
                    )
            for ready in batch:
                self._landed(ready)

    def _landed(self, ready: Readiness) -> None:
        self.counts.landed += 1
        self._table.landed(ready.layer, ready.slot, ready.generation)
        self._tracer.span(
            "copy",
            ready.target,
            ready.begun.completed_ns,
            ready.event.completed_ns,
            submitted_ns=ready.submitted_ns,
            sequence=ready.generation,
            layer=ready.layer,
            slot=ready.slot,
            generation=ready.generation,
            expert=ready.expert,
        )

    # Submitting

    def _start(self, arrived: int = -1, before: Event | None = None) -> None:
        """Submits what may start. Copies of the entry ``arrived`` also wait for ``before``."""
        startable = self._table.take_startable()
        if self._remote is not None:
            startable = [held for held in startable if not self._set_aside(self._remote, held, arrived, before)]
        self._submit_all(startable, arrived, before)

    def _set_aside(self, remote: RemoteExperts, held: HeldCopy, arrived: int, before: Event | None) -> bool:
        """Whether a copy must wait for its source, or behind one that does."""
        key = (held.layer, held.slot)
        if remote.has(held) and not self._coming[key]:
            return False
        self._coming[key] += 1
        self._to_fetch.put(_Fetch(held, before if held.generation == arrived else None, self._clock.now_ns()))
        return True

    async def fetch(self) -> None:
        """Brings sources from other nodes, one after another, and submits their copies. Never returns."""
        assert self._remote is not None
        while True:
            waiting = await self._to_fetch.take()
            held = waiting.held
            if not self._remote.has(held):
                await self._remote.fetch(held)
            self._coming[held.layer, held.slot] -= 1
            self._submit_all([held], held.generation, waiting.before, since_ns=waiting.since_ns)

    def _submit_all(
        self, startable: Sequence[HeldCopy], arrived: int, before: Event | None, since_ns: int | None = None
    ) -> None:
        if not startable:
            return
        # A batch has one completion event, and its copies may run side by side: two fills of one slot must not share one, and
        # what need not wait for a use goes ahead of what must.
        free: list[HeldCopy] = []
        behind: list[HeldCopy] = []
        again: list[HeldCopy] = []
        uses: list[Event] = []
        seen: set[tuple[int, int]] = set()
        for held in startable:
            key = (held.layer, held.slot)
            if key in seen:
                again.append(held)
                continue
            seen.add(key)
            waits = self._uses_ahead(key)
            if before is not None and held.generation == arrived:
                waits.append(before)
            waits = [use for use in waits if not use.done]
            uses += waits
            (behind if waits else free).append(held)
        if free:
            self._submit(free, (), since_ns)
        if behind:
            self._submit(behind, uses, since_ns)
        for held in again:
            self._submit([held], (), since_ns)
        self._any_submitted.set()

    def _uses_ahead(self, key: tuple[int, int]) -> list[Event]:
        """The compute that last read the slot. The model stream is in order: it stands for all before it."""
        use = self._last_use.pop(key, None)
        return [] if use is None else [use]

    def _submit(self, batch: Sequence[HeldCopy], uses: Sequence[Event], since_ns: int | None) -> None:
        """``since_ns``: when the copy could have been submitted, had its source been here; its time counts from there."""
        begin_ns = self._clock.now_ns() if since_ns is None else since_ns
        target = batch[0].target
        for use in dict.fromkeys(uses):
            self._stream.wait(use)
        begun = self._stream.record()
        jobs = [self._make_job(held) for held in batch]
        self._stream.copy(Work("copy", target, nbytes=sum(job.nbytes for job in jobs)), jobs)
        event = self._stream.record()
        self._stream.flush()
        submitted = [
            Readiness(
                layer=held.layer,
                slot=held.slot,
                expert=held.expert,
                generation=held.generation,
                target=held.target,
                submitted_ns=begin_ns,
                begun=begun,
                event=event,
                ahead=held.ahead,
                fetched=since_ns is not None,
            )
            for held in batch
        ]
        for ready in submitted:
            self._ready[ready.layer, ready.slot] = ready
        self.counts.submitted += len(batch)
        self._flying.put(submitted)
        self._tracer.span(
            "submit", target, begin_ns, self._clock.now_ns(), sequence=batch[0].generation, copies=len(batch)
        )
