"""Two schedulers side by side, one with the compiled call and one without it: every event happens to both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core import control
from afore.core.clock import LoopClock
from afore.core.config import TimeOptions
from afore.core.plan import PlanEntry, Verdict
from afore.core.target import Phase, Target
from afore.core.trace import Span, Tracer
from afore.scheduler.costs import CostModel, Costs
from afore.scheduler.demand_book import DemandBook
from afore.scheduler.hot_path import HotPath, compiled_cells
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.base import PolicyContext
from afore.scheduler.policies.registry import make_policy
from afore.scheduler.publisher import Publisher
from afore.scheduler.service import Planning
from afore.scheduler.stats import RunStats
from afore.testing import virtual_now_ns
from afore.transport.feedback import FeedbackFlags, FeedbackLayout, FeedbackReader, FeedbackRecord, FeedbackWriter
from afore.transport.mailbox import Mailbox, MailboxLayout, pack_demand
from afore.transport.ring import RingReader, RingWriter
from afore.transport.ring_layout import RingLayout

EPOCH = 3
LAYERS = 2
RING_SLOTS = 6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a case."""

    config: PlannerConfig
    primaries_E: NDArray[np.int32]
    attention: int
    microbatches: int
    policy: str
    costs: Costs
    adapt: bool


class Side:
    """One scheduler with its memory; the test writes what workers would write."""

    def __init__(self, shape: Shape, *, hot: bool) -> None:
        config, N = shape.config, shape.config.num_workers
        R = int(config.slots_N.max())
        ring_layout = RingLayout(
            num_readers=N,
            num_slots=RING_SLOTS,
            num_attention=shape.attention,
            max_shares=N * R,
            max_copies=config.budget,
            num_experts=config.num_experts,
            num_redundant=max(R, 1),
        )
        self.ring_memory = memoryview(bytearray(ring_layout.nbytes))
        self.mailbox_layout = MailboxLayout(shape.attention, shape.microbatches, config.num_experts)
        self.mailbox_memory = memoryview(bytearray(self.mailbox_layout.nbytes))
        feedback_layout = FeedbackLayout(num_workers=N)
        self._feedback = memoryview(bytearray(feedback_layout.nbytes))
        self._writers = [FeedbackWriter(feedback_layout, worker) for worker in range(N)]
        self.ring = RingWriter(self.ring_memory, ring_layout, EPOCH)
        self.readers = [RingReader(self.ring_memory, ring_layout, worker, EPOCH) for worker in range(N)]
        self.reports: list[control.Message] = []
        self.rung: list[int] = []
        self.watched = False
        clock = LoopClock()
        costs = CostModel(
            shape.costs, num_layers=LAYERS, frozen=not shape.adapt, recent=3, warmup=1, costs_N=config.costs_N
        )
        mailbox = Mailbox(self.mailbox_memory, self.mailbox_layout, EPOCH)
        self.policy = make_policy(
            shape.policy,
            PolicyContext(
                planner=config,
                primaries_E=shape.primaries_E,
                num_layers=LAYERS,
                num_microbatches=shape.microbatches,
                costs=costs.layer,
            ),
        )
        cells = compiled_cells(self.policy, mailbox, self.ring) if hot else None
        self.publisher = Publisher(self.ring, epoch=EPOCH, num_layers=LAYERS, now_ns=clock.now_ns, cells=cells)
        self.cells = cells
        self.hot: HotPath | None = None
        if cells is not None:
            assert isinstance(self.policy, Afore)
            self.hot = HotPath(self.policy, cells, mailbox, self.ring, epoch=EPOCH, publisher=self.publisher)
        self.stats = RunStats(
            num_layers=LAYERS,
            num_workers=N,
            tile_tokens=config.tile_tokens,
            primaries_E=shape.primaries_E,
            costs_N=config.costs_N,
        )
        self.tracer = Tracer("scheduler-0", clock, None, listener=lambda _process, spans: self.traced.extend(spans))
        self.traced: list[Span] = []
        self.planning = Planning(
            clock=clock,
            tracer=self.tracer,
            times=TimeOptions(lease_s=1.0),
            policy=self.policy,
            costs=costs,
            book=DemandBook(
                num_layers=LAYERS,
                num_experts=config.num_experts,
                num_microbatches=shape.microbatches,
                take=mailbox.take,
                now_ns=clock.now_ns,
            ),
            ring=self.ring,
            publisher=self.publisher,
            feedback=FeedbackReader(self._feedback, feedback_layout, EPOCH),
            stats=self.stats,
            num_layers=LAYERS,
            num_workers=N,
            ring_bells=self._ring_bells,
            report=self._report,
            watched=lambda: self.watched,
            hot=self.hot,
        )

    async def _ring_bells(self, sequence: int) -> None:
        self.rung.append(sequence)

    async def _report(self, message: control.Message) -> None:
        self.reports.append(message)

    def write_vector(
        self, attention: int, target: Target, demand_E: NDArray[np.int32], *, torn: int = -1, epoch: int = EPOCH
    ) -> None:
        """The vector lands; with ``torn``, one of its bytes does not."""
        packed = bytearray(pack_demand(epoch, target, attention, Phase.DECODE, demand_E))
        if torn >= 0:
            packed[torn % len(packed)] ^= 0x41
        offset = self.mailbox_layout.offset(attention, target.microbatch)
        self.mailbox_memory[offset : offset + len(packed)] = packed

    def write_record(self, worker: int, record: FeedbackRecord) -> None:
        offset, packed = self._writers[worker].next(record)
        self._feedback[offset : offset + len(packed)] = packed

    def read(self, refused: bool) -> list[PlanEntry]:
        """All workers read, judge and pass everything there is; with ``refused`` the last of them refuses the first entry."""
        seen: list[PlanEntry] = []
        while isinstance(entry := self.readers[0].peek(), PlanEntry):
            for reader in self.readers:
                last = reader is self.readers[-1]
                verdict = Verdict.BINDING_DISAGREES if refused and last and not seen else Verdict.ACCEPTED
                found = reader.peek()
                assert isinstance(found, PlanEntry), found
                reader.store_verdict(entry.sequence, verdict)
            for reader in self.readers:
                reader.advance(virtual_now_ns())
            seen.append(entry)
        assert self.readers[0].peek() is None
        return seen

    def moments(self) -> list[Span]:
        """What was traced since the last call, but for spans, whose cuts differ."""
        self.tracer.flush()
        found = [span for span in self.traced if span.kind == "instant"]
        self.traced.clear()
        return found

    async def statistics(self) -> Any:
        return json.loads(await self.planning.statistics())


def record_of(entry: PlanEntry, worker: int, rng: np.random.Generator, *, missing: bool) -> FeedbackRecord:
    """What a worker says of an entry."""
    return FeedbackRecord(
        epoch=EPOCH,
        sequence=entry.sequence,
        worker=worker,
        target=entry.target,
        tile_us=float(rng.integers(1, 50)),
        copy_us=float(rng.integers(1, 200)),
        window_us=float(rng.integers(0, 300)),
        copies=1,
        tiles=1,
        flags=FeedbackFlags.MISSING if missing else FeedbackFlags.NONE,
    )
