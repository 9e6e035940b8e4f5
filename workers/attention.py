"""The attention role: attention, gate and sampling for its share of every microbatch, and the KV cache of its requests.

A life: load all but the routed experts; per epoch register the exchange (input and reply slots) and the KV storage, link to the
scheduler and to every FFN worker; then serve until the hub says stop. Four loops run side by side, and at most M steps:

- control: reservations and releases of KV blocks, steps and their cancellation;
- freed: blocks have come free that somebody was still writing into when they were released;
- reply bells: an FFN worker has written its partial rows;
- KV bells: a prefill worker has written the last byte of a request's blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, runtime_checkable

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import WireError
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.models.attention import AttentionModel
from afore.models.config import ModelSpec
from afore.models.kv import BlockAllocator, KVLayout
from afore.scheduler.policies.registry import policy_wants_predictions
from afore.transport.api import Lane, Notification, Region
from afore.transport.bells import BellKind, decode, reply_of
from afore.transport.crew import crew, reporting
from afore.transport.exchange import ExchangeLayout, Replies
from afore.transport.layouts import layouts_for
from afore.transport.queues import attend
from afore.transport.session import HUB, Directory, HubSession, RoleContext
from afore.workers.compute import Compute
from afore.workers.device.cuda.places import ROWS, ROWS_NBYTES
from afore.workers.ids_record import IdsRecord, ids_record
from afore.workers.kv_layout import kv_layout
from afore.workers.kv_pool import KvPool
from afore.workers.outbound import Doors, Outbound
from afore.workers.predictions import predictions_by
from afore.workers.replies import PendingReplies
from afore.workers.steps import Steps

_log = logging.getLogger(__name__)

REPLY_PATIENCE = 1.5
"""Of ``times.step_s``: the engine, which sees every participant, shall name who is late before one that waits for them gives up."""


class AttentionWeights(Protocol):
    """What an attention worker has loaded; it outlives epochs."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def tensors(self) -> int: ...

    def open(self, layout: KVLayout, buffer: memoryview) -> AttentionModel:
        """The model over a KV storage."""
        ...


@runtime_checkable
class SumsRows(Protocol):
    """Weights whose model takes the routed sum in another form than rows of host memory."""

    def sum_rows(self, replies: PendingReplies) -> Any:
        """The routed sum of a target, as ``combine`` takes it."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """Weights that lie on a device of their own, which computes and holds rows and cache."""

    @property
    def nbytes(self) -> int: ...

    def rows_apart(self, config: RunConfig) -> str:
        """Why rows cannot lie where FFN workers open them; empty where they can."""
        ...

    def exchange(self, layout: ExchangeLayout, buffer: memoryview | None) -> None:
        """The epoch's exchange, before ``open``. ``buffer``: region of the handle; None: rows go through host memory."""
        ...

    def compute(self, ctx: RoleContext) -> Compute:
        """Where the model's pieces run."""
        ...

    def sum_rows(self, replies: PendingReplies) -> Any:
        """The routed sum of a target, as ``combine`` takes it."""
        ...

    def take_up(self, blocks: Sequence[int]) -> None:
        """A prompt's keys and values have come into the cache's region."""
        ...

    def close(self) -> None:
        """Nothing of an epoch is under way any more. Idempotent."""
        ...


@runtime_checkable
class Placed(Protocol):
    """Weights that were read for a device, and go there once the role knows where it is."""

    def place(self, ctx: RoleContext, stack: AsyncExitStack) -> AttentionWeights:
        """Puts them there; ``stack`` closes the device. Raises ``HostError``."""
        ...


class AttentionWorld(Protocol):
    """What differs between real and virtual time for this role."""

    def load_attention(self, config: RunConfig, rank: int) -> AttentionWeights: ...

    def compute(self, ctx: RoleContext) -> Compute: ...


async def serve(ctx: RoleContext, world: AttentionWorld) -> None:
    """Runs the role until the hub stops it. Raises the ``AforeError`` that ended it, after telling the hub."""
    async with reporting(ctx), AsyncExitStack() as stack:
        weights = world.load_attention(ctx.config, ctx.rank)
        if isinstance(weights, Placed):
            weights = weights.place(ctx, stack)
        await ctx.hub.send(control.Loading(weights.tensors, weights.tensors))
        await ctx.hub.send(control.Loaded(weights.nbytes))
        regions = _Regions(ctx, weights, stack)
        ids = ids_record(ctx.config, weights.spec, ctx.rank)
        if ids is not None:
            stack.callback(ids.close)
        directory = await ctx.hub.open_epoch(ctx.fabric, regions.register)
        stack.push_async_callback(directory.close)
        epoch = await _connect(ctx, world, weights, regions, directory, ids)
        await ctx.hub.linked(directory.epoch)
        await epoch.serve()


class _Regions:
    """The worker's regions of an epoch, closed with it."""

    exchange: Region
    """Its input slots, which the FFN workers map, and the reply slots that they write."""
    kv: Region
    """Its KV storage, which prefill workers write."""

    def __init__(self, ctx: RoleContext, weights: AttentionWeights, stack: AsyncExitStack) -> None:
        self._ctx = ctx
        self._weights = weights
        self._stack = stack
        self.layouts = layouts_for(ctx.config, weights.spec)
        self.kv_layout = kv_layout(ctx.config, weights.spec)

    def register(self, epoch: int, members: tuple[control.Member, ...]) -> dict[str, Region]:
        """New regions, by label."""
        self.exchange = self._new("exchange", self.layouts.exchange.nbytes)
        self.kv = self._new("kv", self.kv_layout.nbytes)
        regions = {"exchange": self.exchange, "kv": self.kv}
        if isinstance(self._weights, OnDevice):
            self._stack.callback(self._weights.close)
            apart = self._weights.rows_apart(self._ctx.config)
            if not apart:
                regions[ROWS] = self._new(ROWS, ROWS_NBYTES)
            else:
                _log.info("%s sends rows through host memory: %s", self._ctx.name, apart)
            self._weights.exchange(self.layouts.exchange, None if apart else regions[ROWS].buffer)
        return regions

    def _new(self, label: str, nbytes: int) -> Region:
        region = self._ctx.fabric.register(nbytes, label=f"{self._ctx.name}-{label}")
        self._stack.callback(region.close)
        return region


async def _connect(
    ctx: RoleContext,
    world: AttentionWorld,
    weights: AttentionWeights,
    regions: _Regions,
    directory: Directory,
    ids: IdsRecord | None,
) -> Epoch:
    """Links to the scheduler (demand lane) and to every FFN worker (data lane), and puts the parts together."""
    nodes = directory.nodes
    predictor = policy_wants_predictions(ctx.config.policy)
    here = [rank for rank in range(ctx.config.topology.ffn) if nodes.together((FFN, rank), (ATTENTION, ctx.rank))]
    leads = [lead for node, lead in nodes.ffn_leads().items() if node != nodes.of(ATTENTION, ctx.rank)]
    doors = Doors(
        scheduler=await directory.connect(SCHEDULER, 0, Lane.DEMAND),
        mailbox_key=directory.key(SCHEDULER, 0, "mailbox"),
        predictions_key=None if predictor is None else directory.key(SCHEDULER, 0, "predictions"),
        bells=tuple([(await directory.connect(FFN, w, Lane.DATA), directory.key(FFN, w, "bells")) for w in here]),
        mirrors=tuple([(await directory.connect(FFN, w, Lane.DATA), directory.key(FFN, w, "inputs")) for w in leads]),
    )
    outbound = Outbound(
        rank=ctx.rank,
        epoch=directory.epoch,
        doors=doors,
        layouts=regions.layouts,
        exchange=regions.exchange.buffer,
        tracer=ctx.tracer,
        timeout_us=ctx.config.times.control_s * 1e6,
    )
    pool = KvPool(BlockAllocator(regions.kv_layout.num_blocks), block_tokens=regions.kv_layout.block_tokens)
    freed = asyncio.Event()
    device = weights if isinstance(weights, OnDevice) else None
    steps = Steps(
        model=weights.open(regions.kv_layout, regions.kv.buffer),
        compute=world.compute(ctx) if device is None else device.compute(ctx),
        pool=pool,
        outbound=outbound,
        replies=Replies(regions.exchange.buffer, regions.layouts.exchange, directory.epoch),
        num_ffn=ctx.config.topology.ffn,
        reply_timeout_us=ctx.config.times.step_s * 1e6 * REPLY_PATIENCE,
        report=ctx.hub.send,
        unpinned=freed.set,
        predictions=predictions_by(predictor, weights.spec),
        ids=ids,
        sum_rows=weights.sum_rows if isinstance(weights, SumsRows) else PendingReplies.sum_TD,
    )
    take_up = None if device is None else device.take_up
    return Epoch(ctx.hub, regions.exchange, regions.kv, pool, steps, freed, ids, take_up)


class Epoch:
    """One epoch's service. ``freed`` is set when blocks may have come free without a message of the engine."""

    def __init__(
        self,
        hub: HubSession,
        exchange: Region,
        kv: Region,
        pool: KvPool,
        steps: Steps,
        freed: asyncio.Event,
        ids: IdsRecord | None = None,
        take_up: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """``take_up`` hears the blocks of a prompt that has come, before anybody else does."""
        self._take_up = take_up
        self._hub = hub
        self._exchange = exchange
        self._kv = kv
        self._pool = pool
        self._steps = steps
        self._freed = freed
        self._ids = ids

    async def serve(self) -> None:
        """Serves until the hub stops the cluster (``Stopped``) or something fails."""
        async with crew() as group:
            group.create_task(self._hear_replies(), name="reply bells")
            group.create_task(self._hear_prefill(), name="kv bells")
            group.create_task(self._tell_freed(), name="freed")
            if self._ids is not None:
                group.create_task(self._ids.serve(), name="ids")
                group.create_task(self._tell_lost(self._ids), name="ids lost")
            while True:
                await self._obey(await self._hub.receive(), group)

    async def _obey(self, message: control.Message, group: asyncio.TaskGroup) -> None:
        match message:
            case control.StepWork():
                self._steps.start(message, group)
            case control.CancelStep():
                self._steps.cancel(message)
            case control.Reserve():
                blocks = self._pool.reserve(message.request, message.tokens, message.sampling, message.seen)
                await self._hub.send(control.Reserved(message.request, blocks))
            case control.Release():
                self._pool.release(message.request, quarantine=message.quarantine, late=message.late)
                self._freed.set()
            case control.Watch():
                pass  # whoever wants spans has them from the tracer
            case _:
                raise WireError(HUB, f"sent {type(message).__name__}, which an attention worker cannot serve")

    async def _hear_replies(self) -> None:
        await attend(self._exchange, self._hear)

    def _hear(self, notifications: list[Notification]) -> None:
        for notification in notifications:
            reply = reply_of(notification.immediate)
            if reply is not None:
                self._steps.replied(*reply)
            else:
                decode(notification.immediate)  # raises where it is no bell

    async def _tell_freed(self) -> None:
        """The engine cannot know when prefill or a cancelled step has stopped writing, so it is told."""
        while True:
            await self._freed.wait()
            self._freed.clear()
            for request in self._pool.take_freed():
                await self._hub.send(control.Freed(request))

    async def _tell_lost(self, ids: IdsRecord) -> None:
        await ids.lost.wait()
        await self._hub.send(control.IdsLost())

    async def _hear_prefill(self) -> None:
        while True:
            for bell in await self._kv.notified(timeout_us=None):
                arrived = decode(bell.immediate)
                request = self._pool.arrived(arrived.value) if arrived.kind is BellKind.KV else None
                self._freed.set()
                if request is not None:
                    if self._take_up is not None:
                        self._take_up(self._pool.blocks(request))
                    await self._hub.send(control.KvReady(request))
