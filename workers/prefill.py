"""The prefill role: the whole model on one prompt at a time, its KV blocks written one-sided into the attention worker's storage.

Prompts run first in, first out. The model runs in the event loop (see ``compute``); messages are taken between prompts. The last
write of a prompt carries the request's bell: writes of one link arrive in order, so whoever hears it has all of them.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import WireError
from afore.core.topology import ATTENTION
from afore.models.prefill import Prefilled, PrefillModel
from afore.transport import bells
from afore.transport.api import Lane, Link, RegionKey
from afore.transport.session import HUB, Directory, RoleContext
from afore.workers.choosing import Chooser
from afore.workers.compute import Compute
from afore.workers.crew import crew, reporting
from afore.workers.device.base import Work
from afore.workers.kv_layout import kv_layout
from afore.workers.kv_pool import bell


class PrefillWeights(Protocol):
    """What a prefill worker has loaded."""

    @property
    def model(self) -> PrefillModel: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def tensors(self) -> int: ...


class PrefillWorld(Protocol):
    """What differs between real and virtual time for this role."""

    def load_prefill(self, config: RunConfig) -> PrefillWeights: ...

    def compute(self, ctx: RoleContext) -> Compute: ...


async def serve(ctx: RoleContext, world: PrefillWorld) -> None:
    """Runs the role until the hub stops it. Raises the ``AforeError`` that ended it, after telling the hub."""
    async with reporting(ctx), AsyncExitStack() as stack:
        weights = world.load_prefill(ctx.config)
        await ctx.hub.send(control.Loading(weights.tensors, weights.tensors))
        await ctx.hub.send(control.Loaded(weights.nbytes))
        directory = await ctx.hub.open_epoch(ctx.fabric, lambda epoch, members: {})
        stack.push_async_callback(directory.close)
        epoch = await Epoch.connect(ctx, world.compute(ctx), weights.model, directory)
        await ctx.hub.linked(directory.epoch)
        await epoch.serve()


class Epoch:
    """One epoch's service."""

    def __init__(
        self, ctx: RoleContext, compute: Compute, model: PrefillModel, doors: list[tuple[Link, RegionKey]]
    ) -> None:
        self._ctx = ctx
        self._compute = compute
        self._model = model
        self._layout = kv_layout(ctx.config, model.spec)
        self._doors_A = doors
        """Data lane to each attention worker, and the key of its KV storage."""
        self._prompts: asyncio.Queue[control.PrefillWork] = asyncio.Queue()

    @classmethod
    async def connect(cls, ctx: RoleContext, compute: Compute, model: PrefillModel, directory: Directory) -> Epoch:
        """Links to every attention worker."""
        doors = [
            (await directory.connect(ATTENTION, rank, Lane.DATA), directory.key(ATTENTION, rank, "kv"))
            for rank in range(ctx.config.topology.attention)
        ]
        return cls(ctx, compute, model, doors)

    async def serve(self) -> None:
        """Serves until the hub stops the cluster (``Stopped``) or something fails."""
        async with crew() as group:
            group.create_task(self._run_prompts(), name="prompts")
            while True:
                message = await self._ctx.hub.receive()
                if isinstance(message, control.PrefillWork):
                    self._prompts.put_nowait(message)
                elif not isinstance(message, control.Watch):
                    raise WireError(HUB, f"sent {type(message).__name__}, which a prefill worker cannot serve")

    async def _run_prompts(self) -> None:
        while True:
            work = await self._prompts.get()
            length = len(work.prompt)
            prefilled = await self._compute.run(
                Work("prefill", None, tokens=length, context=length * (length + 1) // 2),
                partial(self._model.run, work.prompt),
                "prefill",
            )
            await self._write_blocks(work, prefilled)
            chooser = Chooser(work.sampling, work.prompt)
            token = chooser.token(prefilled.logits_V, position=length)
            logprobs = chooser.logprobs(prefilled.logits_V, token)
            await self._ctx.hub.send(control.PrefillDone(work.request, token, logprobs))
            # With prompts waiting nothing above need ever suspend, and messages would wait until the last of them.
            await asyncio.sleep(0)

    async def _write_blocks(self, work: control.PrefillWork, prefilled: Prefilled) -> None:
        link, key = self._doors_A[work.attention]
        writes = prefilled.pack(self._layout, work.blocks)
        timeout_us = self._ctx.config.times.control_s * 1e6
        for offset, data in writes[:-1]:
            await link.write(key, offset, data, timeout_us=timeout_us)
        offset, data = writes[-1]
        await link.write(key, offset, data, notify=bells.KV(bell(work.blocks)), timeout_us=timeout_us)
