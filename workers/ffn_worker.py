"""What an FFN worker keeps for its whole life: its device, and its experts in a region that peers may map."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from afore.core import control
from afore.core.slots import StoreLayout, contiguous_primaries
from afore.models.config import ModelSpec
from afore.transport.api import Region
from afore.transport.session import RoleContext
from afore.workers.experts import Store
from afore.workers.ffn_world import FfnParts, FfnWorld
from afore.workers.store_shape import StoreShape, store_shapes

PROGRESS_NS = 200_000_000
"""How often the hub is told how far loading is."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What outlives epochs."""

    spec: ModelSpec
    parts: FfnParts
    shape: StoreShape
    store: Store
    region: Region


async def load_worker(ctx: RoleContext, world: FfnWorld, stack: ExitStack) -> Worker:
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
    layout, shape = worker_shapes(ctx, spec)[ctx.rank]
    region = ctx.fabric.register(parts.store_nbytes(shape), label=f"{ctx.name}-experts")
    stack.callback(region.close)
    store = parts.store(region.buffer, shape, layout)
    stack.callback(store.close)
    stack.callback(parts.device.close)  # again, because it must come first: no kernel may run over views that are gone
    return Worker(spec, parts, shape, store, region)


def worker_shapes(ctx: RoleContext, spec: ModelSpec) -> list[tuple[StoreLayout, StoreShape]]:
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
