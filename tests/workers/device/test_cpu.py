"""What only the CPU device has: threads, their hand-over, and slow copies on request."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from afore.core.clock import WallClock
from afore.core.errors import DeviceClosed, DeviceError
from afore.workers.device.base import CopyJob, Work
from afore.workers.device.cpu import CpuDevice
from tests.workers.device.rig import PATIENCE_US, WORK, come

CLOCK = WallClock()


def _nothing() -> None:
    pass


def _job(nbytes: int = 0) -> CopyJob:
    return CopyJob(source=0, destination=1, nbytes=nbytes, run=_nothing)


@pytest.fixture
def device_threads() -> Iterator[set[threading.Thread]]:
    """The threads there were before; afterwards there must be no others, and no more descriptors."""
    before, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield before
    assert set(threading.enumerate()) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_threads_are_named_and_closures_run_in_them() -> None:
    device = CpuDevice(CLOCK, asyncio.get_running_loop(), name="ffn-3")
    names: list[str] = []
    for stream in (device.model_stream, device.migration_stream):
        stream.run(WORK, lambda: names.append(threading.current_thread().name))
        event = stream.record()
        stream.flush()
        await come(event)
    device.close()
    assert names == ["ffn-3-compute", "ffn-3-migration"]


async def test_inline_runs_here_and_now() -> None:
    device = CpuDevice(CLOCK, inline=True)
    threads: list[threading.Thread] = []
    device.model_stream.run(WORK, lambda: threads.append(threading.current_thread()))
    event = device.model_stream.record()
    device.model_stream.flush()
    assert event.done
    assert threads == [threading.current_thread()]
    device.close()


async def test_inline_a_closure_may_enqueue() -> None:
    device = CpuDevice(CLOCK, inline=True)
    stream, log = device.model_stream, []

    def outer() -> None:
        stream.run(WORK, lambda: log.append("inner"))
        stream.flush()
        log.append("outer")

    stream.run(WORK, outer)
    stream.run(WORK, lambda: log.append("next"))
    stream.flush()
    assert log == ["outer", "next", "inner"]
    device.close()


def test_inline_an_interrupt_is_not_swallowed() -> None:
    device = CpuDevice(CLOCK, inline=True)

    def interrupt() -> None:
        raise KeyboardInterrupt

    device.model_stream.run(WORK, interrupt)
    with pytest.raises(KeyboardInterrupt):
        device.model_stream.flush()
    device.close()


async def test_a_thread_does_not_die_in_silence() -> None:
    device = CpuDevice(CLOCK, asyncio.get_running_loop())
    device.model_stream.run(Work("experts", None), sys.exit)
    event = device.model_stream.record()
    device.model_stream.flush()
    with pytest.raises(DeviceError, match="experts: SystemExit"):
        await come(event)
    device.close()


def test_threads_need_a_loop() -> None:
    with pytest.raises(ValueError, match="needs the event loop"):
        CpuDevice(CLOCK)


async def test_close_ends_both_threads_in_the_middle_of_everything(device_threads: set[threading.Thread]) -> None:
    """The compute thread waits for a copy, the migration thread is in a copy that is made to last an hour."""
    device = CpuDevice(CLOCK, asyncio.get_running_loop(), emulate_copy_us=3.6e9)
    assert len(set(threading.enumerate()) - device_threads) == 2
    started = threading.Event()
    job = CopyJob(source=0, destination=1, nbytes=0, run=started.set)
    device.migration_stream.copy(Work("copy", None), [job, job])
    copied = device.migration_stream.record()
    device.migration_stream.flush()
    device.model_stream.wait(copied)
    ran: list[str] = []
    device.model_stream.run(WORK, lambda: ran.append("never"))
    computed = device.model_stream.record()
    device.model_stream.flush()
    waiter = asyncio.ensure_future(computed.wait(timeout_us=PATIENCE_US))
    await asyncio.to_thread(started.wait)
    device.close()
    with pytest.raises(DeviceClosed):
        await waiter
    assert not copied.done
    assert ran == []
    await asyncio.get_running_loop().shutdown_default_executor()


def test_close_after_the_loop(device_threads: set[threading.Thread]) -> None:
    async def main() -> CpuDevice:
        return CpuDevice(CLOCK, asyncio.get_running_loop())

    asyncio.run(main()).close()


@pytest.mark.parametrize("inline", [False, True])
async def test_copies_can_be_made_to_last(inline: bool) -> None:
    loop = asyncio.get_running_loop()
    by_copy = CpuDevice(CLOCK, loop, inline=inline, emulate_copy_us=500)
    by_rate = CpuDevice(CLOCK, loop, inline=inline, emulate_copy_gb_per_s=1)
    for device, nbytes in ((by_copy, 0), (by_rate, 500_000)):
        stream = device.migration_stream
        begin = stream.record()
        stream.copy(Work("copy", None), [_job(nbytes), _job(nbytes), _job(nbytes)])
        end = stream.record()
        stream.flush()
        await come(end)
        assert end.completed_ns - begin.completed_ns >= 3 * 500_000
        device.close()


@pytest.mark.slow
async def test_slots_are_reused_safely_under_real_concurrency() -> None:
    """Rows of one number each are overwritten as soon as the previous use allows; a torn or early read shows as a mixture."""
    device = CpuDevice(CLOCK, asyncio.get_running_loop())
    model, migration = device.model_stream, device.migration_stream
    rows_RD = np.zeros((2, 200_000), dtype=np.int64)
    seen: list[tuple[int, int]] = []

    def look(slot: int) -> None:
        seen.append((int(rows_RD[slot].min()), int(rows_RD[slot].max())))

    use = [model.record(), model.record()]
    for round_ in range(1, 120):
        slot = round_ % 2
        migration.wait(use[slot])
        migration.copy(Work("copy", None), [CopyJob(0, 1, 0, partial(rows_RD[slot].fill, round_))])
        copied = migration.record()
        migration.flush()
        model.wait(copied)
        model.run(WORK, partial(look, slot))
        use[slot] = model.record()
        model.flush()
    await come(*use)
    assert seen == [(round_, round_) for round_ in range(1, 120)]
    device.close()
