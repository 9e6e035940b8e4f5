"""Demand in, plans out; the one place where the execution order is made. ``afore.scheduler.role`` drives it.

    demand     a vector has come: is its target complete? (and predictions, where the policy wants them)
    plan       in one compiled call (``hot_way``), or the policy is asked (``plain_way``); every worker's bell rings (``outlet``)
    feedback   what targets cost goes into the cost model; a missing input aborts its target (``under_way``)

Planning is synchronous and takes microseconds; the only waits are for room in the ring, which ends with the slowest reader's lease.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

from afore.core import control
from afore.core.clock import Clock
from afore.core.config import TimeOptions
from afore.core.target import Target
from afore.core.trace import Tracer
from afore.scheduler.costs import CostModel
from afore.scheduler.demand_book import Complete, DemandBook
from afore.scheduler.hot_path import HotPath
from afore.scheduler.hot_way import HotWay
from afore.scheduler.outlet import Outlet, Ring
from afore.scheduler.plain_way import PlainWay, Report
from afore.scheduler.policies.base import Policy, policy_options
from afore.scheduler.prediction_book import PredictionBook
from afore.scheduler.publisher import Published, Publisher
from afore.scheduler.recorder import Recorder
from afore.scheduler.stats import RunStats
from afore.scheduler.traces.records import Event
from afore.scheduler.under_way import UnderWay
from afore.scheduler.warm_start import LayerCopies
from afore.transport.feedback import FeedbackFlags, FeedbackReader, FeedbackRecord
from afore.transport.ring import RingWriter
from afore.transport.session import Note, no_note

Came = Literal["demand", "inputs", "prediction"]
"""What is complete of a target."""


class Planning:
    """Everything between a complete demand and a published entry, for one epoch."""

    def __init__(
        self,
        *,
        clock: Clock,
        tracer: Tracer,
        times: TimeOptions,
        policy: Policy,
        costs: CostModel,
        book: DemandBook,
        ring: RingWriter,
        publisher: Publisher,
        feedback: FeedbackReader,
        stats: RunStats,
        num_layers: int,
        num_workers: int,
        ring_bells: Ring,
        report: Report,
        watched: Callable[[], bool],
        hot: HotPath | None = None,
        note: Note = no_note,
        recorder: Recorder | None = None,
        warm: LayerCopies | None = None,
        predictions: PredictionBook | None = None,
        charge_us: float = 0.0,
    ) -> None:
        """``hot``: the compiled way from demand to entry, where the policy has one; without it every target goes the plain way.
        ``note``: writes into a recording of the wire what its replay must know.
        ``recorder`` is told of what the policy does not see; ``policy`` is one that it records (``Recorded``) then.
        ``warm``: copies that go ahead of the first target; the policy has adopted them.
        ``predictions``: gathers them, for a policy that wants them; it has no compiled way.
        ``charge_us``: what every plan waits before it is made, as if it took so long.
        """
        assert hot is None or predictions is None
        self._clock = clock
        self._tracer = tracer
        self._policy = policy
        self._book = book
        self._predictions = predictions
        self._publisher = publisher
        self._feedback = feedback
        self._stats = stats
        self._report = report
        self._note = note
        self._recorder = recorder
        self._warm = warm or []
        self._outlet = Outlet(
            clock=clock,
            tracer=tracer,
            times=times,
            policy=policy.name,
            num_workers=num_workers,
            ring=ring,
            publisher=publisher,
            ring_bells=ring_bells,
            note=note,
        )
        self._under_way = UnderWay(num_workers=num_workers, costs=costs, stats=stats)
        self._plain = PlainWay(
            policy=policy,
            outlet=self._outlet,
            under_way=self._under_way,
            stats=stats,
            num_layers=num_layers,
            hear=self.feedback_arrived,
            report=report,
            watched=watched,
            inputs_complete=self._plan_with_inputs,
            recorder=recorder,
            charge_us=charge_us,
        )
        self._ask: dict[Came, Callable[[Complete], Awaitable[None]]] = {
            "demand": self._plain.with_demand,
            "inputs": self._plain.with_inputs,
            "prediction": self._plain.with_prediction,
        }
        self._hot = None
        if hot is not None:
            self._hot = HotWay(
                policy=policy,
                hot=hot,
                plain=self._plain,
                book=book,
                outlet=self._outlet,
                under_way=self._under_way,
                stats=stats,
                num_layers=num_layers,
                hear=self.feedback_arrived,
                report=report,
                watched=watched,
                recorder=recorder,
                charge_us=charge_us,
            )
        self._to_plan: deque[tuple[Complete, Came]] = deque()
        """Targets for the policy, and what has come of each."""
        self._planning = False

    # Events

    async def announced(self, announce: control.Announce) -> None:
        """The engine has begun a step."""
        while self._warm:
            layer, copies = self._warm.pop(0)
            await self._plain.fill(Target(layer, announce.microbatch, announce.step), copies)
        self._book.begin(announce.microbatch, announce.step, announce.tokens_A)
        if self._predictions is not None:
            self._predictions.begin(announce.microbatch, announce.step, announce.tokens_A)
        await self._look_for_demand(announce.microbatch)

    async def demand_arrived(self, microbatches: Sequence[int]) -> None:
        """Vectors of these microbatches have come in."""
        for microbatch in microbatches:
            await self._look_for_demand(microbatch)

    async def predictions_arrived(self, microbatches: Sequence[int]) -> None:
        """Predictions of these microbatches have come in."""
        assert self._predictions is not None
        for microbatch in microbatches:
            await self._plan_all(self._predictions.arrived(microbatch), "prediction")

    async def feedback_arrived(self, workers: Iterable[int] | None = None) -> None:
        """These workers (or any) have written records: costs, inputs, missing inputs, passed aborts."""
        records = self._feedback.take_all(workers)
        if records:
            # A replay must hear them where they were heard: costs, and with them plans, depend on it.
            self._note("heard", self._feedback.taken_N)
        for record in records:
            if record.flags:
                await self._take_record(record)
            elif (aborted := self._under_way.take(record)) is not None:
                await self._report(aborted)

    async def statistics(self) -> str:
        """The answer to a statistics request: JSON, up to the last feedback record."""
        await self.feedback_arrived()
        counters = self._stats.counters
        counters["refusals"] = self._publisher.refusals
        lost = self._feedback.overrun + self._feedback.torn + self._feedback.foreign
        if lost:
            counters["feedback_lost"] = lost
        options = policy_options(self._policy)
        return json.dumps({"policy": self._policy.name, "policy_options": options, **self._stats.to_json()})

    # Planning

    async def _look_for_demand(self, microbatch: int) -> None:
        """Something may have come: by the compiled call where that is possible, else vector by vector and through the policy."""
        if self._hot is None or self._planning:
            complete = self._book.arrived(microbatch)
            if self._predictions is not None:
                for one in complete:
                    self._predictions.planned(one.target)
            await self._plan_all(complete, "demand")
            if self._predictions is not None and complete:
                await self.predictions_arrived([microbatch])  # that of the layer after may have come first
            return
        self._planning = True
        try:
            if not await self._hot.serves(microbatch):
                self._to_plan.extend((one, "demand") for one in self._book.arrived(microbatch))
        finally:
            self._planning = False
        await self._plan_all((), "demand")

    async def _plan_with_inputs(self, complete: Complete) -> None:
        await self._plan_all((complete,), "inputs")

    async def _plan_all(self, complete: Sequence[Complete], came: Came) -> None:
        """Asks the policy in the order of events, one at a time: a wait for room must not let a later target overtake."""
        self._to_plan.extend((one, came) for one in complete)
        if self._planning:
            return
        self._planning = True
        try:
            while self._to_plan:
                one, came = self._to_plan.popleft()
                await self._ask[came](one)
        finally:
            self._planning = False

    # Feedback

    async def _take_record(self, record: FeedbackRecord) -> None:
        if record.flags & FeedbackFlags.INPUTS:
            await self._plain.inputs_arrived(record.target)
        elif record.flags & FeedbackFlags.MISSING:
            if (entry := self._under_way.to_abort(record.sequence)) is not None:
                await self._abort(entry)
        elif (aborted := self._under_way.take(record)) is not None:
            await self._report(aborted)

    async def _abort(self, entry: Published) -> None:
        target = entry.target
        self._under_way.give_up(entry)
        self._book.drop(target.microbatch, target.step)
        if self._predictions is not None:
            self._predictions.drop(target.microbatch, target.step)
        self._plain.forget_given_up()
        if self._recorder is not None:
            self._recorder.happened(Event.ABORT, target)
        self._tracer.instant("abort", self._clock.now_ns(), target, sequence=entry.sequence)
        await self._outlet.room()
        await self._outlet.announce(self._publisher.abort(entry))
