"""Demand in, plans out; the one place where the execution order is made. ``afore.scheduler.role`` drives it.

    demand     a vector has come: is its target complete?
    plan       the policy answers; the entry goes into the ring; every worker's bell rings
    feedback   what targets cost goes into the cost model; a missing input aborts its target

Planning is synchronous and takes microseconds; the only waits are for room in the ring, which ends with the slowest reader's lease.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from afore.core import control
from afore.core.clock import Clock
from afore.core.config import TimeOptions
from afore.core.demand import DemandVector, demand_crc
from afore.core.errors import PeerLost, PlanError
from afore.core.plan import CopyStart, PlanEntry
from afore.core.target import Target
from afore.core.topology import FFN, member_name
from afore.core.trace import Tracer
from afore.scheduler.costs import CostModel, Costs
from afore.scheduler.demand_book import Complete, DemandBook
from afore.scheduler.hot_core import INCOMPLETE, PUBLISHED, UNBOUND
from afore.scheduler.hot_path import HotPath
from afore.scheduler.policies.base import Action, Assign, Copies, Policy
from afore.scheduler.publisher import Published, Publisher
from afore.scheduler.stats import SKIPPED_NO_GAIN, RunStats
from afore.transport.feedback import FeedbackFlags, FeedbackReader, FeedbackRecord
from afore.transport.ring import RingWriter

_log = logging.getLogger(__name__)

ROOM_POLL_US = 200.0
"""How often a full ring is looked at again: it is full only when a reader stands still."""

Ring = Callable[[int], Awaitable[None]]
"""Rings every FFN worker's bell for a sequence."""
Report = Callable[[control.Message], Awaitable[None]]
"""Sends a message to the hub."""


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
    ) -> None:
        """``hot``: the compiled way from demand to entry, where the policy has one; without it every target goes the plain way."""
        self._clock = clock
        self._tracer = tracer
        self._times = times
        self._policy = policy
        self._costs = costs
        self._book = book
        self._ring = ring
        self._publisher = publisher
        self._feedback = feedback
        self._stats = stats
        self._num_layers = num_layers
        self._num_workers = num_workers
        self._ring_bells = ring_bells
        self._report = report
        self._watched = watched
        self._hot = hot
        self._in_flight: dict[int, Published] = {}
        """Published targets by sequence, until every worker has reported on them."""
        self._reported: dict[int, int] = {}
        self._aborting: set[int] = set()
        """Those of them that are cancelled."""
        self._given_up: dict[int, int] = {}
        """The last step of each microbatch that lost a target: none of its later targets is published."""
        self._waiting_for_assign: dict[Target, Complete] = {}
        self._inputs_seen: dict[Target, int] = {}
        """Attention workers whose inputs of a target have come, for policies that wait for them."""
        self._to_plan: deque[tuple[Complete, bool]] = deque()
        """Targets for the policy, and whether it is their inputs that have come (else their demand)."""
        self._planning = False

    # Events

    async def announced(self, announce: control.Announce) -> None:
        """The engine has begun a step."""
        self._book.begin(announce.microbatch, announce.step, announce.tokens_A)
        await self._look_for_demand(announce.microbatch)

    async def demand_arrived(self, microbatches: Sequence[int]) -> None:
        """Vectors of these microbatches have come in."""
        for microbatch in microbatches:
            await self._look_for_demand(microbatch)

    async def feedback_arrived(self, workers: Iterable[int] | None = None) -> None:
        """These workers (or any) have written records: costs, inputs, missing inputs, passed aborts."""
        for record in self._feedback.take_all(workers):
            await self._take_record(record)

    async def statistics(self) -> str:
        """The answer to a statistics request: JSON, up to the last feedback record."""
        await self.feedback_arrived()
        counters = self._stats.counters
        counters["refusals"] = self._publisher.refusals
        lost = self._feedback.overrun + self._feedback.torn + self._feedback.foreign
        if lost:
            counters["feedback_lost"] = lost
        return json.dumps({"policy": self._policy.name, **self._stats.to_json()})

    # Planning

    async def _look_for_demand(self, microbatch: int) -> None:
        """Something may have come: by the compiled call where that is possible, else vector by vector and through the policy."""
        if self._hot is None or self._planning:
            await self._plan_all(self._book.arrived(microbatch))
            return
        self._planning = True
        try:
            if not await self._plan_hot(self._hot, microbatch):
                self._to_plan.extend((one, False) for one in self._book.arrived(microbatch))
        finally:
            self._planning = False
        await self._plan_all(())

    async def _plan_hot(self, hot: HotPath, microbatch: int) -> bool:
        """Gathers, plans and publishes in one compiled call; False for a target that must go the plain way."""
        start_ns = self._clock.now_ns()
        state = self._book.gathering(microbatch)
        if state is None:
            return True
        target = Target(state.layer, microbatch, state.step)
        if not hot.serves(state):
            return False
        if state.waiting > 1:
            found = hot.call(state, target, may_plan=False, stamp_ns=start_ns)
            if found == INCOMPLETE:
                return True
        await self.feedback_arrived()
        if self._book.gathering(microbatch) is not state:
            return True
        if self._is_given_up(target) or not self._publisher.room():
            return False
        for layer in self._publisher.newly_refused():
            self._policy.reset_layer(layer)
        sequence = self._publisher.next_sequence
        found = hot.call(state, target, may_plan=True, stamp_ns=self._clock.now_ns())
        if found == INCOMPLETE:
            return True
        if found == UNBOUND:
            self._stats.counters["plan_errors"] += 1
            self._policy.reset_layer(target.layer)
        if found != PUBLISHED:
            return False
        self._book.passed(microbatch)
        done = hot.done()
        planned_ns = self._clock.now_ns()
        self._tracer.span("plan", target, start_ns, planned_ns, sequence=sequence)
        self._in_flight[sequence] = Published(sequence, target, state.tokens_A)
        entry = self._ring.peek_entry(sequence) if self._tracer.enabled or self._watched() else None
        if entry is not None:
            self._trace_planned(entry, state.demand_E, hot.costs(target.layer))
            self._trace_entry(entry)
        await self._ring_bells(sequence)
        self._stats.counted(target.layer, done.loads, skipped=done.skipped)
        if entry is not None and self._watched():
            await self._report(self._stats.seen(entry, done.loads, skipped=done.skipped))
        self._tracer.span("publish", target, planned_ns, self._clock.now_ns(), sequence=sequence)
        if target.layer == self._num_layers - 1:
            now_us = self._clock.now_ns() / 1e3
            nothing = Complete(target, state.tokens_A, state.demand_E)
            await self._act(self._asked("on_step_end", nothing, microbatch, target.step, now_us), nothing)
        return True

    async def _plan_all(self, complete: Sequence[Complete], *, inputs: bool = False) -> None:
        """Asks the policy in the order of events, one at a time: a wait for room must not let a later target overtake."""
        self._to_plan.extend((one, inputs) for one in complete)
        if self._planning:
            return
        self._planning = True
        try:
            while self._to_plan:
                one, inputs_came = self._to_plan.popleft()
                if inputs_came:
                    await self._act(self._asked("on_inputs", one, one.target, self._clock.now_ns() / 1e3), one)
                else:
                    await self._plan(one)
        finally:
            self._planning = False

    async def _plan(self, complete: Complete) -> None:
        start_ns = self._clock.now_ns()
        await self.feedback_arrived()
        if self._is_given_up(complete.target):
            return
        for layer in self._publisher.newly_refused():
            self._policy.reset_layer(layer)
        # Its own copy: what a policy does to it must not reach the workers.
        actions = self._asked("on_demand", complete, complete.target, complete.demand_E.copy(), start_ns / 1e3)
        planned_ns = self._clock.now_ns()
        sequence = self._publisher.next_sequence
        self._tracer.span("plan", complete.target, start_ns, planned_ns, sequence=sequence)
        if not any(isinstance(action, Assign) for action in actions):
            self._waiting_for_assign[complete.target] = complete
            await self._ask_with_inputs(complete.target)
        await self._act(actions, complete)
        self._tracer.span("publish", complete.target, planned_ns, self._clock.now_ns(), sequence=sequence)
        target = complete.target
        if target.layer == self._num_layers - 1:
            now_us = self._clock.now_ns() / 1e3
            ended = self._asked("on_step_end", complete, target.microbatch, target.step, now_us)
            await self._act(ended, complete)

    def _asked(self, event: str, complete: Complete, *arguments: object) -> list[Action]:
        """The policy's answer to an event, or primaries for one that is none: a mistake costs balance, never an answer."""
        must_assign = event == "on_inputs" or (event == "on_demand" and not self._policy.wants_inputs)
        try:
            actions: list[Action] = list(getattr(self._policy, event)(*arguments))
            problem = self._problem(actions, complete.target, event, must_assign)
        except Exception as error:  # whatever a user's policy raises
            actions, problem = [], f"{type(error).__name__}: {error}"
        if not problem:
            return actions
        if not self._stats.counters["policy_errors"]:
            _log.error(
                "policy %s, %s of %s: %s; such targets run on primaries",
                self._policy.name,
                event,
                complete.target,
                problem,
            )
        self._stats.counters["policy_errors"] += 1
        return [] if event == "on_step_end" else [Assign(complete.target, (), skipped=f"policy error: {problem}")]

    def _problem(self, actions: Sequence[object], target: Target, event: str, must_assign: bool) -> str:
        assigned = 0
        for action in actions:
            if isinstance(action, Assign):
                assigned += 1
                if action.target != target or event == "on_step_end":
                    return f"it assigned {action.target}"
            elif not isinstance(action, Copies):
                return f"it answered {type(action).__name__}, which is no action"
            elif not 0 <= action.layer < self._num_layers:
                return f"it copies in layer {action.layer}, of {self._num_layers}"
        if assigned > 1 or (must_assign and not assigned):
            return f"it assigned the target {assigned} times"
        return ""

    async def _act(self, actions: Sequence[Action], complete: Complete) -> None:
        """Publishes what a policy answered: copies for the assigned target travel in its entry, others ahead of it."""
        assign = next((action for action in actions if isinstance(action, Assign)), None)
        own: list[tuple[int, int, int]] = []
        start = CopyStart.NOW
        for action in actions:
            if not isinstance(action, Copies):
                continue
            if assign is not None and action.layer == assign.target.layer:
                own.extend(action.copies)
                start = CopyStart.ARRIVAL if action.start == "arrival" else CopyStart.NOW
            elif action.copies:
                await self._room()
                entry = self._publisher.copies(complete.target, action.layer, action.copies)
                await self._announce_entry(entry)
        if assign is None:
            return
        await self._room()
        if self._is_given_up(assign.target):
            # What the policy has just bound is not published: it must not count on it.
            self._policy.reset_layer(assign.target.layer)
            return
        entry, skipped = self._publish(assign, complete, own, start)
        self._in_flight[entry.sequence] = Published(entry.sequence, entry.target, entry.tokens_A)
        self._trace_planned(entry, complete.demand_E, assign.costs)
        await self._announce_entry(entry)
        loads = self._stats.planned(entry, complete.demand_E, skipped=skipped)
        if self._watched():
            await self._report(self._stats.seen(entry, loads, skipped=skipped))

    def _publish(
        self, assign: Assign, complete: Complete, copies: list[tuple[int, int, int]], start: CopyStart
    ) -> tuple[PlanEntry, str]:
        crc = demand_crc(complete.demand_E)
        try:
            entry = self._publisher.plan(assign.target, complete.tokens_A, crc, assign.shares, copies, start)
        except PlanError as error:
            # A policy's mistake costs balance, never an answer: the target runs on primaries.
            self._stats.counters["plan_errors"] += 1
            self._policy.reset_layer(assign.target.layer)
            return self._publisher.plan(assign.target, complete.tokens_A, crc, (), (), CopyStart.NOW), str(error)
        return entry, assign.skipped or SKIPPED_NO_GAIN

    async def _announce_entry(self, entry: PlanEntry) -> None:
        """Rings every worker's bell for a published entry."""
        self._trace_entry(entry)
        await self._ring_bells(entry.sequence)

    def _trace_planned(self, entry: PlanEntry, demand_E: DemandVector, costs: Costs | None) -> None:
        """What a plan was made from: with it, ``tools.plan explain`` repeats the plan."""
        if self._tracer.enabled:
            self._tracer.instant(
                "planned",
                self._clock.now_ns(),
                entry.target,
                sequence=entry.sequence,
                policy=self._policy.name,
                workers=self._num_workers,
                demand=demand_E.tolist(),
                costs=None if costs is None else [costs.tile_us, costs.copy_us, costs.window_us],
            )

    def _trace_entry(self, entry: PlanEntry) -> None:
        if self._tracer.enabled:
            self._tracer.instant(
                "entry",
                self._clock.now_ns(),
                entry.target,
                sequence=entry.sequence,
                kind=entry.kind.name,
                tokens=list(entry.tokens_A),
                demand_crc=entry.demand_crc,
                shares=[(s.expert, s.worker, s.slot, s.count, s.generation) for s in entry.shares],
                copies=[(c.layer, c.expert, c.worker, c.slot) for c in entry.copies],
                start=entry.start.name,
                cancels=entry.cancels,
            )

    def _is_given_up(self, target: Target) -> bool:
        return target.step <= self._given_up.get(target.microbatch, -1)

    async def _room(self) -> None:
        """Returns once the ring has room. Raises ``PeerLost`` for a reader that stands still past its lease."""
        while not self._publisher.room():
            lease_ns = self._times.lease_s * 1e9
            for lag in self._ring.lagging(self._clock.now_ns()):
                if lag.lease_age_ns > lease_ns:
                    raise PeerLost(
                        member_name(FFN, lag.rank),
                        f"has not read the plan ring for {lag.lease_age_ns / 1e9:.1f} s with {lag.behind} entries before it",
                        "it owns primaries, so the epoch has ended; see that worker's log",
                    )
            await self._clock.sleep_us(ROOM_POLL_US)

    # Feedback

    async def _take_record(self, record: FeedbackRecord) -> None:
        entry = self._in_flight.get(record.sequence)
        if record.flags & FeedbackFlags.INPUTS:
            await self._inputs_arrived(record.target)
            return
        if record.flags & FeedbackFlags.MISSING:
            if entry is not None and record.sequence not in self._aborting:
                await self._abort(entry)
            return
        if entry is None:
            return
        if record.flags & FeedbackFlags.PRIMARIES:
            self._stats.counters["primaries_only"] += 1
        self._stats.counters["replica_pairs"] += record.replica_pairs
        raw_us = record.window_us - record.slack_us
        self._stats.migration.add(record.sequence, record.copies, raw_us, record.window_us)
        aborted = record.sequence in self._aborting
        if not aborted:
            self._costs.update(
                entry.target.layer,
                worker=record.worker,
                tile_us=record.tile_us if record.tiles else None,
                copy_us=record.copy_us if record.copies else None,
                window_us=record.window_us if record.copies else None,
            )
        reported = self._reported.get(record.sequence, 0) + 1
        if reported < self._num_workers:
            self._reported[record.sequence] = reported
            return
        self._reported.pop(record.sequence, None)
        del self._in_flight[record.sequence]
        if aborted:
            self._aborting.discard(record.sequence)
            target = entry.target
            await self._report(control.StepAborted(target.microbatch, target.step, target.layer))

    async def _inputs_arrived(self, target: Target) -> None:
        """One attention worker's inputs are there; with the last participant's the policy is asked again."""
        if self._is_given_up(target):
            return
        self._inputs_seen[target] = self._inputs_seen.get(target, 0) + 1
        await self._ask_with_inputs(target)

    async def _ask_with_inputs(self, target: Target) -> None:
        complete = self._waiting_for_assign.get(target)
        if complete is None:
            return
        participants = sum(tokens > 0 for tokens in complete.tokens_A)
        if self._inputs_seen.get(target, 0) >= participants:
            del self._waiting_for_assign[target]
            del self._inputs_seen[target]
            await self._plan_all((complete,), inputs=True)

    async def _abort(self, entry: Published) -> None:
        target = entry.target
        self._aborting.add(entry.sequence)
        self._given_up[target.microbatch] = target.step
        self._book.drop(target.microbatch, target.step)
        for waiting in [t for t in self._waiting_for_assign if self._is_given_up(t)]:
            del self._waiting_for_assign[waiting]
        for seen in [t for t in self._inputs_seen if self._is_given_up(t)]:
            del self._inputs_seen[seen]
        self._stats.counters["aborts"] += 1
        self._tracer.instant("abort", self._clock.now_ns(), target, sequence=entry.sequence)
        await self._room()
        await self._announce_entry(self._publisher.abort(entry))
