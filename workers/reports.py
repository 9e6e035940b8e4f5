"""What an FFN worker tells the scheduler of each target, one-sided: costs, missing inputs, targets it skipped.

A record of a target that ran as planned rings no bell: the scheduler looks through all records before its next plan, and nothing is
decided earlier. What somebody waits for rings: missing inputs, inputs that a policy asked for, and whatever ends an aborted target.
"""

from __future__ import annotations

from afore.core.plan import PlanEntry
from afore.core.target import Target
from afore.transport import bells
from afore.transport.api import Link, RegionKey
from afore.transport.feedback import FeedbackFlags, FeedbackLayout, FeedbackRecord, FeedbackWriter
from afore.transport.ringing import write_now_of
from afore.workers.flight import Flight
from afore.workers.measures import Measures
from afore.workers.reader import Turn


class Reports:
    """One worker's records into the scheduler's feedback region. ``link``: DEMAND lane."""

    def __init__(self, *, rank: int, layout: FeedbackLayout, link: Link, key: RegionKey, timeout_us: float) -> None:
        self._rank = rank
        self._writer = FeedbackWriter(layout, rank)
        self._link = link
        self._key = key
        self._write_now = write_now_of(link)
        self._timeout_us = timeout_us
        self._aborted = -1
        """The last sequence that an ABORT named: the scheduler waits for the records up to it."""

    async def aborted(self, sequence: int) -> None:
        """An ABORT of this sequence was read: its record may be there already, unannounced, or comes later."""
        self._aborted = max(self._aborted, sequence)
        await self._ring(0, b"")

    async def finished(self, flight: Flight, measures: Measures) -> None:
        """The target ran and its replies are written."""
        flags = FeedbackFlags.NONE
        if flight.refused:
            flags |= FeedbackFlags.REFUSED
        if flight.compute.mismatched and flight.entry.shares:
            flags |= FeedbackFlags.PRIMARIES
        await self._send(
            FeedbackRecord(
                epoch=flight.entry.epoch,
                sequence=flight.entry.sequence,
                worker=self._rank,
                target=flight.entry.target,
                tile_us=measures.tile_us,
                copy_us=measures.copy_us,
                window_us=measures.window_us,
                exposed_us=measures.exposed_us,
                slack_us=measures.slack_us,
                copies=measures.copies,
                tiles=measures.tiles,
                pairs=measures.pairs,
                replica_pairs=measures.replica_pairs,
                flags=flags,
            ),
            rings=flight.entry.sequence <= self._aborted,
        )

    async def missing(self, entry: PlanEntry) -> None:
        """The target's inputs are late: the scheduler aborts it, or they come after all."""
        await self._short(entry, FeedbackFlags.MISSING)

    async def inputs(self, epoch: int, target: Target) -> None:
        """An attention worker's inputs of a target are here, which has no entry yet."""
        await self._send(
            FeedbackRecord(epoch=epoch, sequence=0, worker=self._rank, target=target, flags=FeedbackFlags.INPUTS)
        )

    async def skipped(self, turn: Turn) -> None:
        """The target was aborted and this worker has passed it: a record without work."""
        await self._short(turn.entry, FeedbackFlags.REFUSED if turn.refused else FeedbackFlags.NONE)

    async def _short(self, entry: PlanEntry, flags: FeedbackFlags) -> None:
        record = FeedbackRecord(
            epoch=entry.epoch, sequence=entry.sequence, worker=self._rank, target=entry.target, flags=flags
        )
        await self._send(record)

    async def _send(self, record: FeedbackRecord, *, rings: bool = True) -> None:
        offset, packed = self._writer.next(record)
        if rings:
            await self._ring(offset, packed)
        else:
            if not self._write_now(self._key, offset, packed, None):
                await self._link.write(self._key, offset, packed, timeout_us=self._timeout_us)

    async def _ring(self, offset: int, data: bytes) -> None:
        bell = bells.FEEDBACK(self._rank)
        await self._link.write(self._key, offset, data, notify=bell, timeout_us=self._timeout_us)
