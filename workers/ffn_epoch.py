"""One epoch of an FFN worker's service: the parts that run side by side, and what they share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from afore.core import control
from afore.core.errors import WireError
from afore.core.slots import contiguous_primaries
from afore.scheduler.policies.registry import policy_wants_inputs
from afore.transport import bells
from afore.transport.api import Link, RegionKey
from afore.transport.crew import crew
from afore.transport.layouts import Layouts
from afore.transport.ring import RingReader
from afore.transport.ring_mirror import RingCopies
from afore.transport.ringing import ring_all
from afore.transport.session import HUB, HubSession, RoleContext
from afore.workers.belfry import Belfry
from afore.workers.device.base import CopyJob
from afore.workers.far_experts import FarExperts, FarStore
from afore.workers.ffn_worker import Worker
from afore.workers.ffn_world import Peer
from afore.workers.group.base import Group
from afore.workers.inputs_watch import InputsWatch
from afore.workers.migrator import Migrator
from afore.workers.mirror_keeper import MirrorKeeper
from afore.workers.reader import Reader
from afore.workers.reports import Reports
from afore.workers.sequencer import Sequencer, SequencerTimes
from afore.workers.slot_table import HeldCopy, SlotTable


class Epoch:
    """One epoch's service: the worker's coroutines and what they share."""

    def __init__(
        self,
        ctx: RoleContext,
        worker: Worker,
        *,
        belfry: Belfry,
        keepers: Mapping[str, MirrorKeeper],
        layouts: Layouts,
        peers_N: list[Peer],
        far_stores: Mapping[int, FarStore],
        group: Group,
        ring: RingReader,
        copies: RingCopies | None,
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
        self._keepers = keepers
        self._inputs_watch = self._watch(ctx, belfry, group, reports, epoch)
        self.migrator = Migrator(
            name=ctx.name,
            table=self.table,
            device=worker.parts.device,
            clock=ctx.clock,
            tracer=ctx.tracer,
            make_job=self._copy_job,
            patience_us=times.target_s * 1e6,
            remote=FarExperts(far_stores, self._primaries_E) if far_stores else None,
        )
        self._fetches = bool(far_stores)
        self.sequencer = Sequencer(
            rank=ctx.rank,
            device=worker.parts.device,
            store=worker.store,
            group=group,
            wake=belfry.inputs,
            migrator=self.migrator,
            staging_M=[
                worker.parts.staging(
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
            make_compute=worker.parts.compute,
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
            copies=copies,
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
        if self._fetches:
            coros["fetcher"] = self.migrator.fetch()
        if self._inputs_watch is not None:
            coros["inputs"] = self._inputs_watch.run()
        for label, keeper in self._keepers.items():
            coros[f"{label} mirror"] = keeper.run()
        return [tasks.create_task(coro, name=f"{self._name} {name}") for name, coro in coros.items()]

    async def _ring_neighbours(self, sequence: int) -> None:
        await ring_all(self._neighbours, bells.VERDICTS(sequence), timeout_us=self._timeout_us)

    def _copy_job(self, held: HeldCopy) -> CopyJob:
        source = int(self._primaries_E[held.expert])
        nbytes, run = self._store.copy_closure(
            held.layer, held.expert, held.slot, self._peers_N[source], held.generation
        )
        return CopyJob(source=source, destination=self._rank, nbytes=nbytes, run=run)
