"""The plain way from a complete demand to entries: the policy is asked, and what it answers is published. Any policy goes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from afore.core import control
from afore.core.demand import demand_crc
from afore.core.errors import PlanError
from afore.core.plan import CopyStart, PlanEntry
from afore.core.target import Target
from afore.scheduler.answers import Answers
from afore.scheduler.demand_book import Complete
from afore.scheduler.outlet import Outlet, PlanTimes
from afore.scheduler.policies.base import Action, Assign, Copies, Policy
from afore.scheduler.recorder import Recorder
from afore.scheduler.stats import SKIPPED_NO_GAIN, RunStats
from afore.scheduler.under_way import UnderWay

Hear = Callable[[], Awaitable[None]]
"""Takes what the workers have reported."""
Report = Callable[[control.Message], Awaitable[None]]
"""Sends a message to the hub."""


class PlainWay:
    """One target at a time; whoever calls keeps them in order."""

    def __init__(
        self,
        *,
        policy: Policy,
        outlet: Outlet,
        under_way: UnderWay,
        stats: RunStats,
        num_layers: int,
        hear: Hear,
        report: Report,
        watched: Callable[[], bool],
        inputs_complete: Callable[[Complete], Awaitable[None]],
        recorder: Recorder | None = None,
        charge_us: float = 0.0,
    ) -> None:
        """``inputs_complete``: a target's inputs are all there that its policy waits for; its turn is to come (``with_inputs``)."""
        self._policy = policy
        self._outlet = outlet
        self._clock, self._tracer, self._publisher = outlet.clock, outlet.tracer, outlet.publisher
        self._under_way = under_way
        self._stats = stats
        self._num_layers = num_layers
        self._hear = hear
        self._report = report
        self._watched = watched
        self._inputs_complete = inputs_complete
        self._recorder = recorder
        self._charge_us = charge_us
        self._answers = Answers(policy, num_layers=num_layers, stats=stats)
        self._waiting_for_assign: dict[Target, Complete] = {}
        self._inputs_seen: dict[Target, int] = {}
        """Attention workers whose inputs of a target have come, for policies that wait for them."""

    async def with_demand(self, complete: Complete) -> None:
        """The target's demand is complete."""
        start_ns = self._clock.now_ns()
        if self._charge_us:
            await self._clock.sleep_us(self._charge_us)
        await self._hear()
        if self._under_way.is_given_up(complete.target):
            return
        self._outlet.note_asked(complete.target)
        self._forget_refused()
        began_ns = self._clock.now_ns()
        # Its own copy: what a policy does to it must not reach the workers.
        actions = self._answers.to("on_demand", complete, complete.target, complete.demand_E.copy(), start_ns / 1e3)
        planned_ns = self._clock.now_ns()
        sequence = self._publisher.next_sequence
        self._tracer.span("plan", complete.target, start_ns, planned_ns, sequence=sequence)
        if not any(isinstance(action, Assign) for action in actions):
            self._waiting_for_assign[complete.target] = complete
            await self._ask_with_inputs(complete.target)
        await self._act(actions, complete, began_ns)
        self._tracer.span("publish", complete.target, planned_ns, self._clock.now_ns(), sequence=sequence)
        if complete.target.layer == self._num_layers - 1:
            await self.step_ended(complete)

    async def with_inputs(self, complete: Complete) -> None:
        """Its inputs have come too, and its policy waits for them."""
        self._forget_refused()
        began_ns = self._clock.now_ns()
        await self._act(self._answers.to("on_inputs", complete, complete.target, began_ns / 1e3), complete, began_ns)

    async def with_prediction(self, complete: Complete) -> None:
        """Attention workers predict ``complete.demand_E`` of a target that is still to come."""
        if self._under_way.is_given_up(complete.target):
            return
        self._forget_refused()
        now_ns = self._clock.now_ns()
        actions = self._answers.to("on_prediction", complete, complete.target, complete.demand_E, now_ns / 1e3)
        self._stats.counters["predictions"] += 1
        await self._act(actions, complete, now_ns)

    async def step_ended(self, complete: Complete) -> None:
        """The step's last layer has been assigned."""
        target = complete.target
        now_ns = self._clock.now_ns()
        actions = self._answers.to("on_step_end", complete, target.microbatch, target.step, now_ns / 1e3)
        await self._act(actions, complete, now_ns)

    async def inputs_arrived(self, target: Target) -> None:
        """One attention worker's inputs are there; with the last participant's the policy is asked again."""
        if self._under_way.is_given_up(target):
            return
        self._inputs_seen[target] = self._inputs_seen.get(target, 0) + 1
        await self._ask_with_inputs(target)

    def forget_given_up(self) -> None:
        """No more inputs are awaited of targets that are given up."""
        for waiting in [t for t in self._waiting_for_assign if self._under_way.is_given_up(t)]:
            del self._waiting_for_assign[waiting]
        for seen in [t for t in self._inputs_seen if self._under_way.is_given_up(t)]:
            del self._inputs_seen[seen]

    def _forget_refused(self) -> None:
        for layer in self._publisher.newly_refused():
            self._policy.reset_layer(layer)

    async def _ask_with_inputs(self, target: Target) -> None:
        complete = self._waiting_for_assign.get(target)
        if complete is None:
            return
        participants = sum(tokens > 0 for tokens in complete.tokens_A)
        if self._inputs_seen.get(target, 0) >= participants:
            del self._waiting_for_assign[target]
            del self._inputs_seen[target]
            await self._inputs_complete(complete)

    async def _act(self, actions: Sequence[Action], complete: Complete, began_ns: int) -> None:
        """Publishes what a policy answered: copies for the assigned target travel in its entry, others ahead of it."""
        assign = next((action for action in actions if isinstance(action, Assign)), None)
        own: list[tuple[int, int, int]] = []
        start = CopyStart.NOW
        for action in actions:
            if not isinstance(action, Copies):
                continue
            action_start = CopyStart.ARRIVAL if action.start == "arrival" else CopyStart.NOW
            if assign is not None and action.layer == assign.target.layer:
                own.extend(action.copies)
                start = action_start
            else:
                await self._ahead(complete, action.layer, action.copies, action_start)
        most = self._publisher.most_copies
        if assign is not None and len(own) > most:
            # An entry holds so many; the others go before it.
            await self._ahead(complete, assign.target.layer, own[most:], start)
            del own[most:]
        if assign is None:
            return
        await self._outlet.room()
        if self._under_way.is_given_up(assign.target):
            # What the policy has just bound is not published: it must not count on it.
            self._withdraw(assign.target)
            self._policy.reset_layer(assign.target.layer)
            return
        entry, skipped = self._publish(assign, complete, own, start)
        times = PlanTimes(complete.accepted_ns_A, began_ns, self._clock.now_ns())
        self._under_way.add(entry.sequence, entry.target, entry.tokens_A)
        self._outlet.trace_planned(entry, complete.demand_E, assign.costs, times)
        await self._outlet.announce(entry)
        loads = self._stats.planned(entry, complete.demand_E, skipped=skipped)
        if self._watched():
            await self._report(self._stats.seen(entry, loads, skipped=skipped))

    async def fill(self, target: Target, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies for ``target``'s layer, before anything is planned."""
        await self._ahead(Complete(target, (), np.zeros(0, np.int32)), target.layer, copies, CopyStart.NOW)

    async def _ahead(
        self, complete: Complete, layer: int, copies: Sequence[tuple[int, int, int]], start: CopyStart
    ) -> None:
        """Publishes copies in entries of their own."""
        most = self._publisher.most_copies
        for first in range(0, len(copies), most):
            await self._outlet.room()
            try:
                entry = self._publisher.copies(complete.target, layer, copies[first : first + most], start)
            except PlanError:
                # As in ``_publish``: a policy's mistake.
                self._stats.counters["plan_errors"] += 1
                self._withdraw(complete.target)
                self._policy.reset_layer(layer)
                return
            self._stats.counters["copies_ahead"] += len(entry.copies)
            await self._outlet.announce(entry)

    def _publish(
        self, assign: Assign, complete: Complete, copies: list[tuple[int, int, int]], start: CopyStart
    ) -> tuple[PlanEntry, str]:
        crc = demand_crc(complete.demand_E)
        try:
            entry = self._publisher.plan(assign.target, complete.tokens_A, crc, assign.shares, copies, start)
        except PlanError as error:
            # A policy's mistake costs balance, never an answer: the target runs on primaries.
            self._stats.counters["plan_errors"] += 1
            self._withdraw(assign.target)
            self._policy.reset_layer(assign.target.layer)
            return self._publisher.plan(assign.target, complete.tokens_A, crc, (), (), CopyStart.NOW), str(error)
        return entry, assign.skipped or SKIPPED_NO_GAIN

    def _withdraw(self, target: Target) -> None:
        if self._recorder is not None:
            self._recorder.withdrawn(target)
