"""Slot safety: no weight is read while it is written, no token is computed with another expert's weights."""

from __future__ import annotations

import asyncio

import pytest

from afore.core.clock import LoopClock
from afore.testing import run_virtual
from afore.transport.loopback import LoopbackNetwork
from afore.workers.device.ports import EmulatedFleet, Jitter
from afore.workers.device.profile import LAPTOP_EMULATED
from afore.workers.ffn_emulated import EmulatedFfn
from afore.workers.tagged import TaggedStore, TagReport
from tests.workers.ffn_rig import Rig, Shape
from tests.workers.random_plans import RandomPlans


async def storm(seed: int, shape: Shape) -> tuple[Rig, TagReport]:
    """A run with delays everywhere, and what the tags say of it."""
    network = LoopbackNetwork(LoopClock(), latency_us=1.0, seed=seed)
    fleet = EmulatedFleet(LoopClock(), asyncio.get_running_loop(), seed=seed, jitter=Jitter(compute_us=60, copy_us=200))
    stores: list[TaggedStore] = []
    rig = Rig(shape, network, seed)
    rig.jitter_us = 50.0
    await rig.open(lambda ctx: EmulatedFfn(fleet, ctx.rank, LAPTOP_EMULATED, stores))
    try:
        await rig.serve(RandomPlans(shape, seed))
    finally:
        await rig.close()
    reports = [store.check() for store in stores]
    return rig, TagReport(
        reads=sum(r.reads for r in reports),
        writes=sum(r.writes for r in reports),
        replica_reads=sum(r.replica_reads for r in reports),
    )


@pytest.mark.slow
def test_storm() -> None:
    for seed in range(20):
        rig, tags = run_virtual(storm(seed, Shape()), seed=seed)
        assert tags.writes == rig.seen.copies > 0
        assert tags.replica_reads > 0
