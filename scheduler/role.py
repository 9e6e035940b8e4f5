"""The scheduler role: regions, links and loops around ``Planning``.

A life: read the model's numbers, register mailbox, ring and feedback, link to every FFN worker's bell, then serve until the hub
says stop. Three loops run side by side: control (announcements, statistics), demand bells, feedback bells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import ConfigError, WireError
from afore.core.slots import contiguous_primaries, slots_vector
from afore.core.topology import FFN
from afore.models.config import ModelSpec
from afore.scheduler.costs import CostModel, Costs
from afore.scheduler.demand_book import DemandBook
from afore.scheduler.hot_path import HotPath, compiled_cells
from afore.scheduler.planner import PlannerConfig
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.base import Policy, PolicyContext, policy_options
from afore.scheduler.policies.registry import make_policy, policy_wants_predictions
from afore.scheduler.prediction_book import PredictionBook
from afore.scheduler.publisher import Publisher
from afore.scheduler.recorder import Recorded, Recorder, WatchedCosts, planner_fields
from afore.scheduler.service import Planning
from afore.scheduler.stats import RunStats
from afore.scheduler.traces.records import TraceHeader
from afore.scheduler.warm_start import filled, warm_copies
from afore.transport import bells
from afore.transport.api import Lane, Link, Region, RegionKey
from afore.transport.crew import crew, reporting
from afore.transport.feedback import FeedbackReader
from afore.transport.layouts import Layouts, layouts_for
from afore.transport.mailbox import Mailbox
from afore.transport.ring import RingWriter
from afore.transport.ringing import ring_all
from afore.transport.session import HUB, Directory, RoleContext


class SchedulerWorld(Protocol):
    """What differs between real and virtual time for this role."""

    def model_spec(self, config: RunConfig) -> ModelSpec:
        """The model's numbers, without its weights."""
        ...


async def serve(ctx: RoleContext, world: SchedulerWorld) -> None:
    """Runs the role until the hub stops it. Raises the ``AforeError`` that ended it, after telling the hub."""
    async with reporting(ctx):
        await _serve(ctx, world.model_spec(ctx.config))


async def _serve(ctx: RoleContext, spec: ModelSpec) -> None:
    layouts = layouts_for(ctx.config, spec)
    await ctx.hub.send(control.Loaded(0))
    predictor = policy_wants_predictions(ctx.config.policy)
    regions: dict[str, Region] = {}
    mailbox: Mailbox | None = None
    predictions: Mailbox | None = None
    ring: RingWriter | None = None

    def register(epoch: int, members: tuple[control.Member, ...]) -> Mapping[str, Region]:
        for label, nbytes in (
            ("mailbox", layouts.mailbox.nbytes),
            ("ring", layouts.ring.nbytes),
            ("feedback", layouts.feedback.nbytes),
        ):
            regions[label] = ctx.fabric.register(nbytes, label=label)
        # Readers check the headers of ring and mailbox when they map them, so these stand before anybody has the keys.
        nonlocal mailbox, predictions, ring
        mailbox = Mailbox(regions["mailbox"].buffer, layouts.mailbox, epoch)
        ring = RingWriter(regions["ring"].buffer, layouts.ring, epoch)
        if predictor is not None:
            regions["predictions"] = ctx.fabric.register(layouts.mailbox.nbytes, label="predictions")
            predictions = Mailbox(regions["predictions"].buffer, layouts.mailbox, epoch)
        return regions

    directory = await ctx.hub.open_epoch(ctx.fabric, register)
    assert mailbox is not None
    assert ring is not None
    doors = await _doors(ctx, directory)
    planning, recorder = _planning(
        ctx, spec, layouts, mailbox, predictions, ring, regions["feedback"], doors, directory.epoch
    )
    async with contextlib.AsyncExitStack() as stack:
        if recorder is not None:
            stack.callback(recorder.close)
        await ctx.hub.linked(directory.epoch)
        group = await stack.enter_async_context(crew())
        if recorder is not None:
            group.create_task(recorder.serve(), name="recorder")
        group.create_task(_demand(planning, regions["mailbox"], layouts), name="demand")
        group.create_task(_feedback(planning, regions["feedback"]), name="feedback")
        if predictions is not None:
            group.create_task(_predictions(planning, regions["predictions"]), name="predictions")
        group.create_task(_control(ctx, planning), name="control")


@dataclass(frozen=True, slots=True)
class _Doors:
    """How the FFN workers hear of a plan: those that read the ring itself, and the leads of copies."""

    bells: tuple[tuple[Link, RegionKey], ...]
    mirrors: tuple[tuple[Link, RegionKey], ...]


async def _doors(ctx: RoleContext, directory: Directory) -> _Doors:
    nodes = directory.nodes

    async def door(rank: int, label: str) -> tuple[Link, RegionKey]:
        return await directory.connect(FFN, rank, Lane.DEMAND), directory.key(FFN, rank, label)

    if nodes.ring_is_mirrored:
        return _Doors((), tuple([await door(lead, "ring") for lead in nodes.ffn_leads().values()]))
    return _Doors(tuple([await door(rank, "bells") for rank in range(ctx.config.topology.ffn)]), ())


def build_policy(
    config: RunConfig, spec: ModelSpec, costs: CostModel, read_costs: Callable[[int], Costs] | None = None
) -> Policy:
    """The policy of this run. Raises ``ConfigError``, also for what its constructor raises.

    ``read_costs``: through which it reads ``costs``; none: itself.
    """
    topology = config.topology
    return make_policy(
        config.policy,
        PolicyContext(
            planner=planner_config(config, spec),
            primaries_E=contiguous_primaries(spec.num_experts, topology.ffn),
            num_layers=spec.num_moe_layers,
            num_microbatches=topology.microbatches,
            costs=read_costs or costs.layer,
            experts_per_token=spec.experts_per_token,
            options=config.policy_options,
        ),
    )


def check_adopts(policy: Policy) -> None:
    """Raises ``ConfigError`` for a policy that has no use for replicas before its first target."""
    if not hasattr(policy, "adopt_layer"):
        raise ConfigError("warm_start", f"policy {policy.name} uses no replicas that it has not copied", "leave it out")


def recorded_header(config: RunConfig, spec: ModelSpec, policy: Policy) -> TraceHeader:
    """What a recording of this run says of it."""
    topology, planner = config.topology, planner_config(config, spec)
    return TraceHeader(
        experts=spec.num_experts,
        layers=spec.num_moe_layers,
        top_k=spec.experts_per_token,
        tile_tokens=planner.tile_tokens,
        workers=topology.ffn,
        slots=int(planner.slots_N.max()),
        microbatches=topology.microbatches,
        policy=config.policy,
        model=spec.family if config.model is None else Path(config.model).name,
        source="a run",
        planner=planner_fields(planner, contiguous_primaries(spec.num_experts, topology.ffn)),
        options=policy_options(policy),
        ids_files=topology.attention if config.record_ids else 0,
    )


def planner_config(config: RunConfig, spec: ModelSpec) -> PlannerConfig:
    """Sizes and knobs of the planner, the same for every layer."""
    topology = config.topology
    return PlannerConfig(
        num_experts=spec.num_experts,
        num_workers=topology.ffn,
        slots_per_worker=slots_vector(topology.slots_N, topology.ffn),
        tile_tokens=config.planner.tile_tokens,
        copy_budget=config.copy_budget,
        compactness=config.planner.compactness,
        compactness_share=config.planner.compactness_share,
        worker_speed=config.planner.worker_speed or 1.0,
    )


def seeded_costs(config: RunConfig, spec: ModelSpec) -> CostModel:
    """The cost model before anything was measured."""
    return CostModel(
        Costs(tile_us=config.costs.tile_us, copy_us=config.costs.copy_us, window_us=config.costs.window_us),
        num_layers=spec.num_moe_layers,
        frozen=not config.costs.adapt,
        costs_N=planner_config(config, spec).costs_N,
    )


def _planning(
    ctx: RoleContext,
    spec: ModelSpec,
    layouts: Layouts,
    mailbox: Mailbox,
    predictions: Mailbox | None,
    ring: RingWriter,
    feedback: Region,
    doors: _Doors,
    epoch: int,
) -> tuple[Planning, Recorder | None]:
    config, topology = ctx.config, ctx.config.topology
    primaries_E = contiguous_primaries(spec.num_experts, topology.ffn)
    costs = seeded_costs(config, spec)
    watched = WatchedCosts(costs.layer)
    policy = build_policy(config, spec, costs, None if config.record is None else watched)
    timeout_us = config.times.control_s * 1e6

    async def ring_bells(sequence: int) -> None:
        bell = bells.PLAN(sequence)
        await ring_all(doors.bells, bell, timeout_us=timeout_us)
        for link, key in doors.mirrors:
            offset, entry = layouts.ring.entry_offset(sequence), ring.raw_entry(sequence)
            await link.write(key, offset, entry, notify=bell, timeout_us=timeout_us)

    cells = compiled_cells(policy, mailbox, ring) if predictions is None else None
    publisher = Publisher(ring, epoch=epoch, num_layers=spec.num_moe_layers, now_ns=ctx.clock.now_ns, cells=cells)
    warm = None
    if config.warm_start is not None:
        check_adopts(policy)
        warm = warm_copies(config.warm_start, planner_config(config, spec), primaries_E, spec.num_moe_layers)
    hot = None
    if cells is not None and isinstance(policy, Afore):
        hot = HotPath(policy, cells, mailbox, ring, epoch=epoch, publisher=publisher)
    stats = RunStats(
        num_layers=spec.num_moe_layers,
        num_workers=topology.ffn,
        tile_tokens=config.planner.tile_tokens,
        primaries_E=primaries_E,
        costs_N=planner_config(config, spec).costs_N,
    )
    recorder = None
    if config.record is not None:
        header = recorded_header(config, spec, policy)
        recorder = Recorder(config.record, header, costs=watched, counters=stats.counters, now_ns=ctx.clock.now_ns)
        policy = Recorded(policy, recorder)
    for layer, copies in warm or ():
        policy.adopt_layer(layer, filled(planner_config(config, spec), copies))  # type: ignore[attr-defined]  # checked
    planning = Planning(
        clock=ctx.clock,
        tracer=ctx.tracer,
        times=config.times,
        policy=policy,
        costs=costs,
        book=DemandBook(
            num_layers=spec.num_moe_layers,
            num_experts=spec.num_experts,
            num_microbatches=topology.microbatches,
            take=mailbox.take,
            now_ns=ctx.clock.now_ns,
        ),
        ring=ring,
        publisher=publisher,
        feedback=FeedbackReader(feedback.buffer, layouts.feedback, epoch),
        stats=stats,
        num_layers=spec.num_moe_layers,
        num_workers=topology.ffn,
        ring_bells=ring_bells,
        report=ctx.hub.send,
        watched=lambda: ctx.hub.watch.plans,
        charge_us=config.planner.charge_us,
        hot=hot,
        note=ctx.note,
        recorder=recorder,
        warm=warm,
        predictions=None
        if predictions is None
        else PredictionBook(
            num_layers=spec.num_moe_layers,
            num_experts=spec.num_experts,
            num_microbatches=topology.microbatches,
            take=predictions.take,
        ),
    )
    return planning, recorder


async def _control(ctx: RoleContext, planning: Planning) -> None:
    while True:
        message = await ctx.hub.receive()
        if isinstance(message, control.Announce):
            await planning.announced(message)
        elif isinstance(message, control.StatsRequest):
            await ctx.hub.send(control.Stats(message.ticket, await planning.statistics()))
        else:
            raise WireError(HUB, f"sent {type(message).__name__}, which a scheduler cannot serve")


async def _demand(planning: Planning, mailbox: Region, layouts: Layouts) -> None:
    while True:
        notifications = await mailbox.notified(timeout_us=None)
        arrived = {layouts.mailbox.from_immediate(n.immediate)[1] for n in notifications}
        await planning.demand_arrived(sorted(arrived))


async def _predictions(planning: Planning, predictions: Region) -> None:
    while True:
        notifications = await predictions.notified(timeout_us=None)
        await planning.predictions_arrived(sorted({bells.decode(n.immediate).microbatch for n in notifications}))


async def _feedback(planning: Planning, feedback: Region) -> None:
    while True:
        notifications = await feedback.notified(timeout_us=None)
        await planning.feedback_arrived(sorted({bells.decode(n.immediate).rank for n in notifications}))
