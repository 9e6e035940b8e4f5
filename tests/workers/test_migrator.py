"""The migrator on an inline device: what is submitted when, and behind what."""

from __future__ import annotations

from functools import partial

import pytest

from afore.core.clock import LoopClock
from afore.core.errors import DeadlineExceeded, SlotError
from afore.core.plan import CopyStart
from afore.core.slots import contiguous_primaries
from afore.core.trace import Tracer
from afore.testing import virtual_test
from afore.workers.device.base import CopyJob, Work
from afore.workers.device.cpu import CpuDevice
from afore.workers.migrator import Migrator
from afore.workers.slot_table import HeldCopy, SlotTable
from tests.workers.entries import entry

ME = 1
"""Of three workers over six experts: owns 2 and 3."""


class Bench:
    """A migrator, and the order in which things ran: copies by (slot, expert), targets by name."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, int] | str] = []
        self.device = CpuDevice(LoopClock(), inline=True)
        self.table = SlotTable(
            rank=ME, num_slots=2, num_layers=1, num_workers=3, primaries_E=contiguous_primaries(6, 3)
        )
        self.migrator = Migrator(
            name="ffn-1",
            table=self.table,
            device=self.device,
            clock=LoopClock(),
            tracer=Tracer("ffn-1", LoopClock(), None),
            make_job=self._job,
            patience_us=1e6,
        )

    def _job(self, held: HeldCopy) -> CopyJob:
        return CopyJob(source=0, destination=ME, nbytes=1, run=partial(self.ran.append, (held.slot, held.expert)))

    def target(self, sequence: int, name: str, *, flush: bool = True) -> None:
        """A target's compute is enqueued; without ``flush`` the device has it not yet, as if it were still computing."""
        stream = self.device.model_stream
        stream.run(Work("experts", None), partial(self.ran.append, name))
        use = stream.record()
        if flush:
            stream.flush()
        self.migrator.enqueued(sequence, use)


@virtual_test
async def test_a_copy_runs_after_the_compute_that_reads_its_slot() -> None:
    bench = Bench()
    bench.migrator.take(entry(0, copies=[(0, ME, 0)], shares=[(0, ME, 0, 1, 0)]))
    bench.migrator.take(entry(1, copies=[(4, ME, 0), (5, ME, 1)], shares=[(4, ME, 0, 1, 1)]))
    assert bench.ran == [(0, 0), (1, 5)], "nobody uses slot 1, so its copy need not wait"
    bench.target(0, "target 0", flush=False)
    assert bench.ran == [(0, 0), (1, 5)], "submitted, and waiting on the stream"
    assert bench.migrator.counts.submitted == 3
    bench.device.model_stream.flush()
    assert bench.ran == [(0, 0), (1, 5), "target 0", (0, 4)]


@virtual_test
async def test_what_need_not_wait_goes_ahead_of_what_must() -> None:
    bench = Bench()
    bench.migrator.take(entry(0, copies=[(0, ME, 0)], shares=[(0, ME, 0, 1, 0)]))
    bench.target(0, "target 0", flush=False)
    bench.migrator.take(entry(1, copies=[(4, ME, 0), (5, ME, 1)]))
    assert bench.ran == [(0, 0), (1, 5)]
    bench.device.model_stream.flush()
    assert bench.ran == [(0, 0), (1, 5), "target 0", (0, 4)]


@virtual_test
async def test_two_fills_of_one_slot_keep_their_order_and_their_own_events() -> None:
    bench = Bench()
    bench.migrator.take(entry(0, copies=[(0, ME, 0)], shares=[(0, ME, 0, 1, 0)]))
    bench.migrator.take(entry(1, copies=[(4, ME, 0)]))
    bench.migrator.take(entry(2, copies=[(5, ME, 0)]))
    first = await bench.migrator.submitted(0, 0, 0, timeout_us=1.0)
    bench.target(0, "target 0")
    assert bench.ran == [(0, 0), "target 0", (0, 4), (0, 5)]
    last = await bench.migrator.submitted(0, 0, 2, timeout_us=1.0)
    assert (first.expert, last.expert) == (0, 5)
    assert first.event is not last.event


@virtual_test
async def test_start_arrival_waits_for_the_turn_and_for_the_target_ahead() -> None:
    bench = Bench()
    bench.migrator.take(entry(0, copies=[(0, ME, 0)], start=CopyStart.ARRIVAL))
    assert bench.ran == []
    stream = bench.device.model_stream
    stream.run(Work("experts", None), partial(bench.ran.append, "target ahead"))
    ahead = stream.record()
    bench.migrator.arrived(0, ahead)
    assert bench.ran == []
    stream.flush()
    assert bench.ran == ["target ahead", (0, 0)]


@virtual_test
async def test_submission_has_a_deadline_and_a_defect_a_name() -> None:
    bench = Bench()
    bench.migrator.take(entry(0, copies=[(0, ME, 0)], start=CopyStart.ARRIVAL))
    with pytest.raises(
        DeadlineExceeded, match="peer ffn-1: submission of the copy of generation 0 into layer 0 slot 0"
    ):
        await bench.migrator.submitted(0, 0, 0, timeout_us=1000.0)
    bench.migrator.arrived(0, None)
    bench.migrator.take(entry(1, copies=[(4, ME, 0)]))
    with pytest.raises(SlotError, match="holds generation 1, but a target of generation 0"):
        await bench.migrator.submitted(0, 0, 0, timeout_us=1000.0)
