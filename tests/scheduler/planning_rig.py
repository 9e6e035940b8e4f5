"""``Planning`` over real regions: the test plays the attention workers, the FFN workers and the engine, one event at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from afore.core import control
from afore.core.clock import LoopClock
from afore.core.config import TimeOptions
from afore.core.plan import EntryKind, PlanEntry, Verdict
from afore.core.slots import contiguous_primaries
from afore.core.target import Phase, Target
from afore.core.trace import Tracer
from afore.scheduler.costs import CostModel, Costs
from afore.scheduler.demand_book import DemandBook
from afore.scheduler.policies.base import Action, Assign, Demand, Quiet
from afore.scheduler.publisher import Publisher
from afore.scheduler.service import Planning
from afore.scheduler.stats import RunStats
from afore.testing import virtual_now_ns
from afore.transport.feedback import FeedbackFlags, FeedbackLayout, FeedbackReader, FeedbackRecord, FeedbackWriter
from afore.transport.mailbox import Mailbox, MailboxLayout, pack_demand
from afore.transport.ring import RingReader, RingWriter
from afore.transport.ring_layout import RingLayout

EPOCH = 5
LAYERS, WORKERS, EXPERTS, MICROBATCHES, SLOTS = 3, 2, 4, 2, 8


class Scripted(Quiet):
    """A policy that answers as the test says; it remembers what it was told."""

    name = "scripted"
    wants_inputs = True

    def __init__(self) -> None:
        self.reset: list[int] = []
        self.asked: list[Target] = []
        self.answer: Callable[[Target], list[Action]] = lambda target: [Assign(target, ())]
        self.late_answer: Callable[[Target], list[Action]] = lambda target: [Assign(target, ())]

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        self.asked.append(target)
        return self.answer(target)

    def on_inputs(self, target: Target, now_us: float) -> list[Action]:
        self.asked.append(target)
        return self.late_answer(target)

    def reset_layer(self, layer: int) -> None:
        self.reset.append(layer)


class Rig:
    """One attention worker, two FFN workers. Made inside a running loop."""

    def __init__(self) -> None:
        ring_layout = RingLayout(num_readers=WORKERS, num_slots=SLOTS, num_attention=1, max_shares=8, max_copies=8)
        ring = memoryview(bytearray(ring_layout.nbytes))
        self._mailbox_layout = MailboxLayout(1, MICROBATCHES, EXPERTS)
        self._mailbox = memoryview(bytearray(self._mailbox_layout.nbytes))
        feedback_layout = FeedbackLayout(num_workers=WORKERS)
        self._feedback = memoryview(bytearray(feedback_layout.nbytes))
        self._writers = [FeedbackWriter(feedback_layout, worker) for worker in range(WORKERS)]
        self.ring = RingWriter(ring, ring_layout, EPOCH)
        self.readers = [RingReader(ring, ring_layout, worker, EPOCH) for worker in range(WORKERS)]
        self.policy = Scripted()
        self.reports: list[control.Message] = []
        self.rung: list[int] = []
        """Sequences for which bells were rung."""
        self.bell = asyncio.Event()
        """Set with each of them."""
        mailbox = Mailbox(self._mailbox, self._mailbox_layout, EPOCH)
        primaries_E = contiguous_primaries(EXPERTS, WORKERS)
        clock = LoopClock()
        self.stats = RunStats(num_layers=LAYERS, num_workers=WORKERS, tile_tokens=1, primaries_E=primaries_E)
        self.publisher = Publisher(self.ring, epoch=EPOCH, num_layers=LAYERS, now_ns=clock.now_ns)
        self.planning = Planning(
            clock=clock,
            tracer=Tracer("scheduler-0", clock, None),
            times=TimeOptions(lease_s=1.0),
            policy=self.policy,
            costs=CostModel(Costs(tile_us=1, copy_us=1, window_us=1), num_layers=LAYERS),
            book=DemandBook(num_layers=LAYERS, num_experts=EXPERTS, num_microbatches=MICROBATCHES, take=mailbox.take),
            ring=self.ring,
            publisher=self.publisher,
            feedback=FeedbackReader(self._feedback, feedback_layout, EPOCH),
            stats=self.stats,
            num_layers=LAYERS,
            num_workers=WORKERS,
            ring_bells=self._ring_bells,
            report=self._report,
            watched=lambda: False,
        )

    async def _ring_bells(self, sequence: int) -> None:
        self.rung.append(sequence)
        self.bell.set()

    async def _report(self, message: control.Message) -> None:
        self.reports.append(message)

    # The roles' parts

    async def announce(self, microbatch: int, step: int) -> None:
        await self.planning.announced(control.Announce(microbatch, step, (2,)))

    def write_demand(self, target: Target) -> None:
        """The vector lands; its bell is still to ring."""
        demand_E = np.array([2, 0, 0, 0], np.int32)
        packed = pack_demand(EPOCH, target, 0, Phase.DECODE, demand_E)
        offset = self._mailbox_layout.offset(0, target.microbatch)
        self._mailbox[offset : offset + len(packed)] = packed

    async def demand(self, layer: int, microbatch: int, step: int) -> None:
        self.write_demand(Target(layer, microbatch, step))
        await self.planning.demand_arrived([microbatch])

    def write_record(
        self, worker: int, sequence: int, target: Target, flags: FeedbackFlags = FeedbackFlags.NONE
    ) -> None:
        """The record lands; its bell is still to ring."""
        record = FeedbackRecord(epoch=EPOCH, sequence=sequence, worker=worker, target=target, flags=flags)
        offset, packed = self._writers[worker].next(record)
        self._feedback[offset : offset + len(packed)] = packed

    async def record(
        self, worker: int, sequence: int, target: Target, flags: FeedbackFlags = FeedbackFlags.NONE
    ) -> None:
        self.write_record(worker, sequence, target, flags)
        await self.planning.feedback_arrived()

    def read(self, verdicts: Sequence[Verdict] = (Verdict.ACCEPTED,) * WORKERS) -> PlanEntry:
        """Both workers read and judge the next entry, and move past it."""
        entries = []
        for reader, verdict in zip(self.readers, verdicts, strict=True):
            entry = reader.peek()
            assert isinstance(entry, PlanEntry), entry
            reader.store_verdict(entry.sequence, verdict)
            entries.append(entry)
        for reader in self.readers:
            reader.advance(virtual_now_ns())
        assert entries[0] == entries[1]
        return entries[0]

    async def read_next(self, verdicts: Sequence[Verdict] = (Verdict.ACCEPTED,) * WORKERS) -> PlanEntry:
        """Like ``read``, once there is something."""
        while self.readers[0].peek() is None:
            self.bell.clear()
            await self.bell.wait()
        return self.read(verdicts)

    def read_all(self) -> list[tuple[EntryKind, Target]]:
        """Everything that is published."""
        seen = []
        while self.readers[0].peek() is not None:
            entry = self.read()
            seen.append((entry.kind, entry.target))
        return seen
