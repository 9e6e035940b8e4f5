"""The prefill role: the whole model on one chunk of a prompt at a time, its KV written one-sided to the attention worker.

``prompt_line`` says whose chunk is next. The model runs in the event loop (see ``compute``); messages are taken between chunks. A
chunk's keys and values are written as soon as it has run; the last write of a prompt carries the request's bell: writes of one link
arrive in order, so whoever hears it has all of them. A prompt that is cancelled runs no further chunk, and its bell is rung with
nothing, so that its blocks come out of quarantine.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol, runtime_checkable

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import WireError
from afore.core.topology import ATTENTION
from afore.models.prefill import PrefillModel
from afore.transport import bells
from afore.transport.api import Lane, Link, RegionKey
from afore.transport.crew import crew, reporting
from afore.transport.session import HUB, Directory, RoleContext
from afore.workers.choosing import Chooser
from afore.workers.compute import Compute
from afore.workers.device.base import Work
from afore.workers.kv_layout import kv_layout
from afore.workers.kv_pool import bell
from afore.workers.prompt_line import Prompt, PromptLine


class PrefillWeights(Protocol):
    """What a prefill worker has loaded."""

    @property
    def model(self) -> PrefillModel: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def tensors(self) -> int: ...


@runtime_checkable
class OnDevice(Protocol):
    """Weights on a device of their own, which computes."""

    def compute(self, ctx: RoleContext) -> Compute:
        """Where the model's pieces run."""
        ...


@runtime_checkable
class Placed(Protocol):
    """Weights that were read for a device, and go there once the role knows where it is."""

    def place(self, ctx: RoleContext, stack: AsyncExitStack) -> PrefillWeights:
        """Puts them there; ``stack`` closes the device. Raises ``HostError``."""
        ...


class PrefillWorld(Protocol):
    """What differs between real and virtual time for this role."""

    def load_prefill(self, config: RunConfig) -> PrefillWeights: ...

    def compute(self, ctx: RoleContext) -> Compute: ...


async def serve(ctx: RoleContext, world: PrefillWorld) -> None:
    """Runs the role until the hub stops it. Raises the ``AforeError`` that ended it, after telling the hub."""
    async with reporting(ctx), AsyncExitStack() as stack:
        weights = world.load_prefill(ctx.config)
        if isinstance(weights, Placed):
            weights = weights.place(ctx, stack)
        compute = weights.compute(ctx) if isinstance(weights, OnDevice) else world.compute(ctx)
        await ctx.hub.send(control.Loading(weights.tensors, weights.tensors))
        await ctx.hub.send(control.Loaded(weights.nbytes))
        directory = await ctx.hub.open_epoch(ctx.fabric, lambda epoch, members: {})
        stack.push_async_callback(directory.close)
        epoch = await Epoch.connect(ctx, compute, weights.model, directory)
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
        self._line = PromptLine(ctx.config.batch.prefill_chunk_tokens)
        self._cancelled: list[int] = []
        """Requests that nobody wants; acted on between chunks, so that all writes are one task's."""
        self._news = asyncio.Event()

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
                match message:
                    case control.PrefillWork():
                        self._line.add(message)
                    case control.CancelPrefill():
                        self._cancelled.append(message.request)
                    case control.Watch():
                        continue  # whoever wants spans has them from the tracer
                    case _:
                        raise WireError(HUB, f"sent {type(message).__name__}, which a prefill worker cannot serve")
                self._news.set()

    async def _run_prompts(self) -> None:
        while True:
            await self._stop_cancelled()
            turn = self._line.next()
            if turn is None:
                self._news.clear()
                await self._news.wait()
                continue
            await self._run_chunk(*turn)
            # With prompts waiting nothing above need ever suspend, and messages would wait until the last of them.
            await asyncio.sleep(0)

    async def _run_chunk(self, prompt: Prompt, tokens: tuple[int, ...]) -> None:
        work, end = prompt.work, prompt.done
        if prompt.state is None:
            prompt.state = self._model.start()
        context = sum(range(end - len(tokens) + 1, end + 1))
        prefilled = await self._compute.run(
            Work("prefill", None, tokens=len(tokens), context=context), partial(prompt.state.feed, tokens), "prefill"
        )
        await self._write(work, prefilled.pack(self._layout, work.blocks), last=not prompt.left)
        if prompt.left:
            await self._ctx.hub.send(control.PrefillProgress(work.request, end))
            return
        chooser = Chooser(work.sampling, work.prompt)
        token = chooser.token(prefilled.logits_V, position=end)
        await self._ctx.hub.send(control.PrefillDone(work.request, token, chooser.logprobs(prefilled.logits_V, token)))

    async def _stop_cancelled(self) -> None:
        while self._cancelled:
            prompt = self._line.drop(self._cancelled.pop())
            if prompt is None:
                continue  # it was done before the message came
            await self._write(prompt.work, [(0, memoryview(b""))], last=True)
            await self._ctx.hub.send(control.PrefillStopped(prompt.work.request))

    async def _write(self, work: control.PrefillWork, writes: list[tuple[int, memoryview]], *, last: bool) -> None:
        link, key = self._doors_A[work.attention]
        timeout_us = self._ctx.config.times.control_s * 1e6
        for index, (offset, data) in enumerate(writes, start=1):
            notify = bells.KV(bell(work.blocks)) if last and index == len(writes) else None
            await link.write(key, offset, data, notify=notify, timeout_us=timeout_us)
