"""The one entrance to every role: join, serve, leave; and the real world that roles are served in."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Protocol

from afore.core.clock import Clock, WallClock, deadline
from afore.core.config import RunConfig
from afore.core.errors import CheckpointError, PeerLost
from afore.core.topology import ATTENTION, DOOR, FFN, PREFILL, SCHEDULER, member_name
from afore.core.trace import Tracer, write_spans
from afore.models.config import ModelSpec, read_config
from afore.models.tokenizer import Tokenizer
from afore.scheduler import role as scheduler_role
from afore.serving import door
from afore.serving.engine import Text
from afore.serving.spec import checkpoint_path
from afore.transport.api import Fabric
from afore.transport.crew import crew
from afore.transport.recording import RecordingFabric
from afore.transport.session import HUB, HubSession, Note, RoleContext, no_note
from afore.workers import attention, ffn, prefill
from afore.workers.attention import AttentionWorld
from afore.workers.checkpoint_models import CheckpointModels
from afore.workers.ffn_world import CheckpointFfnWorld, FfnWorld
from afore.workers.prefill import PrefillWorld

log = logging.getLogger(__name__)

JOIN_RETRY_US = 20_000.0
"""How soon a role looks again for a hub that is not up yet."""


class World(scheduler_role.SchedulerWorld, FfnWorld, AttentionWorld, PrefillWorld, Protocol):
    """What differs between real and virtual time, for every role."""

    def text(self, config: RunConfig) -> Text | None:
        """The model's tokenizer; none where it has none: prompts are token ids then."""
        ...

    def tracer(self, name: str, clock: Clock, config: RunConfig) -> Tracer:
        """Where the role ``name`` records its spans. Raises ``HostError`` where its file cannot be made."""
        ...


class RealWorld(CheckpointModels, CheckpointFfnWorld):
    """Checkpoints, wall time, CPU devices."""

    def model_spec(self, config: RunConfig) -> ModelSpec:
        """The model's numbers from its config.json. Raises ``CheckpointError``."""
        spec, _, _ = read_config(checkpoint_path(config))
        return spec

    def text(self, config: RunConfig) -> Text | None:
        """The model's tokenizer; none where the checkpoint has none."""
        try:
            return Tokenizer(checkpoint_path(config))
        except CheckpointError as error:
            log.warning("%s; prompts must be token ids", error)
            return None

    def tracer(self, name: str, clock: Clock, config: RunConfig) -> Tracer:
        """Writes a file where the configuration asks for one."""
        directory = Path(config.trace) if config.trace is not None else None
        return Tracer(name, clock, directory, most_bytes=config.trace_mib << 20)


async def run_role(
    role: str,
    rank: int,
    *,
    fabric: Fabric,
    hub_address: str,
    clock: Clock,
    config: RunConfig,
    world: World,
    replaceable: bool = False,
) -> None:
    """One role's life over ``fabric``, which it closes. ``config`` is the door's; the others are sent theirs.

    ``replaceable`` is the door's too: a role that is lost before all have loaded only frees its rank.
    Returns after an orderly stop; raises the ``AforeError`` that ended the role.
    """
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(fabric.close)
        note: Note = no_note
        if config.record_wire is not None:
            recording = RecordingFabric(fabric, config.record_wire, member_name(role, rank), clock)
            stack.push_async_callback(recording.close)
            fabric, note = recording, recording.log.add
        if role == DOOR:
            spec, text = world.model_spec(config), world.text(config)
            await door.serve(fabric, hub_address, config, spec, text, clock, replaceable=replaceable)
            return
        session = await _join(fabric, hub_address, role, rank, clock, config.times.join_s)
        stack.push_async_callback(session.close)
        tracer = world.tracer(session.name, clock, session.config)
        stack.callback(tracer.close)
        ctx = RoleContext(
            role=role,
            rank=session.rank,
            config=session.config,
            clock=clock,
            fabric=fabric,
            hub=session,
            tracer=tracer,
            note=note,
        )
        async with crew() as group:
            beside = [group.create_task(session.forward_spans(tracer, clock), name="spans")]
            # Not in virtual time: nothing is killed there, and a timer of its own would change what a run does.
            if tracer.path is not None and isinstance(clock, WallClock):
                beside.append(group.create_task(write_spans(tracer, clock), name="span file"))
            await _serve(ctx, world)
            for task in beside:
                task.cancel()


async def _serve(ctx: RoleContext, world: World) -> None:
    if ctx.role == SCHEDULER:
        await scheduler_role.serve(ctx, world)
    elif ctx.role == FFN:
        await ffn.serve(ctx, world)
    elif ctx.role == ATTENTION:
        await attention.serve(ctx, world)
    else:
        assert ctx.role == PREFILL
        await prefill.serve(ctx, world)


async def _join(fabric: Fabric, hub_address: str, role: str, rank: int, clock: Clock, join_s: float) -> HubSession:
    """Joins as soon as there is a hub: roles may start in any order."""
    async with deadline(
        join_s * 1e6, peer=HUB, operation=f"{role} looking for the hub", hint="start the role door of the same cluster"
    ):
        while True:
            try:
                return await HubSession.join(fabric, hub_address, role, rank, timeout_us=join_s * 1e6)
            except PeerLost:
                await clock.sleep_us(JOIN_RETRY_US)
