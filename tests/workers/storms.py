"""FFN workers in virtual time with delays everywhere: copies, compute, publication, inputs, and the order of ready callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from afore.core.clock import LoopClock
from afore.core.config import RunConfig
from afore.testing import run_virtual
from afore.transport.loopback import LoopbackNetwork
from afore.workers.device.ports import EmulatedFleet, Jitter
from afore.workers.device.profile import LAPTOP_EMULATED, CostProfile
from afore.workers.ffn_emulated import EmulatedFfn
from afore.workers.tagged import TaggedStore
from tests.workers.ffn_parts import Plans, Shape
from tests.workers.ffn_rig import Rig

JITTER = Jitter(compute_us=60.0, copy_us=200.0)


@dataclass(slots=True)
class Weather:
    """What storms have shown, added up."""

    seeds: int = 0
    targets: int = 0
    refused: int = 0
    skipped: int = 0
    """Times a worker skipped a target."""
    run: int = 0
    copies: int = 0
    replica_reads: int = 0
    exposed: int = 0
    """Targets that waited for a copy on some worker."""


@asynccontextmanager
async def emulated(
    shape: Shape,
    seed: int = 0,
    *,
    jitter: Jitter | None = None,
    config: RunConfig | None = None,
    collectives: bool = False,
    profile: CostProfile = LAPTOP_EMULATED,
) -> AsyncIterator[tuple[Rig, list[TaggedStore]]]:
    """A rig of emulated workers, and their tagged stores, which are checked at the end. In virtual time only."""
    clock = LoopClock()
    fleet = EmulatedFleet(clock, asyncio.get_running_loop(), seed=seed, jitter=jitter)
    stores: list[TaggedStore] = []
    rig = Rig(shape, LoopbackNetwork(clock, latency_us=1.0, seed=seed), seed, config)
    await rig.open(lambda ctx: EmulatedFfn(fleet, ctx.rank, profile, stores, collectives=collectives))
    try:
        yield rig, stores
    finally:
        await rig.close()
    for store in stores:
        store.check()


def storm(
    seed: int,
    shape: Shape,
    plans: Callable[[Shape, int], Plans],
    weather: Weather | None = None,
    *,
    aborts: float = 0.0,
    damage: float = 0.0,
) -> None:
    """One run, every reply checked. Raises ``SlotError`` when the stores' tags show a read that could give wrong tokens."""

    async def main() -> None:
        async with emulated(shape, seed, jitter=JITTER, collectives=seed % 4 == 3) as (rig, stores):
            rig.jitter_us = 50.0
            rig.aborts, rig.damage = aborts, damage
            await rig.serve(plans(shape, seed))
        reports = [store.check() for store in stores]
        assert sum(report.writes for report in reports) == rig.seen.copies
        if weather is not None:
            weather.seeds += 1
            weather.targets += len(rig.seen.entries)
            weather.refused += len(rig.seen.refused)
            weather.skipped += sum(epoch.sequencer.counts.skipped for epoch in rig.epochs)
            weather.run += sum(epoch.sequencer.counts.run for epoch in rig.epochs)
            weather.copies += rig.seen.copies
            weather.replica_reads += sum(report.replica_reads for report in reports)
            weather.exposed += len({r.sequence for r in rig.records if r.exposed_us > 0})

    run_virtual(main, seed=seed)
