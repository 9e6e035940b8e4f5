"""A cluster in one process with real attention and prefill roles, a real hub, and the plainest scheduler and FFN workers.

The scheduler passes a target on once all demand vectors are in its mailbox; the FFN workers read the inputs in place and compute
the experts they hold by the formula, pair by pair. The test is the engine: it reserves, prefills, announces steps, cancels.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import torch

from afore.core import control
from afore.core.clock import Clock, WallClock
from afore.core.config import RunConfig
from afore.core.errors import AforeError, PeerLost
from afore.core.slots import contiguous_primaries
from afore.core.target import Target
from afore.core.topology import ATTENTION, PREFILL, SCHEDULER, member_name
from afore.core.trace import Tracer
from afore.serving.hub import Hub
from afore.transport import bells
from afore.transport.api import Lane
from afore.transport.crew import crew
from afore.transport.exchange import ExchangeLayout, InputReader, ReplyBuffer, pack_reply
from afore.transport.layouts import layouts_for
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.mailbox import Mailbox, VectorState
from afore.transport.session import Directory, HubSession, RoleContext, Stopped
from afore.workers import attention, prefill
from afore.workers.checkpoint_models import CheckpointModels
from afore.workers.gpu_rows import OpenedRows, rows_of
from tests.workers.plain_experts import Experts

HUB_ADDRESS = "hub"
LONG_US = 30e6


class Sequence:
    """One request on its way: the row that comes next, and the tokens so far."""

    def __init__(self, request: int, prompt: list[int], first: int, new_tokens: int = 8) -> None:
        self.request = request
        self.prompt = prompt
        self.tokens = [first]
        self.new_tokens = new_tokens

    @property
    def row(self) -> control.Row:
        return control.Row(self.request, self.tokens[-1], len(self.prompt) + len(self.tokens) - 1)

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.new_tokens


class Rig:
    """``async with Rig(config, experts) as rig``: everything is linked and serves. Leaving stops it.

    No role may have failed but those that the test killed or asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        experts: Experts,
        *,
        clock: Clock | None = None,
        world: Any = None,
        latency_us: float = 0,
    ) -> None:
        self.config = config
        self.experts = experts
        self.clock = WallClock() if clock is None else clock
        self.world = CheckpointModels() if world is None else world
        self.network = LoopbackNetwork(self.clock, latency_us)
        self.announced: dict[tuple[int, int], tuple[int, ...]] = {}
        self.swallow: set[Target] = set()
        """Targets that the scheduler loses: no FFN worker hears of them."""
        self.swallowed = asyncio.Event()
        self.serving = asyncio.Event()
        self.arrivals: list[tuple[Any, ...]] = []
        """What the roles reported, in order: the keys of ``mail``."""
        self.targets: list[Target] = []
        """Every target that was executed, in order."""
        self._expected_losses: set[str] = set()
        self.failures: dict[str, AforeError] = {}
        """What each role ended with, by name."""
        self._mail: dict[tuple[Any, ...], asyncio.Future[Any]] = defaultdict(
            lambda: asyncio.get_running_loop().create_future()
        )
        self._vectors: dict[Target, dict[int, Any]] = defaultdict(dict)
        self._queues_N: list[asyncio.Queue[Target]] = [asyncio.Queue() for _ in range(config.topology.ffn)]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Rig:
        fabric = LoopbackFabric(self.network, HUB_ADDRESS)
        self._stack.push_async_callback(fabric.close)
        self.group = await self._stack.enter_async_context(crew())
        self.hub = Hub(fabric, self.config)
        self.hub.on_member = self._from_member
        self.hub.on_lost = lambda name, reason: self._mail["lost", name].set_result(reason)
        self._hub_task = self.group.create_task(self.hub.run(HUB_ADDRESS))
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        for role, rank in self.config.topology.members():
            if role != "door":
                name = member_name(role, rank)
                self.tasks[role, rank] = self.group.create_task(self._play(role, rank), name=name)
        try:
            async with asyncio.timeout(60):
                await self.serving.wait()
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.hub.stop("the test has ended")
        await self._stack.__aexit__(*exc)
        assert set(self.failures) <= self._expected_losses, self.failures

    async def _join(self, fabric: LoopbackFabric, role: str, rank: int) -> HubSession | None:
        try:
            return await HubSession.join(fabric, HUB_ADDRESS, role, rank, timeout_us=LONG_US)
        except PeerLost:
            return None  # the hub does not listen yet

    async def _play(self, role: str, rank: int) -> None:
        fabric = LoopbackFabric(self.network, member_name(role, rank))
        while (session := await self._join(fabric, role, rank)) is None:
            await self.clock.sleep_us(1)
        ctx = RoleContext(
            role=role,
            rank=rank,
            config=session.config,
            clock=self.clock,
            fabric=fabric,
            hub=session,
            tracer=Tracer(member_name(role, rank), self.clock, None),
        )
        try:
            if role == ATTENTION:
                await attention.serve(ctx, self.world)
            elif role == PREFILL:
                await prefill.serve(ctx, self.world)
            elif role == SCHEDULER:
                await self._schedule(ctx)
            else:
                await self._compute_experts(ctx)
        except Stopped:
            pass
        except AforeError as error:
            # The hub has been told, or sees the channel end; the test asks for it.
            self.failures[ctx.name] = error
        finally:
            await session.close()
            await fabric.close()

    # The engine's part

    def _from_member(self, role: str, rank: int, message: control.Message) -> None:
        match message:
            case control.Reserved() | control.KvReady():
                key: tuple[Any, ...] = (type(message), rank, message.request)
            case control.PrefillDone() | control.PrefillStopped():
                key = (type(message), message.request)
            case control.PrefillProgress():
                key = (type(message), message.request, message.tokens)
            case control.StepDone():
                key = (type(message), rank, message.microbatch, message.step)
            case control.Freed():
                key = (type(message), rank, message.request)
            case control.IdsLost():
                key = (type(message), rank)
            case _:
                raise AssertionError(f"{role}-{rank} sent {message}")
        future = self._mail[key]
        assert not future.done(), f"{message} came twice"
        future.set_result(message)
        self.arrivals.append(key)

    async def mail(self, *key: Any) -> Any:
        """The message of that key, once it has come."""
        async with asyncio.timeout(60):
            return await asyncio.shield(self._mail[key])

    async def loss_of(self, name: str) -> str:
        """Why the hub lost a role, once it has."""
        self._expected_losses.add(name)
        reason: str = await self.mail("lost", name)
        return reason

    def kill(self, name: str) -> None:
        """The role's process dies."""
        self._expected_losses.add(name)
        self.network.kill(name)

    def has_mail(self, *key: Any) -> bool:
        return key in self._mail and self._mail[key].done()

    def post(self, role: str, rank: int, message: control.Message) -> None:
        self.hub.to_member(role, rank, message)

    async def reserve(
        self, worker: int, request: int, tokens: int, sampling: control.Sampling | None = None
    ) -> tuple[int, ...]:
        """The blocks that attention ``worker`` gives the request."""
        self.post(ATTENTION, worker, control.Reserve(request, tokens, sampling or control.Sampling()))
        reserved: control.Reserved = await self.mail(control.Reserved, worker, request)
        return reserved.blocks

    async def admit(
        self,
        worker: int,
        request: int,
        prompt: SequenceOf[int],
        new_tokens: int,
        sampling: control.Sampling | None = None,
    ) -> int:
        """Reserves, prefills and waits until the KV has come; returns the first token."""
        sampling = sampling or control.Sampling()
        blocks = await self.reserve(worker, request, len(prompt) + new_tokens, sampling)
        work = control.PrefillWork(request, tuple(prompt), worker, blocks, sampling)
        self.post(PREFILL, request % self.config.topology.prefill, work)
        done: control.PrefillDone = await self.mail(control.PrefillDone, request)
        await self.mail(control.KvReady, worker, request)
        return done.token

    def start_step(self, microbatch: int, step: int, rows_A: Mapping[int, SequenceOf[control.Row]]) -> None:
        """Announces a step to the scheduler and to the workers that have rows."""
        counts_A = tuple(len(rows_A.get(worker, ())) for worker in range(self.config.topology.attention))
        self.announced[microbatch, step] = counts_A
        for worker, rows in rows_A.items():
            self.post(ATTENTION, worker, control.StepWork.of(microbatch, step, rows))

    async def step(
        self, microbatch: int, step: int, rows_A: Mapping[int, SequenceOf[control.Row]]
    ) -> dict[int, tuple[int, ...]]:
        """Runs a step; returns each worker's tokens."""
        self.start_step(microbatch, step, rows_A)
        return {worker: (await self.mail(control.StepDone, worker, microbatch, step)).tokens for worker in rows_A}

    # The scheduler's and the FFN workers' part

    async def _schedule(self, ctx: RoleContext) -> None:
        """Passes each target on, in the order in which its last demand vector comes."""
        layouts = layouts_for(ctx.config, self.experts.spec)
        region = ctx.fabric.register(layouts.mailbox.nbytes, label="mailbox")
        await ctx.hub.send(control.Loaded(0))
        directory = await ctx.hub.open_epoch(ctx.fabric, lambda epoch, members: {"mailbox": region})
        mailbox = Mailbox(region.buffer, layouts.mailbox, directory.epoch)
        await ctx.hub.linked(directory.epoch)
        self.serving.set()

        async def listen() -> None:
            while True:
                for notification in await region.notified(timeout_us=None):
                    worker, microbatch = layouts.mailbox.from_immediate(notification.immediate)
                    peeked = mailbox.peek(worker, microbatch)
                    assert peeked.state is VectorState.OK
                    assert peeked.target is not None
                    self._book(mailbox, peeked.target, worker)

        async with crew() as group:
            group.create_task(listen())
            while True:
                await ctx.hub.receive()

    def _book(self, mailbox: Mailbox, target: Target, worker: int) -> None:
        counts_A = self.announced[target.microbatch, target.step]
        demand_E = mailbox.take(worker, target.microbatch, target)
        assert demand_E is not None
        assert demand_E.sum() == counts_A[worker] * self.experts.spec.experts_per_token
        vectors = self._vectors[target]
        vectors[worker] = demand_E
        if set(vectors) == {a for a, count in enumerate(counts_A) if count}:
            if target in self.swallow:
                self.swallow.discard(target)
                self.swallowed.set()
                return
            self.targets.append(target)
            for queue in self._queues_N:
                queue.put_nowait(target)

    def open_rows(self, ctx: RoleContext, directory: Directory, a: int, layout: ExchangeLayout) -> OpenedRows | None:
        """The rows of an attention worker in its GPU's memory, as an FFN worker opens them; none where they are in the host's."""
        return None

    async def _compute_experts(self, ctx: RoleContext) -> None:
        """One FFN worker: its experts' share of every target, in order."""
        topology = ctx.config.topology
        exchange = layouts_for(ctx.config, self.experts.spec).exchange
        region = ctx.fabric.register(64, label="bells")
        await ctx.hub.send(control.Loaded(0))
        directory = await ctx.hub.open_epoch(ctx.fabric, lambda epoch, members: {"bells": region})
        keys_A = [directory.key(ATTENTION, a, "exchange") for a in range(topology.attention)]
        readers_A = [InputReader(ctx.fabric.map(key).buffer, exchange, directory.epoch) for key in keys_A]
        opened_A = [self.open_rows(ctx, directory, a, exchange) for a in range(topology.attention)]
        links_A = [await directory.connect(ATTENTION, a, Lane.DATA) for a in range(topology.attention)]
        await ctx.hub.linked(directory.epoch)
        mine = set(
            np.flatnonzero(contiguous_primaries(self.experts.spec.num_experts, topology.ffn) == ctx.rank).tolist()
        )

        async def inputs(target: Target, a: int) -> Any:
            while (found := readers_A[a].read(target.microbatch, target)) is None:
                for notification in await region.notified(timeout_us=LONG_US):
                    assert bells.decode(notification.immediate).kind is bells.BellKind.INPUTS
            opened = opened_A[a]
            if opened is None:
                return found
            rows = rows_of(opened.inputs_M[target.microbatch], found[0].shape[0])
            return tuple(tensor.numpy() for tensor in rows)

        async def work() -> None:
            while True:
                target = await self._queues_N[ctx.rank].get()
                counts_A = self.announced[target.microbatch, target.step]
                replies = []
                for a, count in enumerate(counts_A):
                    if count:
                        hidden_TD, ids_TK, weights_TK = await inputs(target, a)
                        assert hidden_TD.shape[0] == count
                        rows_TD = self.experts.partial_rows(target.layer, mine, hidden_TD, ids_TK, weights_TK)
                        opened = opened_A[a]
                        if opened is None:
                            replies.append((a, pack_reply(exchange, target, ctx.rank, directory.epoch, rows_TD)))
                            continue
                        opened.replies_MN[target.microbatch][ctx.rank][:count].copy_(torch.from_numpy(rows_TD))
                        header = ReplyBuffer(exchange, ctx.rank, directory.epoch).pack(target, count, here=False)
                        replies.append((a, header))
                for a, reply in replies:
                    offset = exchange.reply_offset(target.microbatch, ctx.rank)
                    bell = bells.REPLY(target.microbatch, ctx.rank)
                    await links_A[a].write(keys_A[a], offset, reply, notify=bell, timeout_us=LONG_US)

        async with crew() as group:
            group.create_task(work())
            while True:
                await ctx.hub.receive()


async def decode_all(
    rig: Rig, prompts: list[list[int]], seats: list[tuple[int, int]], new_tokens: int
) -> list[list[int]]:
    """Decodes every prompt: the first two begin, each further one joins a step later; requests leave as they finish.

    ``seats``: (attention worker, microbatch) of each. Each step is announced to all microbatches at once.
    """
    running: dict[int, dict[int, list[Sequence]]] = defaultdict(dict)
    finished: dict[int, list[int]] = {}

    async def join(request: int) -> None:
        worker, microbatch = seats[request]
        first = await rig.admit(worker, request, prompts[request], new_tokens)
        sequence = Sequence(request, prompts[request], first, new_tokens)
        running[microbatch].setdefault(worker, []).append(sequence)

    waiting = list(range(len(prompts)))
    step = 0
    while waiting or any(running.values()):
        for _ in range(1 if step else 2):
            if waiting:
                await join(waiting.pop(0))
        announced = {m: dict(groups) for m, groups in sorted(running.items()) if groups}
        for microbatch, groups in announced.items():
            rig.start_step(microbatch, step, {worker: [s.row for s in group] for worker, group in groups.items()})
        for microbatch, groups in announced.items():
            for worker, group in groups.items():
                done: control.StepDone = await rig.mail(control.StepDone, worker, microbatch, step)
                for sequence, token in zip(group, done.tokens, strict=True):
                    sequence.tokens.append(token)
                    if sequence.done:
                        finished[sequence.request] = sequence.tokens
                        rig.post(ATTENTION, worker, control.Release(sequence.request, quarantine=False, late=False))
                running[microbatch][worker] = [s for s in group if not s.done]
                if not running[microbatch][worker]:
                    del running[microbatch][worker]
        step += 1
    return [finished[request] for request in range(len(prompts))]
