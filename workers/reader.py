"""Reads the plan ring: every entry as soon as it is published, in order, far ahead of execution (R and S of Figure 7).

    judge → store verdict → (wait for all N) → copies to the migrator, target to the sequencer → move the cursor

Any refusal: no copies, no bindings, the target runs on primaries everywhere. All workers see the same N verdicts, so all agree.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from afore.core.clock import Clock
from afore.core.errors import DeadlineExceeded, WireError
from afore.core.limits import PATIENT_SHARE
from afore.core.plan import EntryKind, PlanEntry, Verdict
from afore.core.record import record
from afore.core.signal import Signal
from afore.core.topology import FFN, SCHEDULER, member_name
from afore.core.trace import Tracer
from afore.transport.entry import Refusal
from afore.transport.ring import RingReader
from afore.transport.ring_mirror import RingCopies
from afore.workers.migrator import Migrator
from afore.workers.slot_table import SlotTable

_log = logging.getLogger(__name__)


@record
class Turn:
    """An entry on its way to execution. ``entry`` has no shares and copies where its plan was refused."""

    entry: PlanEntry
    refused: bool
    read_ns: int
    """When it was read."""
    taken_ns: int
    """When all N had judged it: its copies could start from here on."""


class TurnQueue(Protocol):
    """The sequencer, as the reader sees it."""

    def put(self, turn: Turn) -> None:
        """Takes the next entry in order."""
        ...

    async def abort(self, sequence: int) -> None:
        """The target of this sequence is cancelled: skip it if its inputs are still awaited."""
        ...


@dataclass(slots=True)
class ReadCounts:
    """What was read. ``refused`` counts plans refused by any worker, ``refused_here`` those that this one refused."""

    entries: int = 0
    refused: int = 0
    refused_here: int = 0
    aborts: int = 0


class Reader:
    """One worker's reading of the ring. ``plan_bell`` and ``verdict_bell`` are set when those bells ring (hints only);
    ``ring_neighbours`` wakes the other FFN workers of this node once the set of verdicts of a sequence is complete; ``copies``
    tells other nodes, where FFN workers are on several.
    """

    def __init__(
        self,
        *,
        rank: int,
        ring: RingReader,
        table: SlotTable,
        migrator: Migrator,
        turns: TurnQueue,
        clock: Clock,
        tracer: Tracer,
        plan_bell: Signal,
        verdict_bell: Signal,
        ring_neighbours: Callable[[int], Awaitable[None]],
        verdict_timeout_us: float,
        copies: RingCopies | None = None,
    ) -> None:
        self._rank = rank
        self._ring = ring
        self._table = table
        self._migrator = migrator
        self._turns = turns
        self._clock = clock
        self._tracer = tracer
        self._plan_bell = plan_bell
        self._verdict_bell = verdict_bell
        self._ring_neighbours = ring_neighbours
        self._verdict_timeout_us = verdict_timeout_us
        self._copies = copies
        self.counts = ReadCounts()

    async def run(self) -> None:
        """Never returns. Raises ``DeadlineExceeded`` naming who has not judged an entry, ``WireError`` for an unreadable one."""
        while True:
            self._plan_bell.clear()
            published = self._ring.peek()
            if published is None:
                await self._plan_bell.wait()
                continue
            begin_ns = self._clock.now_ns()
            entry, verdict = await self._judge(published)
            agreed = await self._agree(entry, verdict)
            await self._act(entry, agreed, begin_ns)
            self._ring.advance(self._clock.now_ns())
            if self._copies is not None:
                await self._copies.cursor(self._ring.sequence)
            self._tracer.span("read", entry.target, begin_ns, self._clock.now_ns(), sequence=entry.sequence)

    # Judge

    async def _judge(self, published: PlanEntry | Refusal) -> tuple[PlanEntry, Verdict]:
        if isinstance(published, PlanEntry):
            verdict = self._table.judge(published)
            if verdict is not Verdict.ACCEPTED:
                self._warn_refused(
                    published.sequence, verdict, "its bindings are not those of this worker's slot table"
                )
            return published, verdict
        self._warn_refused(published.sequence, published.verdict, published.reason)
        if published.entry is None:
            # Without its header nobody knows which target this is: it could not even run on primaries.
            self._ring.store_verdict(published.sequence, published.verdict)
            if self._copies is not None:
                await self._copies.verdict(published.sequence, published.verdict)
            raise WireError(
                member_name(SCHEDULER, 0), f"ring entry {published.sequence} cannot be read: {published.reason}"
            )
        return published.entry, published.verdict

    def _warn_refused(self, sequence: int, verdict: Verdict, reason: str) -> None:
        self.counts.refused_here += 1
        _log.warning(
            "%s refuses plan %d (%s): %s; its target runs on primaries",
            member_name(FFN, self._rank),
            sequence,
            verdict.name,
            reason,
        )

    # Agree

    async def _agree(self, entry: PlanEntry, verdict: Verdict) -> bool:
        """Whether all N workers accept."""
        completed = self._ring.store_verdict(entry.sequence, verdict)
        if self._copies is not None:
            await self._copies.verdict(entry.sequence, verdict)
        if verdict is Verdict.ACCEPTED and not self._table.needs_agreement(entry):
            # No binding is made, used or copied: the target runs on primaries whatever the others say, so nobody need wait.
            return True
        if completed:
            await self._ring_neighbours(entry.sequence)
        if verdict is not Verdict.ACCEPTED:
            # One refusal decides, and it is mine.
            return False
        verdicts = await self._all_verdicts(entry.sequence)
        return verdicts.count(Verdict.ACCEPTED) == len(verdicts)

    async def _all_verdicts(self, sequence: int) -> tuple[Verdict, ...]:
        ring = self._ring
        begin_ns = self._clock.now_ns()
        until_ns = begin_ns + self._verdict_timeout_us * 1e3 * PATIENT_SHARE
        rang, warned = True, False
        while True:
            self._verdict_bell.clear()
            verdicts = ring.all_verdicts(sequence)
            if verdicts is not None:
                return verdicts
            if not rang:
                late = ", ".join(
                    member_name(FFN, w) for w, v in enumerate(ring.verdicts(sequence)) if v is Verdict.NONE
                )
                limit_s = self._verdict_timeout_us / 1e6
                if not warned:
                    waited_s = (self._clock.now_ns() - begin_ns) / 1e9
                    _log.warning(
                        "%s: no verdict on plan %d for %.3g s; after %g s it counts as lost",
                        late,
                        sequence,
                        waited_s,
                        limit_s,
                    )
                    until_ns, warned = begin_ns + self._verdict_timeout_us * 1e3, True
                    rang = True
                    continue
                raise DeadlineExceeded(
                    late,
                    f"no verdict on plan {sequence} within {limit_s:g} s",
                    "see its log; raise times.verdict_s",
                )
            rang = await self._verdict_bell.wait(max(0.0, until_ns - self._clock.now_ns()) / 1e3)

    # Act

    async def _act(self, entry: PlanEntry, agreed: bool, begin_ns: int) -> None:
        self.counts.entries += 1
        if entry.kind is EntryKind.ABORT:
            self.counts.aborts += 1
            self._tracer.instant(
                "abort", self._clock.now_ns(), entry.target, sequence=entry.sequence, cancels=entry.cancels
            )
            await self._turns.abort(entry.cancels)
            return
        if agreed:
            self._migrator.take(entry)
        else:
            self.counts.refused += 1
            self._tracer.instant("refused", self._clock.now_ns(), entry.target, sequence=entry.sequence)
            entry = replace(entry, shares=(), copies=())
        self._turns.put(Turn(entry, refused=not agreed, read_ns=begin_ns, taken_ns=self._clock.now_ns()))
