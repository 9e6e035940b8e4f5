"""The compiled way from demand vectors to an entry: one call gathers, plans and publishes; around it, what the plain way does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afore.core.target import Target
from afore.scheduler.demand_book import Complete, DemandBook, Gathering
from afore.scheduler.hot_core import INCOMPLETE, PUBLISHED, UNBOUND
from afore.scheduler.hot_path import HotPath
from afore.scheduler.outlet import Outlet, PlanTimes
from afore.scheduler.plain_way import Hear, PlainWay, Report
from afore.scheduler.policies.base import Policy
from afore.scheduler.recorder import Recorder
from afore.scheduler.stats import RunStats
from afore.scheduler.under_way import UnderWay


class HotWay:
    """One target at a time; whoever calls keeps them in order."""

    def __init__(
        self,
        *,
        policy: Policy,
        hot: HotPath,
        plain: PlainWay,
        book: DemandBook,
        outlet: Outlet,
        under_way: UnderWay,
        stats: RunStats,
        num_layers: int,
        hear: Hear,
        report: Report,
        watched: Callable[[], bool],
        recorder: Recorder | None = None,
        charge_us: float = 0.0,
    ) -> None:
        self._policy = policy
        self._hot = hot
        self._plain = plain
        self._book = book
        self._outlet = outlet
        self._clock, self._tracer, self._publisher = outlet.clock, outlet.tracer, outlet.publisher
        self._under_way = under_way
        self._stats = stats
        self._num_layers = num_layers
        self._hear = hear
        self._report = report
        self._watched = watched
        self._recorder = recorder
        self._charge_us = charge_us

    async def serves(self, microbatch: int) -> bool:
        """Takes what has come, and plans and publishes what that completes; False for a target that must go the plain way."""
        hot = self._hot
        start_ns = self._clock.now_ns()
        state = self._book.gathering(microbatch)
        if state is None:
            return True
        target = Target(state.layer, microbatch, state.step)
        if not hot.serves(state):
            return False
        if state.waiting > 1:
            found = hot.call(state, target, may_plan=False, stamp_ns=start_ns)
            if self._tracer.enabled:
                _note_accepted(state, state.missing_A.tolist(), self._clock.now_ns())
            if found == INCOMPLETE:
                return True
        if self._charge_us:
            await self._clock.sleep_us(self._charge_us)
        await self._hear()
        if self._book.gathering(microbatch) is not state:
            return True
        if self._under_way.is_given_up(target) or not self._publisher.room():
            return False
        for layer in self._publisher.newly_refused():
            self._policy.reset_layer(layer)
        sequence = self._publisher.next_sequence
        began_ns = self._clock.now_ns()
        if self._recorder is not None:
            self._recorder.begin()
        found = hot.call(state, target, may_plan=True, stamp_ns=began_ns)
        if found == INCOMPLETE:
            return True
        if found == UNBOUND:
            self._stats.counters["plan_errors"] += 1
            self._record(target, began_ns)
            if self._recorder is not None:
                self._recorder.withdrawn(target)
            self._policy.reset_layer(target.layer)
        if found != PUBLISHED:
            if self._tracer.enabled:
                _note_accepted(state, state.missing_A.tolist(), began_ns)
            return False
        published_ns = self._clock.now_ns()
        self._outlet.note_asked(target)
        self._book.passed(microbatch)
        self._under_way.add(sequence, target, state.tokens_A)
        await self._outlet.ring_bells(sequence)
        # From here on nobody waits; and the entry still stands, for the ring has more slots than targets can be under way.
        self._tracer.span("plan", target, start_ns, published_ns, sequence=sequence)
        done = hot.done()
        self._record(target, began_ns)
        self._stats.counted(target.layer, done.loads, skipped=done.skipped)
        if self._tracer.enabled or self._watched():
            entry = self._outlet.ring.peek_entry(sequence)
            if self._tracer.enabled:
                _note_accepted(state, (0,) * len(state.tokens_A), began_ns)
                times = PlanTimes(state.accepted_ns_A, began_ns, published_ns)
                state.forget_times()
                self._outlet.trace_planned(entry, hot.demand_E(), hot.costs, times)
                self._outlet.trace_entry(entry)
            if self._watched():
                await self._report(self._stats.seen(entry, done.loads, skipped=done.skipped))
        self._tracer.span("publish", target, published_ns, self._clock.now_ns(), sequence=sequence)
        if target.layer == self._num_layers - 1:
            await self._plain.step_ended(Complete(target, state.tokens_A, state.demand_E))
        return True

    def _record(self, target: Target, began_ns: int) -> None:
        """What the last call planned."""
        hot = self._hot
        if self._recorder is not None:
            self._recorder.planned(target, hot.demand_E(), hot.planned(), hot.start, hot.protected_NR(), began_ns)


def _note_accepted(state: Gathering, missing_A: Sequence[int], at_ns: int) -> None:
    """The vectors that are not missing were found by ``at_ns``, those that were not noted before just then."""
    for attention, missing in enumerate(missing_A):
        if not missing and state.tokens_A[attention] and not state.accepted_ns_A[attention]:
            state.accepted_ns_A[attention] = at_ns
