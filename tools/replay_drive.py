"""One policy over one trace at one EP and R: the events it would be told, its answers checked and measured."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.metrics import Imbalance, Loads, tile_loads, token_loads
from afore.core.slots import contiguous_primaries
from afore.scheduler.optimum import optimum
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.policies.base import Action, Assign, Copies, Policy, PolicyContext
from afore.scheduler.policies.eplb_full import EplbFull, FullLayout
from afore.scheduler.policies.registry import make_policy
from afore.scheduler.traces import TraceHeader, TraceTarget
from afore.scheduler.validate import validate
from afore.scheduler.validate_actions import ActionChecker
from afore.tools.replay_input import Source
from afore.tools.replay_measure import Measured, Setting
from afore.tools.replay_predict import ReplayPredictor
from afore.tools.replay_window import Pipeline

EACH = 50
"""Targets between two moves of a progress bar."""


def replay(source: Source, setting: Setting, each: Callable[[], None]) -> Measured:
    """The policy over the trace; ``each`` hears of every ``EACH`` targets.

    Raises ``ConfigError``, and ``PlanError`` for a wrong answer.
    """
    header = source.header
    primaries_E = contiguous_primaries(header.experts, setting.workers)
    config = PlannerConfig(
        num_experts=header.experts,
        num_workers=setting.workers,
        slots_per_worker=setting.slots,
        tile_tokens=setting.tile_tokens,
    )
    context = PolicyContext(
        planner=config,
        primaries_E=primaries_E,
        num_layers=header.layers,
        num_microbatches=header.microbatches,
        costs=lambda layer: setting.costs,
        experts_per_token=header.top_k or 1,
        options=setting.options,
    )
    kind = _FullDrive if setting.policy == EplbFull.name else _Drive
    drive = kind(setting, context, header)
    for number, (row, following) in enumerate(_WithNext(source.rows(), header.microbatches)):
        drive.take(row, following, measured=number >= source.warmup)
        if number % EACH == EACH - 1:
            each()
    if source.kept:
        # Once more, with nothing between its calls that would take its data out of the caches.
        drive.measured.plan_us = []
        again = kind(setting, context, header)
        for number, (row, following) in enumerate(_WithNext(source.rows(), header.microbatches)):
            spent_ns = again.ask(row, following)
            if number >= source.warmup:
                drive.measured.plan_us.append(spent_ns / 1e3)
    return drive.measured


class _WithNext:
    """Rows, each with the next layer's row of its microbatch and step, where that comes soon."""

    def __init__(self, rows: Iterator[TraceTarget], microbatches: int) -> None:
        self._rows = rows
        self._most = 2 * microbatches + 1
        self._ahead: deque[TraceTarget] = deque()

    def __iter__(self) -> Iterator[tuple[TraceTarget, TraceTarget | None]]:
        while True:
            while len(self._ahead) < self._most and (row := next(self._rows, None)) is not None:
                self._ahead.append(row)
            if not self._ahead:
                return
            here = self._ahead.popleft()
            wanted = (here.target.layer + 1, here.target.microbatch, here.target.step)
            yield here, next((r for r in self._ahead if _place(r) == wanted), None)


def _place(row: TraceTarget) -> tuple[int, int, int]:
    return row.target.layer, row.target.microbatch, row.target.step


class _Measuring:
    """What both drives share: loads before and after, and the model's clock."""

    def __init__(self, setting: Setting, context: PolicyContext, header: TraceHeader) -> None:
        self.setting, self.context, self.header = setting, context, header
        self.measured = Measured(header.layers, setting.workers)
        self.pipeline = Pipeline(setting.costs, context.primaries_E)
        self._home_EN = np.zeros((header.experts, setting.workers), np.int64)
        self._home_EN[np.arange(header.experts), context.primaries_E] = 1

    def take(self, row: TraceTarget, following: TraceTarget | None, *, measured: bool) -> None:
        """One target."""
        raise NotImplementedError

    def ask(self, row: TraceTarget, following: TraceTarget | None) -> int:
        """One target, told to the policy and no more; returns ns in the policy."""
        raise NotImplementedError

    def _loads(self, demand_E: NDArray[Any], assign_EN: NDArray[np.int64]) -> Loads:
        M, N = self.setting.tile_tokens, self.setting.workers
        tiles_E = -(-demand_E.astype(np.int64) // M)
        primaries_E = self.context.primaries_E
        return Loads(
            pairs=int(demand_E.sum()),
            tiles=int(tiles_E.sum()),
            max_pairs_before=int(np.bincount(primaries_E, weights=demand_E, minlength=N).max()),
            max_pairs_after=int(token_loads(assign_EN).max()),
            max_tiles_before=int(np.bincount(primaries_E, weights=tiles_E, minlength=N).max()),
            max_tiles_after=int(tile_loads(assign_EN, M).max()),
            bound_tiles=-(-int(tiles_E.sum()) // N),
        )

    def _count(self, row: TraceTarget, loads: Loads, assign_EN: NDArray[np.int64], plan_us: float) -> None:
        found, layer = self.measured, row.target.layer
        one = loads.imbalance(self.setting.workers)
        found.timed(plan_us)
        found.targets += 1
        if one is None or row.demand_E is None:
            return
        self._add(found, layer, one)
        found.load_before_N += np.bincount(
            self.context.primaries_E, weights=row.demand_E, minlength=self.setting.workers
        ) / max(1, loads.pairs)
        found.load_after_N += token_loads(assign_EN) / max(1, loads.pairs)
        found.at_bound += loads.max_tiles_after == loads.bound_tiles
        found.gap_to_bound += loads.max_tiles_after / max(1, loads.bound_tiles) - 1
        found.static_us += self.setting.costs.tile_us * loads.max_tiles_before

    @staticmethod
    def _add(found: Measured, layer: int, one: Imbalance) -> None:
        found.of_layer[layer] += 1
        for name in ("token_before", "token_after", "tile_before", "tile_after", "tile_bound"):
            getattr(found, name)[layer] += getattr(one, name)


class _Drive(_Measuring):
    """A policy of the event interface."""

    def __init__(self, setting: Setting, context: PolicyContext, header: TraceHeader) -> None:
        super().__init__(setting, context, header)
        self._policy: Policy = make_policy(setting.policy, context)
        self._checker = ActionChecker(
            context.planner,
            context.primaries_E,
            num_layers=header.layers,
            num_microbatches=1 + getattr(self._policy, "protected_plans", header.microbatches - 1),
        )
        kind = getattr(self._policy, "wants_predictions", None)
        self._predictor = (
            None if kind is None else ReplayPredictor(kind, header, accuracy=setting.accuracy, seed=setting.seed)
        )
        self._protected = getattr(self._policy, "protected", None)

    def take(self, row: TraceTarget, following: TraceTarget | None, *, measured: bool) -> None:
        target, demand_E, pipeline = row.target, row.demand_E, self.pipeline
        assert demand_E is not None
        now_us = pipeline.now_us
        copies_before, raw_before, exposed_before = pipeline.copies, pipeline.raw_us, pipeline.exposed_us
        before_NR = self._checker.slots_NR(target.layer)
        protected_NR = self._protected(target.layer) if self._protected is not None else None
        actions, spent_ns = self._asked(row)
        own = [action for action in actions if isinstance(action, Copies) and action.layer == target.layer]
        for action in actions:
            if isinstance(action, Copies) and action.layer != target.layer:
                pipeline.ahead(action.layer, action.copies, action.start)
        assign = actions[-1]
        assert isinstance(assign, Assign)
        # As the workers do it: a policy that plans on history may count more than there is.
        clipped = dataclasses.replace(assign, shares=_clipped(assign.shares, demand_E))
        assign_EN = self._checker.assigned(target, demand_E, [*actions[:-1], clipped])
        loads = self._loads(demand_E, assign_EN)
        if (
            assign.plan is not None
            and int(assign.plan.assign_EN.sum()) == loads.pairs
            and self._sees_demand(assign, demand_E)
        ):
            validate(assign.plan, demand_E, before_NR, self.context.primaries_E, self.context.planner, protected_NR)
        pipeline.target(
            target.layer,
            [copy for action in own for copy in action.copies],
            own[0].start if own else "now",
            assign.shares,
            -(-assign_EN // self.setting.tile_tokens),
            loads.max_tiles_after,
        )
        spent_ns += self._around(row, following, self._went_ahead)
        if not measured:
            return
        self._count(row, loads, assign_EN, spent_ns / 1e3)
        found = self.measured
        found.copies += pipeline.copies - copies_before
        found.raw_us += pipeline.raw_us - raw_before
        found.exposed_us += pipeline.exposed_us - exposed_before
        found.ffn_us += pipeline.now_us - now_us
        if self.setting.optimum_limit_s is not None:
            self._against_optimum(loads, demand_E, before_NR, protected_NR, assign)

    def ask(self, row: TraceTarget, following: TraceTarget | None) -> int:
        return self._asked(row)[1] + self._around(row, following, lambda actions: None)

    def _asked(self, row: TraceTarget) -> tuple[list[Action], int]:
        target, demand_E, now_us = row.target, row.demand_E, self.pipeline.now_us
        assert demand_E is not None
        begin_ns = time.thread_time_ns()
        actions = self._policy.on_demand(target, demand_E, now_us)
        if not any(isinstance(action, Assign) for action in actions):
            actions = [*actions, *self._policy.on_inputs(target, now_us)]
        return actions, time.thread_time_ns() - begin_ns

    @staticmethod
    def _sees_demand(assign: Assign, demand_E: NDArray[Any]) -> bool:
        return assign.plan is not None and np.array_equal(assign.plan.assign_EN.sum(axis=1), demand_E)

    def _around(self, row: TraceTarget, following: TraceTarget | None, answered: Callable[[list[Action]], None]) -> int:
        """Prediction of the next layer, or the end of the step; returns ns in the policy."""
        target, spent_ns = row.target, 0
        if self._predictor is not None:
            self._predictor.seen(row)
            if following is not None:
                predicted_E = self._predictor.predict(row, following)
                tell = self._policy.on_prediction
                spent_ns += self._told(answered, tell, following.target, predicted_E, self.pipeline.now_us)
        if target.layer == self.header.layers - 1:
            tell_end = self._policy.on_step_end
            spent_ns += self._told(answered, tell_end, target.microbatch, target.step, self.pipeline.now_us)
        return spent_ns

    @staticmethod
    def _told(answered: Callable[[list[Action]], None], tell: Callable[..., list[Action]], *arguments: object) -> int:
        begin_ns = time.thread_time_ns()
        actions = tell(*arguments)
        spent_ns = time.thread_time_ns() - begin_ns
        answered(actions)
        return spent_ns

    def _went_ahead(self, actions: list[Action]) -> None:
        self._checker.ahead(actions)
        for action in actions:
            if isinstance(action, Copies):
                self.pipeline.ahead(action.layer, action.copies, action.start)

    def _against_optimum(
        self,
        loads: Loads,
        demand_E: NDArray[Any],
        before_NR: NDArray[np.int32],
        protected_NR: NDArray[np.bool_] | None,
        assign: Assign,
    ) -> None:
        assert self.setting.optimum_limit_s is not None
        plan = assign.plan if self._sees_demand(assign, demand_E) else None
        best = optimum(
            self.context.planner,
            self.context.primaries_E,
            demand_E,
            before_NR,
            protected=protected_NR,
            plan=plan,
            time_limit_s=self.setting.optimum_limit_s,
        )
        self.measured.open += best.state == "open"
        self.measured.optimal += best.state == "optimal" and loads.max_tiles_after == best.best_tiles


def _clipped(
    shares: tuple[tuple[int, int, int, int], ...], demand_E: NDArray[Any]
) -> tuple[tuple[int, int, int, int], ...]:
    """Shares in rank order, as far as the demand goes."""
    left: dict[int, int] = {}
    kept = []
    for e, w, r, count in shares:
        there = left.get(e, int(demand_E[e]))
        taken = min(count, there)
        left[e] = there - taken
        if taken:
            kept.append((e, w, r, taken))
    return tuple(kept)


class _FullDrive(_Measuring):
    """``eplb-full``, which moves primaries: an assignment instead of shares, whole layouts instead of copies."""

    def __init__(self, setting: Setting, context: PolicyContext, header: TraceHeader) -> None:
        super().__init__(setting, context, header)
        self._policy = EplbFull(context)

    def take(self, row: TraceTarget, following: TraceTarget | None, *, measured: bool) -> None:
        target, demand_E, pipeline = row.target, row.demand_E, self.pipeline
        assert demand_E is not None
        now_us = pipeline.now_us
        copies_before, raw_before, exposed_before = pipeline.copies, pipeline.raw_us, pipeline.exposed_us
        assign_EN, layouts, spent_ns = self._asked(row)
        loads = self._loads(demand_E, assign_EN)
        pipeline.target(target.layer, (), "now", (), assign_EN, loads.max_tiles_after)
        for layout in layouts:
            pipeline.everything_moved(layout.moved, layout.start)
        if measured:
            self._count(row, loads, assign_EN, spent_ns / 1e3)
            found = self.measured
            found.copies += pipeline.copies - copies_before
            found.raw_us += pipeline.raw_us - raw_before
            found.exposed_us += pipeline.exposed_us - exposed_before
            found.ffn_us += pipeline.now_us - now_us

    def ask(self, row: TraceTarget, following: TraceTarget | None) -> int:
        return self._asked(row)[2]

    def _asked(self, row: TraceTarget) -> tuple[NDArray[np.int64], list[FullLayout], int]:
        target, demand_E = row.target, row.demand_E
        assert demand_E is not None
        last = target.layer == self.header.layers - 1
        begin_ns = time.thread_time_ns()
        assign_EN = self._policy.on_demand(target, demand_E)
        layouts = self._policy.on_step_end(target.microbatch, target.step) if last else []
        return assign_EN, layouts, time.thread_time_ns() - begin_ns
