"""The attention side of one microbatch's step: layer by layer through the model, the scheduler and the FFN workers.

At most one step of each of the M microbatches runs; while one waits for replies, another computes. Nothing here knows processes or
files: what is written goes through ``Outbound``, what is computed through ``Compute``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np

from afore.core import control
from afore.core.demand import DemandVector, count_demand
from afore.core.errors import DeadlineExceeded, WireError
from afore.core.limits import PATIENT_SHARE
from afore.core.signal import Signal
from afore.core.target import Target
from afore.core.topology import FFN, member_name
from afore.models.attention import F32, AttentionModel, Routed, StepBatch
from afore.transport.exchange import Replies
from afore.workers.choosing import choose_rows, logprobs_of_rows
from afore.workers.compute import Compute
from afore.workers.device.base import Work
from afore.workers.ids_record import IdsRecord
from afore.workers.kv_pool import KvPool
from afore.workers.outbound import Outbound
from afore.workers.predictions import Predictions
from afore.workers.replies import PendingReplies

_log = logging.getLogger(__name__)

Chosen = tuple[tuple[int, ...], tuple[control.TokenLogprobs | None, ...]]
"""The tokens of a step's rows, and their log-probabilities (empty where no row asked)."""


class GivenUp(Exception):
    """The engine has cancelled the step."""


class _Flight:
    """One running step: what it waits for, and whether it is still wanted."""

    def __init__(self, work: control.StepWork) -> None:
        self.work = work
        self.cancelled = False
        self.replies: PendingReplies | None = None
        """Those that it waits for: a bell of another target finds nothing in their slots."""
        self.wake = Signal()

    def expect(self, replies: PendingReplies) -> PendingReplies:
        """From now on bells concern ``replies``: set before the first byte goes out, so that none is missed."""
        self.replies = replies
        return replies

    def cancel(self) -> None:
        self.cancelled = True
        self.wake.set()

    async def settled(self, timeout_us: float) -> bool:
        """Returns once all replies are there or the step is cancelled; False if that takes longer than ``timeout_us``."""
        assert self.replies is not None
        if not (self.replies.complete or self.cancelled):
            self.wake.clear()
            if not await self.wake.wait(timeout_us):
                return False
        self.replies = None
        return True

    def check(self) -> None:
        """Raises ``GivenUp`` once cancelled: stands before every phase, so that a cancelled step writes nothing more."""
        if self.cancelled:
            raise GivenUp


class Steps:
    """Runs the steps that the engine announces; ``report`` takes each step's tokens, ``unpinned`` hears that blocks may be free."""

    def __init__(
        self,
        *,
        model: AttentionModel,
        compute: Compute,
        pool: KvPool,
        outbound: Outbound,
        replies: Replies,
        num_ffn: int,
        reply_timeout_us: float,
        report: Callable[[control.StepDone], Awaitable[None]],
        unpinned: Callable[[], None],
        predictions: Predictions | None = None,
        ids: IdsRecord | None = None,
        sum_rows: Callable[[PendingReplies], Any] = PendingReplies.sum_TD,
    ) -> None:
        """``sum_rows``: the routed sum of a target whose replies are all there, as the model takes it."""
        self._model = model
        self._compute = compute
        self._pool = pool
        self._outbound = outbound
        self._replies = replies
        self._num_ffn = num_ffn
        self._reply_timeout_us = reply_timeout_us
        self._report = report
        self._unpinned = unpinned
        self._predictions = predictions
        self._ids = ids
        self._sum_rows = sum_rows
        self._flights: dict[int, _Flight] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    # What the control loop calls

    def start(self, work: control.StepWork, group: asyncio.TaskGroup) -> None:
        """Runs a step in ``group``. Raises ``WireError`` when the microbatch's last step was neither reported nor cancelled."""
        flight = self._flights.get(work.microbatch)
        if flight is not None and not flight.cancelled:
            raise WireError(
                "hub", f"announced step {work.step} of microbatch {work.microbatch} during {flight.work.step}"
            )
        previous = self._tasks.get(work.microbatch)
        flight = self._flights[work.microbatch] = _Flight(work)
        self._pool.pin(work.requests, work.positions)
        name = f"step m{work.microbatch} s{work.step}"
        self._tasks[work.microbatch] = group.create_task(self._run(flight, previous), name=name)

    def cancel(self, cancel: control.CancelStep) -> None:
        """Gives a step up; one that is not running any more is no mistake (its report has crossed the message)."""
        flight = self._flights.get(cancel.microbatch)
        if flight is None or flight.work.step != cancel.step:
            return
        flight.cancel()
        # The engine cancels once every FFN worker has passed the aborted target: nobody reads the input slot any more.
        self._outbound.abandon(cancel.microbatch)

    def replied(self, microbatch: int, worker: int) -> None:
        """A reply's bell has rung."""
        flight = self._flights.get(microbatch)
        if flight is not None and flight.replies is not None and flight.replies.look(worker):
            flight.wake.set()

    # One step

    async def _run(self, flight: _Flight, previous: asyncio.Task[None] | None) -> None:
        work = flight.work
        try:
            try:
                if previous is not None and not previous.done():
                    await asyncio.wait({previous})
                tokens_T, logprobs_T = await self._forward(flight)
            finally:
                # Before the report: with it the engine takes the blocks for free of this step.
                self._pool.unpin(work.requests)
                self._unpinned()
                if self._flights.get(work.microbatch) is flight:
                    del self._flights[work.microbatch]
        except GivenUp:
            return
        await self._report(control.StepDone(work.microbatch, work.step, tokens_T, logprobs_T))

    async def _forward(self, flight: _Flight) -> Chosen:
        model, run = self._model, self._compute.run
        batch = self._batch(flight.work)
        size = {"tokens": batch.num_tokens, "context": batch.context}
        state = await run(Work("begin", None, **size), partial(model.begin, batch))
        for layer in model.layers():
            flight.check()
            if layer.moe_ordinal is None:
                await run(Work("dense", None, **size), partial(model.dense, state, layer.index), "attention")
                continue
            target = Target(layer.moe_ordinal, flight.work.microbatch, flight.work.step)
            # 1. Attention, gate and top-k: once. (The seam runs the gate's matrix within ``attend``.)
            routed = await run(
                Work("attention", target, **size), partial(model.attend, state, target.layer), "attention"
            )
            count = partial(_demand, routed, model.spec.num_experts)
            demand_E = await run(Work("gate", target, **size), count, "gate")
            flight.check()
            # 2. The demand goes first, on its own lane; 3. then the execution inputs.
            replies = flight.expect(PendingReplies(self._replies, target, batch.num_tokens, self._num_ffn))
            await self._outbound.demand(target, demand_E)
            if self._ids is not None:
                self._ids.take(target, routed.ids_TK, demand_E)
            flight.check()
            await self._outbound.inputs(target, routed)
            if self._predictions is not None:
                await self._predict(self._predictions, flight, routed, state, target)
            # 6. The FFN workers' partial rows; 7. shared experts and residual, and on to the next layer.
            await self._all_replies(flight, replies)
            await run(Work("combine", target, **size), partial(self._combine, state, replies), "reduce")
            self._outbound.replied(target)
        # The logits first: a device has them on the host only once it is awaited.
        logits_TV = await run(Work("sample", None, **size), partial(model.logits, state), "sample")
        return self._next_tokens(flight.work, logits_TV)

    async def _predict(
        self, predictions: Predictions, flight: _Flight, routed: Routed, state: Any, target: Target
    ) -> None:
        """Tells the scheduler what the next layer is predicted to need, once this layer's inputs are out."""
        work = Work("gate", target, tokens=len(routed.ids_TK))
        predicted_E = await self._compute.run(work, partial(predictions.predict, self._model, state, routed, target))
        flight.check()
        if predicted_E is not None:
            await self._outbound.prediction(dataclasses.replace(target, layer=target.layer + 1), predicted_E)

    async def _all_replies(self, flight: _Flight, replies: PendingReplies) -> None:
        """Waits for all N replies. Raises ``GivenUp``, or ``DeadlineExceeded`` naming who has not replied."""
        limit_us = self._reply_timeout_us
        if await flight.settled(limit_us * PATIENT_SHARE):
            flight.check()
            return
        late = ", ".join(member_name(FFN, worker) for worker in replies.missing)
        _log.warning(
            "%s: no reply to %s for %.3g s; after %g s it counts as lost",
            late,
            replies.target,
            limit_us * PATIENT_SHARE / 1e6,
            limit_us / 1e6,
        )
        if not await flight.settled(limit_us * (1 - PATIENT_SHARE)):
            late = ", ".join(member_name(FFN, worker) for worker in replies.missing)
            raise DeadlineExceeded(late, f"no reply to {replies.target}", "see its log; raise times.step_s")
        flight.check()

    def _combine(self, state: Any, replies: PendingReplies) -> None:
        self._model.combine(state, replies.target.layer, self._sum_rows(replies))

    def _next_tokens(self, work: control.StepWork, logits_TV: F32) -> Chosen:
        choosers = self._pool.choosers(work.requests)
        for chooser, token in zip(choosers, work.tokens, strict=True):
            if chooser.remembers:
                chooser.saw(token)
        tokens_T = choose_rows(logits_TV, choosers, [position + 1 for position in work.positions])
        return tokens_T, logprobs_of_rows(logits_TV, choosers, tokens_T)

    def _batch(self, work: control.StepWork) -> StepBatch:
        tokens_T, positions_T = np.array(work.tokens, dtype=np.int64), np.array(work.positions, dtype=np.int64)
        num_blocks = max(work.positions) // self._pool.block_tokens + 1
        tables_TB = self._pool.block_rows(work.requests, num_blocks)
        return StepBatch(tokens_T, positions_T, tables_TB, microbatch=work.microbatch, step=work.step)


def _demand(routed: Routed, num_experts: int) -> DemandVector:
    """The rows' demand, which a device has counted already where it has the ids."""
    return count_demand(routed.ids_TK, num_experts) if routed.demand_E is None else routed.demand_E
