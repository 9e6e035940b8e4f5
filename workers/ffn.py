"""The FFN role: its share of the experts, its redundant slots, and every target in ring order.

A life: load the primaries into a region that peers may map; per epoch register the bells, map the peers' experts, the attention
workers' exchanges and the scheduler's ring, link to all of them; then serve until the hub says stop. Side by side run:

- bells: what may have come;
- mirror: on the lead of a node, inputs from other nodes;
- reader: plan entries as they are published → verdict, copies, turn;
- migrator: watches copies land;
- sequencer: turn → inputs → waits, partition, experts on the stream;
- completer: stream done → replies, feedback;
- control: the hub.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from afore.core import control
from afore.core.errors import WireError
from afore.core.slots import StoreLayout, contiguous_primaries
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.models.config import ModelSpec
from afore.scheduler.policies.registry import policy_wants_inputs
from afore.transport import bells
from afore.transport.api import Lane, Link, MappedRegion, Region, RegionKey
from afore.transport.crew import crew, reporting
from afore.transport.exchange import InputReader
from afore.transport.input_mirror import InputMirror, MirrorReader
from afore.transport.layouts import Layouts, layouts_for
from afore.transport.nodes import Nodes
from afore.transport.ring import RingReader
from afore.transport.session import HUB, Directory, HubSession, RoleContext
from afore.workers.belfry import Belfry
from afore.workers.device.base import CopyJob
from afore.workers.experts import Store
from afore.workers.ffn_world import FfnParts, FfnWorld, Peer
from afore.workers.group.base import Group
from afore.workers.group.shared import AttentionPeer, InputSource
from afore.workers.inputs_watch import InputsWatch
from afore.workers.migrator import Migrator
from afore.workers.mirror_keeper import MirrorKeeper
from afore.workers.reader import Reader
from afore.workers.reports import Reports
from afore.workers.sequencer import Sequencer, SequencerTimes
from afore.workers.slot_table import HeldCopy, SlotTable
from afore.workers.staging import Staging
from afore.workers.store_shape import StoreShape, store_shapes

PROGRESS_NS = 200_000_000
"""How often the hub is told how far loading is."""


async def serve(ctx: RoleContext, world: FfnWorld) -> None:
    """Runs the role until the hub stops it. Raises the ``AforeError`` that ended it, after telling the hub."""
    async with reporting(ctx):
        with ExitStack() as stack:
            worker = await load(ctx, world, stack)
            own: dict[str, Region] = {}

            def register(epoch: int, members: tuple[control.Member, ...]) -> dict[str, Region]:
                for label, nbytes in region_sizes(ctx, worker, members).items():
                    own[label] = ctx.fabric.register(nbytes, label=f"{ctx.name}-{label}")
                    stack.callback(own[label].close)
                return {**own, "experts": worker.region}

            directory = await ctx.hub.open_epoch(ctx.fabric, register)
            epoch = await connect(ctx, worker, own, directory, stack)
            await ctx.hub.linked(directory.epoch)
            await epoch.serve(ctx.hub)


# Load


@dataclass(frozen=True, slots=True)
class Worker:
    """What outlives epochs."""

    spec: ModelSpec
    parts: FfnParts
    shape: StoreShape
    store: Store
    region: Region


async def load(ctx: RoleContext, world: FfnWorld, stack: ExitStack) -> Worker:
    """The worker with its primaries loaded; ``stack`` gives everything back. Raises ``CheckpointError``."""
    worker = open_worker(ctx, world.model_spec(ctx.config), world.ffn(ctx), stack)
    told_ns = ctx.clock.now_ns()
    for done, total in worker.parts.load(worker.store):
        if done == total or ctx.clock.now_ns() - told_ns > PROGRESS_NS:
            told_ns = ctx.clock.now_ns()
            await ctx.hub.send(control.Loading(done, total))
    await ctx.hub.send(control.Loaded(worker.shape.nbytes))
    return worker


def open_worker(ctx: RoleContext, spec: ModelSpec, parts: FfnParts, stack: ExitStack) -> Worker:
    """The worker's device, and its empty store in a region that peers may map."""
    stack.callback(parts.device.close)
    layout, shape = _shapes(ctx, spec)[ctx.rank]
    region = ctx.fabric.register(parts.store_nbytes(shape), label=f"{ctx.name}-experts")
    stack.callback(region.close)
    store = parts.store(region.buffer, shape, layout)
    stack.callback(store.close)
    stack.callback(parts.device.close)  # again, because it must come first: no kernel may run over views that are gone
    return Worker(spec, parts, shape, store, region)


def _shapes(ctx: RoleContext, spec: ModelSpec) -> list[tuple[StoreLayout, StoreShape]]:
    """Layout and shape of every FFN worker's store."""
    topology = ctx.config.topology
    return store_shapes(
        contiguous_primaries(spec.num_experts, topology.ffn),
        topology.slots_N,
        num_layers=spec.num_moe_layers,
        hidden_size=spec.hidden_size,
        expert_size=spec.expert_size,
        form=spec.expert_form,
    )


# Connect


def region_sizes(ctx: RoleContext, worker: Worker, members: tuple[control.Member, ...]) -> dict[str, int]:
    """Bytes of an epoch's regions, by label. Raises ``ConfigError`` for members that are spread as this version cannot serve."""
    nodes = Nodes(ctx.fabric, {(m.role, m.rank): m.endpoint for m in members})
    nodes.check()
    sizes = {"bells": 64}
    own = nodes.of(FFN, ctx.rank)
    if nodes.lead(ctx.rank) == ctx.rank and any(
        m.role == ATTENTION and nodes.of(m.role, m.rank) != own for m in members
    ):
        sizes["inputs"] = layouts_for(ctx.config, worker.spec).mirror.nbytes
    return sizes


async def connect(
    ctx: RoleContext, worker: Worker, own: dict[str, Region], directory: Directory, stack: ExitStack
) -> Epoch:
    """Maps and links what the epoch needs, and puts the parts together."""
    layouts = layouts_for(ctx.config, worker.spec)
    timeout_us = ctx.config.times.control_s * 1e6
    nodes = directory.nodes

    def mapped(role: str, rank: int, label: str, *, writable: bool = False) -> MappedRegion:
        region = ctx.fabric.map(directory.key(role, rank, label), writable=writable)
        stack.callback(region.close)
        return region

    def inputs_of(a: int) -> InputSource:
        if nodes.together((ATTENTION, a), (FFN, ctx.rank)):
            return InputReader(mapped(ATTENTION, a, "exchange").buffer, layouts.exchange, directory.epoch)
        lead = nodes.lead(ctx.rank)
        mirror = own["inputs"].buffer.toreadonly() if lead == ctx.rank else mapped(FFN, lead, "inputs").buffer
        return MirrorReader(mirror, layouts.mirror, a, directory.epoch)

    peers_N: list[Peer] = []
    for rank, (layout, shape) in enumerate(_shapes(ctx, worker.spec)):
        buffer = worker.region.buffer if rank == ctx.rank else mapped(FFN, rank, "experts").buffer
        peer = worker.parts.peer(buffer, shape, layout)
        stack.callback(peer.close)
        peers_N.append(peer)
    group = worker.parts.group(
        rank=ctx.rank,
        epoch=directory.epoch,
        layout=layouts.exchange,
        peers_A=[
            AttentionPeer(
                link=await directory.connect(ATTENTION, a, Lane.DATA),
                key=directory.key(ATTENTION, a, "exchange"),
                inputs=inputs_of(a),
            )
            for a in range(ctx.config.topology.attention)
        ],
        timeout_us=timeout_us,
    )
    stack.callback(group.close)
    ring = RingReader(mapped(SCHEDULER, 0, "ring", writable=True).buffer, layouts.ring, ctx.rank, directory.epoch)
    stack.callback(ring.release)
    reports = Reports(
        rank=ctx.rank,
        layout=layouts.feedback,
        link=await directory.connect(SCHEDULER, 0, Lane.DEMAND),
        key=directory.key(SCHEDULER, 0, "feedback"),
        timeout_us=timeout_us,
    )
    neighbours = [
        (await directory.connect(FFN, rank, Lane.DEMAND), directory.key(FFN, rank, "bells"))
        for rank in range(ctx.config.topology.ffn)
        if rank != ctx.rank
    ]
    belfry = Belfry(own["bells"])
    keeper = None
    if "inputs" in own:
        mirror = InputMirror(own["inputs"].buffer, layouts.mirror, directory.epoch)
        keeper = MirrorKeeper(own["inputs"], mirror, belfry, neighbours, timeout_us=timeout_us)
    return Epoch(
        ctx,
        worker,
        belfry=belfry,
        keeper=keeper,
        layouts=layouts,
        peers_N=peers_N,
        group=group,
        ring=ring,
        reports=reports,
        neighbours=neighbours,
        epoch=directory.epoch,
    )


class Epoch:
    """One epoch's service: the worker's coroutines and what they share."""

    def __init__(
        self,
        ctx: RoleContext,
        worker: Worker,
        *,
        belfry: Belfry,
        keeper: MirrorKeeper | None,
        layouts: Layouts,
        peers_N: list[Peer],
        group: Group,
        ring: RingReader,
        reports: Reports,
        neighbours: list[tuple[Link, RegionKey]],
        epoch: int,
    ) -> None:
        topology, times, spec = ctx.config.topology, ctx.config.times, worker.spec
        self._store = worker.store
        self._peers_N = peers_N
        self._rank = ctx.rank
        self._name = ctx.name
        self._primaries_E = contiguous_primaries(spec.num_experts, topology.ffn)
        self._neighbours = neighbours
        self._timeout_us = times.control_s * 1e6
        self.table = SlotTable(
            rank=ctx.rank,
            num_slots=topology.slots_N[ctx.rank],
            num_layers=spec.num_moe_layers,
            num_workers=topology.ffn,
            primaries_E=self._primaries_E,
        )
        self.belfry = belfry
        self._keeper = keeper
        self._inputs_watch = self._watch(ctx, belfry, group, reports, epoch)
        self.migrator = Migrator(
            name=ctx.name,
            table=self.table,
            device=worker.parts.device,
            clock=ctx.clock,
            tracer=ctx.tracer,
            make_job=self._copy_job,
            patience_us=times.target_s * 1e6,
        )
        self.sequencer = Sequencer(
            rank=ctx.rank,
            device=worker.parts.device,
            store=worker.store,
            group=group,
            wake=belfry.inputs,
            migrator=self.migrator,
            staging_M=[
                Staging(
                    max_tokens=topology.attention * layouts.exchange.max_tokens,
                    hidden_size=spec.hidden_size,
                    top_k=spec.experts_per_token,
                    num_rows=worker.store.layout.num_rows,
                )
                for _ in range(topology.microbatches)
            ],
            clock=ctx.clock,
            tracer=ctx.tracer,
            times=SequencerTimes(
                target_us=times.target_s * 1e6, submission_us=times.step_s * 1e6, compute_us=times.step_s * 1e6
            ),
            tile_tokens=ctx.config.planner.tile_tokens,
            reports=reports,
        )
        self.reader = Reader(
            rank=ctx.rank,
            ring=ring,
            table=self.table,
            migrator=self.migrator,
            turns=self.sequencer,
            clock=ctx.clock,
            tracer=ctx.tracer,
            plan_bell=belfry.plan,
            verdict_bell=belfry.verdicts,
            ring_neighbours=self._ring_neighbours,
            verdict_timeout_us=times.verdict_s * 1e6,
        )

    @staticmethod
    def _watch(ctx: RoleContext, belfry: Belfry, group: Group, reports: Reports, epoch: int) -> InputsWatch | None:
        """Where the policy wants to know when inputs have come, one worker tells it."""
        if ctx.rank != 0 or not policy_wants_inputs(ctx.config.policy):
            return None
        watch = InputsWatch(group.arrived, partial(reports.inputs, epoch))
        belfry.on_inputs = watch.rang
        return watch

    async def serve(self, hub: HubSession) -> None:
        """Serves until the hub stops the cluster (``Stopped``) or something fails."""
        async with crew() as tasks:
            self.start(tasks)
            while True:
                message = await hub.receive()
                if not isinstance(message, control.Watch):
                    raise WireError(HUB, f"sent {type(message).__name__}, which an FFN worker cannot serve")

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Starts the worker's coroutines; none of them returns."""
        coros = {
            "bells": self.belfry.run(),
            "reader": self.reader.run(),
            "migrator": self.migrator.run(),
            "sequencer": self.sequencer.run(),
            "completer": self.sequencer.complete(),
        }
        if self._inputs_watch is not None:
            coros["inputs"] = self._inputs_watch.run()
        if self._keeper is not None:
            coros["mirror"] = self._keeper.run()
        return [tasks.create_task(coro, name=f"{self._name} {name}") for name, coro in coros.items()]

    async def _ring_neighbours(self, sequence: int) -> None:
        bell = bells.VERDICTS(sequence)
        for link, key in self._neighbours:
            await link.write(key, 0, b"", notify=bell, timeout_us=self._timeout_us)

    def _copy_job(self, held: HeldCopy) -> CopyJob:
        source = int(self._primaries_E[held.expert])
        nbytes, run = self._store.copy_closure(
            held.layer, held.expert, held.slot, self._peers_N[source], held.generation
        )
        return CopyJob(source=source, destination=self._rank, nbytes=nbytes, run=run)
