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

from contextlib import ExitStack

from afore.core import control
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.transport.api import Lane, Link, MappedRegion, Region, RegionKey
from afore.transport.crew import reporting
from afore.transport.exchange import InputReader
from afore.transport.input_mirror import MirrorReader
from afore.transport.layouts import layouts_for
from afore.transport.ring import RingReader
from afore.transport.ring_mirror import RingCopies
from afore.transport.session import Directory, RoleContext
from afore.workers.belfry import Belfry
from afore.workers.device.cuda.places import ROWS
from afore.workers.far_experts import FarStore
from afore.workers.ffn_epoch import Epoch
from afore.workers.ffn_regions import BELLS, INPUTS, RING, OwnRegions
from afore.workers.ffn_worker import Worker, load_worker, worker_shapes
from afore.workers.ffn_world import DecodesOnce, FfnWorld, Peer
from afore.workers.group.meeting import MEETING, Meeting, host_of
from afore.workers.group.shared import AttentionPeer, InputSource
from afore.workers.reports import Reports


async def serve(ctx: RoleContext, world: FfnWorld) -> None:
    """Runs the role until the hub stops it. Raises the ``AforeError`` that ended it, after telling the hub."""
    async with reporting(ctx):
        with ExitStack() as stack:
            worker = await load_worker(ctx, world, stack)
            own: list[OwnRegions] = []

            def register(epoch: int, members: tuple[control.Member, ...]) -> dict[str, Region]:
                own.append(OwnRegions(ctx, worker.spec, epoch, members, stack, meets=worker.parts.meets))
                return {**own[-1].regions, "experts": worker.region}

            directory = await ctx.hub.open_epoch(ctx.fabric, register)
            epoch = await connect(ctx, worker, own[-1], directory, stack)
            await ctx.hub.linked(directory.epoch)
            await epoch.serve(ctx.hub)


async def connect(ctx: RoleContext, worker: Worker, own: OwnRegions, directory: Directory, stack: ExitStack) -> Epoch:
    """Maps and links what the epoch needs, and puts the parts together."""
    layouts = layouts_for(ctx.config, worker.spec)
    timeout_us = ctx.config.times.control_s * 1e6
    nodes = directory.nodes
    lead = nodes.lead(ctx.rank)
    others = [rank for rank in range(ctx.config.topology.ffn) if rank != ctx.rank]

    def mapped(role: str, rank: int, label: str, *, writable: bool = False) -> MappedRegion:
        region = ctx.fabric.map(directory.key(role, rank, label), writable=writable)
        stack.callback(region.close)
        return region

    def of_lead(label: str) -> memoryview:
        """The node's copy of what others write."""
        return (
            own.regions[label].buffer if lead == ctx.rank else mapped(FFN, lead, label, writable=label == RING).buffer
        )

    def inputs_of(a: int) -> InputSource:
        if nodes.together((ATTENTION, a), (FFN, ctx.rank)):
            return InputReader(mapped(ATTENTION, a, "exchange").buffer, layouts.exchange, directory.epoch)
        return MirrorReader(of_lead(INPUTS).toreadonly(), layouts.mirror, a, directory.epoch)

    async def reach(rank: int, label: str) -> tuple[Link, RegionKey]:
        return await directory.connect(FFN, rank, Lane.DEMAND), directory.key(FFN, rank, label)

    peers_N: list[Peer] = []
    far_stores: dict[int, FarStore] = {}
    for rank, (layout, shape) in enumerate(worker_shapes(ctx, worker.spec)):
        if rank == ctx.rank:
            buffer = worker.region.buffer
        elif nodes.together((FFN, rank), (FFN, ctx.rank)):
            buffer = mapped(FFN, rank, "experts").buffer
        else:
            link, key = await directory.connect(FFN, rank, Lane.DATA), directory.key(FFN, rank, "experts")
            far_stores[rank] = FarStore(link, key, shape, layout, timeout_us=timeout_us)
            buffer = far_stores[rank].buffer
        make = worker.parts.far_peer if rank in far_stores else worker.parts.peer
        peer = make(buffer, shape, layout)
        stack.callback(peer.close)
        peers_N.append(peer)
    if worker.parts.meets:
        towards = others if ctx.rank == 0 else []
        doors = [(await directory.connect(FFN, r, Lane.CONTROL), directory.key(FFN, r, MEETING)) for r in towards]
        host = host_of(ctx.fabric, nodes, ctx.config.topology.ffn) if ctx.rank == 0 else ""
        meeting = Meeting(own.regions[MEETING], host, doors, timeout_us=ctx.config.times.join_s * 1e6)
        await worker.parts.join(meeting.meet, rank=ctx.rank, epoch=directory.epoch, listen_at=host)
    group = worker.parts.group(
        rank=ctx.rank,
        epoch=directory.epoch,
        layout=layouts.exchange,
        peers_A=[
            AttentionPeer(
                link=await directory.connect(ATTENTION, a, Lane.DATA),
                key=directory.key(ATTENTION, a, "exchange"),
                inputs=inputs_of(a),
                rows=mapped(ATTENTION, a, ROWS).buffer if ROWS in directory.keys[ATTENTION, a] else None,
            )
            for a in range(ctx.config.topology.attention)
        ],
        timeout_us=timeout_us,
    )
    stack.callback(group.close)
    scheduler = await directory.connect(SCHEDULER, 0, Lane.DEMAND)
    copies = None
    if nodes.ring_is_mirrored:
        plans = of_lead(RING)
        mirrors = [await reach(rank, RING) for rank in nodes.ffn_leads().values() if rank != lead]
        written = (scheduler, directory.key(SCHEDULER, 0, RING))
        copies = RingCopies(ctx.rank, layouts.ring, written, mirrors, timeout_us=timeout_us)
    else:
        plans = mapped(SCHEDULER, 0, RING, writable=True).buffer
    codec = worker.parts.codec(layouts.ring.limits) if isinstance(worker.parts, DecodesOnce) else None
    ring = RingReader(plans, layouts.ring, ctx.rank, directory.epoch, codec=codec)
    stack.callback(ring.release)
    belfry = Belfry(own.regions[BELLS])
    neighbours = [await reach(rank, BELLS) for rank in others if nodes.together((FFN, rank), (FFN, ctx.rank))]
    return Epoch(
        ctx,
        worker,
        belfry=belfry,
        keepers=own.keepers(belfry, neighbours, timeout_us=timeout_us),
        layouts=layouts,
        peers_N=peers_N,
        far_stores=far_stores,
        group=group,
        ring=ring,
        copies=copies,
        reports=Reports(
            rank=ctx.rank,
            layout=layouts.feedback,
            link=scheduler,
            key=directory.key(SCHEDULER, 0, "feedback"),
            timeout_us=timeout_us,
        ),
        neighbours=neighbours,
        epoch=directory.epoch,
    )
