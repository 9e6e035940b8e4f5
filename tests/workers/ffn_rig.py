"""FFN workers as they are, between a scheduler and attention workers that are as plain as can be: one process, loopback.

Everything between the plan and the replies is the product's: ring, verdicts, exchange, bells, feedback, reader, migrator,
sequencer, group, device, store. The rig plays the scheduler (a ``Plans`` decides) and the attention workers (random ids and
rows), and checks every reply against what the experts make of its rows.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager

import numpy as np

from afore.core import control
from afore.core.clock import Clock
from afore.core.config import RunConfig
from afore.core.demand import count_demand, demand_crc
from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share
from afore.core.target import Phase, Target
from afore.core.topology import ATTENTION, FFN, SCHEDULER, member_name
from afore.core.trace import Span, Tracer
from afore.models.emulated import emulated_spec
from afore.scheduler.publisher import Publisher
from afore.transport import bells
from afore.transport.api import Channel, Lane, Link, RegionKey
from afore.transport.crew import crew
from afore.transport.exchange import ExchangeLayout
from afore.transport.feedback import FeedbackFlags, FeedbackReader, FeedbackRecord
from afore.transport.layouts import layouts_for
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.ring import RingWriter
from afore.transport.session import Directory, HubSession, RoleContext
from afore.workers.ffn import connect
from afore.workers.ffn_epoch import Epoch
from afore.workers.ffn_regions import BELLS, OwnRegions
from afore.workers.ffn_worker import Worker, open_worker
from afore.workers.ffn_world import FfnParts
from tests.workers.ffn_parts import (
    EPOCH,
    F32,
    TIMEOUT_US,
    AttentionSide,
    Batch,
    ExpertFunction,
    Plans,
    Seen,
    Shape,
    identity,
)


class Rig:
    """``epochs`` are the product's own, one for each FFN worker; ``seen`` counts what happened."""

    def __init__(self, shape: Shape, network: LoopbackNetwork, seed: int, config: RunConfig | None = None) -> None:
        self.shape = shape
        self.config = config or shape.config()
        self.clock: Clock = network.clock
        self.network = network
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.spec = emulated_spec(
            num_experts=shape.experts,
            experts_per_token=shape.top_k,
            moe_layers=shape.layers,
            hidden_size=shape.hidden,
            expert_size=shape.expert,
        )
        self.layouts = layouts_for(self.config, self.spec)
        self.jitter_us = 0.0
        """Most that a publication or an input is late."""
        self.aborts = 0.0
        """Chance that a target is aborted, with its inputs under way or lost."""
        self.damage = 0.0
        """Chance of damage to a slot table, for each target."""
        self.expert: ExpertFunction = identity
        """What the experts make of rows."""
        self.make_side: Callable[[LoopbackNetwork, ExchangeLayout, int], AttentionSide] = AttentionSide
        self.epochs: list[Epoch] = []
        self.workers: list[Worker] = []
        self.tracers = [Tracer(member_name(FFN, rank), self.clock, None) for rank in range(shape.ffn)]
        self.seen = Seen()
        self.attention: list[AttentionSide] = []
        self._stack = ExitStack()
        self._doors: list[tuple[Link, RegionKey]] = []

    # Life

    async def open(self, make_parts: Callable[[RoleContext], FfnParts]) -> None:
        """Registers, maps and links everything, as the roles do."""
        await LoopbackFabric(self.network, "hub").listen("hub", _ignore)
        scheduler = LoopbackFabric(self.network, member_name(SCHEDULER, 0))
        self.ring_region = scheduler.register(self.layouts.ring.nbytes, label="ring")
        self.ring = RingWriter(self.ring_region.buffer, self.layouts.ring, EPOCH)
        self.publisher = Publisher(self.ring, epoch=EPOCH, num_layers=self.shape.layers, now_ns=self.clock.now_ns)
        self._feedback = scheduler.register(self.layouts.feedback.nbytes, label="feedback")
        self._records = FeedbackReader(self._feedback.buffer, self.layouts.feedback, EPOCH)
        self.attention = [self.make_side(self.network, self.layouts.exchange, a) for a in range(self.shape.attention)]
        for side in self.attention:
            self._stack.callback(side.close)
        keys: dict[tuple[str, int], dict[str, RegionKey]] = {
            (SCHEDULER, 0): {"ring": self.ring_region.key, "feedback": self._feedback.key},
            **{(ATTENTION, side.rank): side.keys for side in self.attention},
        }
        contexts = [await self._context(rank) for rank in range(self.shape.ffn)]
        endpoints = {member: next(iter(labels.values())).address for member, labels in keys.items()}
        endpoints.update({(FFN, rank): ctx.fabric.address for rank, ctx in enumerate(contexts)})
        members = [control.Member(role, rank, 0, endpoint) for (role, rank), endpoint in endpoints.items()]
        owns: list[OwnRegions] = []
        for rank, ctx in enumerate(contexts):
            worker = open_worker(ctx, self.spec, make_parts(ctx), self._stack)
            list(worker.parts.load(worker.store))
            owns.append(OwnRegions(ctx, self.spec, EPOCH, members, self._stack, meets=worker.parts.meets))
            keys[FFN, rank] = {label: region.key for label, region in owns[-1].regions.items()}
            keys[FFN, rank]["experts"] = worker.region.key
            self.workers.append(worker)
        for ctx, worker, own in zip(contexts, self.workers, owns, strict=True):
            directory = Directory(EPOCH, endpoints, keys, ctx.fabric, TIMEOUT_US)
            self.epochs.append(await connect(ctx, worker, own, directory, self._stack))
        bell_regions = [own.regions[BELLS] for own in owns]
        for fabric, doors in ((scheduler, self._doors), *((side.fabric, side.doors) for side in self.attention)):
            for rank, region in enumerate(bell_regions):
                link = await fabric.connect(endpoints[FFN, rank], Lane.DEMAND, timeout_us=TIMEOUT_US)
                doors.append((link, region.key))

    @asynccontextmanager
    async def running(self, *, silent: int = -1) -> AsyncIterator[None]:
        """The workers serve while the block runs, but for ``silent``; a failure of theirs comes out of it."""
        async with crew() as tasks:
            serving = [epoch for rank, epoch in enumerate(self.epochs) if rank != silent]
            helpers = [task for epoch in serving for task in epoch.start(tasks)]
            helpers += [tasks.create_task(side.listen(), name=f"attention-{side.rank}") for side in self.attention]
            helpers.append(tasks.create_task(self._hear_feedback(), name="feedback"))
            yield
            for helper in helpers:
                helper.cancel()

    async def close(self) -> None:
        """Gives everything back."""
        self._stack.close()
        for endpoint in list(self.network.endpoints.values()):
            await endpoint.close()

    async def serve(self, plans: Plans) -> None:
        """All microbatches, each on its own pace; returns once every reply was checked and every copy has landed."""
        async with self.running():
            async with asyncio.TaskGroup() as microbatches:
                for microbatch in range(self.shape.microbatches):
                    microbatches.create_task(self._steps(microbatch, plans), name=f"microbatch {microbatch}")
            await self.settle()

    def spans(self, rank: int) -> list[Span]:
        """What FFN worker ``rank`` has recorded since the last call; the first call turns recording on."""
        found: list[Span] = []
        self.tracers[rank].listener = lambda process, spans: found.extend(spans)
        self.tracers[rank].flush()
        return found

    async def settle(self) -> None:
        """Every copy that was asked for lands, needed or not, and every target is reported."""
        async with asyncio.timeout(10):
            while any(
                e.table.held_copies or e.migrator.counts.landed < e.migrator.counts.submitted for e in self.epochs
            ):
                await self.clock.sleep_us(20)
            while len(self.records) < len(self.seen.entries) * self.shape.ffn:
                await self.clock.sleep_us(20)
        # All workers have seen the same verdicts: they agree on what was refused.
        refused = self.seen.refused
        assert sum(r.sequence in refused for r in self.records) == len(refused) * self.shape.ffn
        assert all(bool(r.flags & FeedbackFlags.REFUSED) == (r.sequence in refused) for r in self.records)
        assert sum(e.migrator.counts.landed for e in self.epochs) == self.seen.copies

    # The scheduler

    async def publish(self, batch: Batch, plans: Plans) -> PlanEntry:
        """Plans and publishes a target, and rings the workers."""
        await self._room()
        _ = self.records
        for layer in self.publisher.newly_refused():
            plans.reset(layer)
        shares, copies, start = plans.plan(batch.target.layer, batch.demand_E)
        crc = demand_crc(batch.demand_E)
        entry = self.publisher.plan(batch.target, batch.tokens_A, crc, shares, copies, start)
        self.seen.entries.append(entry)
        await self.ring_plan(entry.sequence)
        return entry

    def entry(
        self,
        batch: Batch,
        shares: tuple[Share, ...] = (),
        copies: Sequence[tuple[int, int, int]] = (),
        start: CopyStart = CopyStart.NOW,
        *,
        kind: EntryKind = EntryKind.PLAN,
        cancels: int = -1,
    ) -> PlanEntry:
        """An entry for the next sequence."""
        return PlanEntry(
            kind=kind,
            epoch=EPOCH,
            sequence=self.ring.sequence,
            target=batch.target,
            phase=Phase.DECODE,
            tokens_A=batch.tokens_A,
            demand_crc=demand_crc(batch.demand_E),
            shares=shares,
            copies=tuple(Copy(batch.target.layer, *copy) for copy in copies),
            start=start,
            cancels=cancels,
        )

    async def publish_entry(self, entry: PlanEntry) -> None:
        """Publishes it and rings the workers."""
        await self._room()
        self.ring.publish(entry, stamp_ns=self.clock.now_ns())
        await self.ring_plan(entry.sequence)

    async def ring_plan(self, sequence: int) -> None:
        """Rings every worker's bell for a published entry."""
        for link, key in self._doors:
            await link.write(key, 0, b"", notify=bells.PLAN(sequence), timeout_us=TIMEOUT_US)

    async def _room(self) -> None:
        while not self.ring.room():
            await self.clock.sleep_us(20)

    async def _hear_feedback(self) -> None:
        while True:
            await self._feedback.notified(timeout_us=None)
            _ = self.records

    @property
    def records(self) -> list[FeedbackRecord]:
        """What the workers have reported so far. Looked for here, as the scheduler does before every plan: most ring no bell."""
        self.seen.records += self._records.take_all()
        return self.seen.records

    # The attention workers

    def batch(self, target: Target, tokens_A: Sequence[int], *, popular: int | None = None) -> Batch:
        """Random rows; a few experts are popular, others in each batch. Every token wants ``popular`` where that is given."""
        shape, numbers = self.shape, self.numbers
        score_E = numbers.random(shape.experts) * 3
        if popular is not None:
            score_E[popular] = 9
        parts = []
        for tokens in tokens_A:
            noise_TE = numbers.random((tokens, shape.experts)) + score_E
            ids_TK = np.ascontiguousarray(np.argsort(-noise_TE, axis=1)[:, : shape.top_k], dtype=np.int32)
            weights_TK = numbers.random((tokens, shape.top_k), dtype=np.float32)
            parts.append((numbers.standard_normal((tokens, shape.hidden), dtype=np.float32), ids_TK, weights_TK))
        hidden_A, ids_A, weights_A = zip(*parts, strict=True)
        return Batch(target, hidden_A, ids_A, weights_A, count_demand(np.concatenate(ids_A), shape.experts))

    async def write(self, batch: Batch, a: int) -> None:
        """Attention worker ``a`` writes its rows and rings every FFN worker."""
        side = self.attention[a]
        side.guard.writing(batch.target)
        side.put(batch.target, batch.hidden_A[a], batch.ids_A[a], batch.weights_A[a])
        for link, key in side.doors:
            await link.write(key, 0, b"", notify=bells.INPUTS(a, batch.target.microbatch), timeout_us=TIMEOUT_US)

    async def check(self, batch: Batch, a: int) -> None:
        """Awaits the N replies to ``a``'s rows and compares their sum with what the experts make of them."""
        side, target, tokens = self.attention[a], batch.target, batch.tokens_A[a]
        parts: dict[int, F32] = {}
        async with asyncio.timeout(20), side.replied:
            while len(parts) < self.shape.ffn:
                for worker in range(self.shape.ffn):
                    part = side.replies.take(target.microbatch, worker, target, tokens)
                    if worker not in parts and part is not None:
                        (first, count), rows_TD = part
                        parts[worker] = np.zeros_like(batch.hidden_A[a])
                        parts[worker][first : first + count] = side.replied_rows(target, worker, count, rows_TD)
                        side.guard.replied(target, worker)
                if len(parts) < self.shape.ffn:
                    await side.replied.wait()
        # All N have replied: nobody may read these inputs any more, for whomever.
        side.spoil(target.microbatch)
        out_TD = np.sum(list(parts.values()), axis=0)
        expected_TD = self.expert(batch.hidden_A[a], target.layer, batch.ids_A[a], batch.weights_A[a])
        worst = float(np.abs(out_TD - expected_TD).max())
        assert worst < 1e-4, f"{target} attention-{a}: a reply is {worst:g} off\n{out_TD}\n{expected_TD}"

    async def run(self, batch: Batch, plans: Plans) -> bool:
        """One target's life: plan and inputs in any order, each late by chance; then the replies. False if it was aborted."""
        present = [a for a, tokens in enumerate(batch.tokens_A) if tokens]
        aborted = self.random.random() < self.aborts
        if aborted and self.random.random() < 0.5:
            present = self.random.sample(present, self.random.randrange(len(present)))
        if self.random.random() < self.damage:
            self._damage()
        entry: PlanEntry | None = None
        for what in self.random.sample([-1, *present], 1 + len(present)):
            if self.jitter_us and self.random.random() < 0.5:
                await self.clock.sleep_us(self.random.random() * self.jitter_us)
            if what < 0:
                entry = await self.publish(batch, plans)
                if aborted:
                    await self._room()
                    await self.ring_plan(self.publisher.abort(entry).sequence)
            else:
                await self.write(batch, what)
        assert entry is not None
        if aborted:
            await self._passed(entry)
            return False
        for a in present:
            await self.check(batch, a)
        return True

    def _damage(self) -> None:
        """A worker's slot table loses track of one slot: it will refuse plans that name it."""
        worker = self.random.randrange(self.shape.ffn)
        if self.shape.slots_N[worker]:
            layer, slot = self.random.randrange(self.shape.layers), self.random.randrange(self.shape.slots_N[worker])
            self.epochs[worker].table._slots[layer][slot].generation += 1_000_000

    async def _passed(self, entry: PlanEntry) -> None:
        """What the scheduler tells the engine, and the engine the attention workers: all N have passed the aborted target."""
        async with asyncio.timeout(10):
            while sum(record.sequence == entry.sequence for record in self.records) < self.shape.ffn:
                await self.clock.sleep_us(20)
        for side in self.attention:
            side.guard.abandoned(entry.target)

    async def _steps(self, microbatch: int, plans: Plans) -> None:
        names = itertools.count()
        for _ in range(self.shape.steps):
            tokens_A = [self.random.randint(0, self.shape.max_tokens) for _ in range(self.shape.attention)]
            if not any(tokens_A):
                tokens_A[self.random.randrange(self.shape.attention)] = 1
            done = False
            while not done:
                # Announced anew under another number where a target was aborted.
                step = next(names)
                for layer in range(self.shape.layers):
                    done = await self.run(self.batch(Target(layer, microbatch, step), tokens_A), plans)
                    if not done:
                        break

    async def _context(self, rank: int) -> RoleContext:
        fabric = LoopbackFabric(self.network, member_name(FFN, rank))
        welcome = control.Welcome(FFN, rank, self.config)
        hub = HubSession(await fabric.dial("hub", timeout_us=TIMEOUT_US), FFN, welcome)
        return RoleContext(
            role=FFN,
            rank=rank,
            config=self.config,
            clock=self.clock,
            fabric=fabric,
            hub=hub,
            tracer=self.tracers[rank],
        )


async def _ignore(channel: Channel) -> None:
    """The rig has no hub: workers are told nothing."""
