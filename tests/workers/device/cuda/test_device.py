"""The CUDA device over the strict driver: what is enqueued where, in which order, and that every handle is given back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from afore.core.clock import WallClock
from afore.core.errors import DeviceError
from afore.core.target import Target
from afore.workers.device.base import CopyJob, Event, Work
from afore.workers.device.cuda.completion import compiled_ring
from afore.workers.device.cuda.copies import SpanCopy
from afore.workers.device.cuda.device import CompletionName, CudaDevice
from afore.workers.device.cuda.driver import Driver, Span
from afore.workers.device.cuda.events import PAUSE_NS
from afore.workers.kernels import CpuKernels
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.rig import PATIENCE_US, come

WORK = Work("experts", Target(layer=0, microbatch=1, step=2))


class Hands:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.ns = 5_000_000_000

    def now_ns(self) -> int:
        return self.ns

    async def sleep_us(self, duration_us: float) -> None:
        raise AssertionError("nobody sleeps here")


@asynccontextmanager
async def opened(
    calls: FakeCalls, *, completion: CompletionName = "bell", clock: object = None
) -> AsyncIterator[CudaDevice]:
    """A device over ``calls``; afterwards nothing may be left, and nothing may have been done in silence."""
    device = CudaDevice(
        Driver(calls),
        clock or WallClock(),  # type: ignore[arg-type]
        asyncio.get_running_loop(),
        CpuKernels(),
        completion=completion,
        current=lambda handle: contextlib.nullcontext(),
    )
    try:
        yield device
    finally:
        device.close()
    assert calls.mistakes == []
    assert set(calls.live.values()) == {0}, calls.live


def copy_job(driver: Driver, nbytes: int = 64, staging: int = 0) -> CopyJob:
    source, destination = driver.allocate(nbytes), driver.allocate(nbytes)
    spans = (Span(destination, source, nbytes // 2), Span(destination + nbytes // 2, source + nbytes // 2, nbytes // 2))
    return CopyJob(0, 1, nbytes, SpanCopy(spans, staging))


def release(driver: Driver, *jobs: CopyJob) -> None:
    for job in jobs:
        assert isinstance(job.run, SpanCopy)
        driver.free(job.run.spans[0].destination)
        driver.free(job.run.spans[0].source)


async def test_priorities() -> None:
    calls = FakeCalls()
    async with opened(calls) as device:
        of = calls.priorities
        assert of[device.model_stream.handles.stream] == -5
        assert of[device.migration_stream.handles.stream] == 0


async def test_what_is_enqueued_where() -> None:
    """Use of a slot, the copy into it behind that use, the next use behind the copy: as the driver is told."""
    calls = FakeCalls()
    async with opened(calls) as device:
        model, migration = device.model_stream, device.migration_stream
        job, other = copy_job(device.driver), copy_job(device.driver)
        calls.hold(model.handles.stream)
        del calls.calls[:]
        model.run(WORK, lambda: calls.calls.append(("first use", ())))
        used = model.record()
        model.flush()
        migration.wait(used)
        migration.copy(Work("copy", None), [job, other])
        copied = migration.record()
        migration.flush()
        model.wait(copied)
        model.run(WORK, lambda: calls.calls.append(("second use", ())))
        done = model.record()
        model.flush()
        assert not any(event.done for event in (used, copied, done))
        told = [(name, arguments) for name, arguments in calls.calls if name != "cuEventCreate"]
        use_event, copy_event = told[1][1][0], told[4][1][0]
        streams = model.handles.stream, migration.handles.stream
        assert [name for name, _ in told] == [
            "first use",
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuMemcpyBatchAsync",
            "cuEventRecord",
            "cuStreamWaitEvent",
            "second use",
            "cuEventRecord",
        ]
        assert told[1][1] == (use_event, streams[0])
        assert told[2][1] == (streams[1], use_event, 0)
        assert len(told[3][1][0]) == 4, "two experts of two pieces in one batch"
        assert told[3][1][1] == streams[1]
        assert told[5][1] == (streams[0], copy_event, 0)
        calls.let_go(model.handles.stream)
        await come(used, copied, done)
        assert used.completed_ns < copied.completed_ns < done.completed_ns
        release(device.driver, job, other)


async def test_a_wait_for_what_is_done_is_not_enqueued() -> None:
    calls = FakeCalls()
    async with opened(calls) as device:
        used = device.model_stream.record()
        device.model_stream.flush()
        await come(used)
        del calls.calls[:]
        device.migration_stream.wait(used)
        device.migration_stream.record()
        device.migration_stream.flush()
        assert calls.named("cuStreamWaitEvent") == []


async def test_through_host_memory_in_stream_order() -> None:
    calls = FakeCalls()
    async with opened(calls) as device:
        staging = device.driver.allocate_pinned(64)
        direct, *staged = copy_job(device.driver), *(copy_job(device.driver, staging=staging) for _ in range(2))
        stream = device.migration_stream
        stream.copy(Work("copy", None), [staged[0], direct, staged[1]])
        end = stream.record()
        stream.flush()
        await come(end)
        batches = [arguments[0] for name, arguments in calls.named("cuMemcpyBatchAsync")]
        assert [span[0] for span in batches[0]] == [span.destination for span in direct.run.spans]  # type: ignore[attr-defined]
        # Each fills the one buffer and empties it before the next one fills it.
        assert [batch[0][0] == staging for batch in batches[1:]] == [True, False, True, False]
        device.driver.free_pinned(staging)
        release(device.driver, direct, *staged)


async def test_bells_stand_on_streams_of_their_own() -> None:
    """An awaited event of a stream that stands still holds up neither the other stream's bell nor any work."""
    calls = FakeCalls()
    async with opened(calls) as device:
        model, migration = device.model_stream, device.migration_stream
        calls.hold(model.handles.stream)
        late, soon = model.record(), migration.record()
        model.flush()
        waiting = asyncio.ensure_future(late.wait(timeout_us=PATIENCE_US))
        await asyncio.sleep(0)
        migration.flush()
        await come(soon)
        streams = {arguments[0] for _, arguments in calls.named("cuLaunchHostFunc")}
        assert streams <= {model.handles.bell, migration.handles.bell}
        assert not late.done
        calls.let_go(model.handles.stream)
        await waiting


async def test_events_are_used_again() -> None:
    calls = FakeCalls()
    async with opened(calls) as device:
        for _ in range(50):
            events = [device.model_stream.record() for _ in range(6)]
            device.model_stream.flush()
            await come(events[-1])
            assert all(event.done for event in events)
        assert len(calls.named("cuEventCreate")) < 16


async def test_events_that_nobody_looks_at_are_used_again() -> None:
    calls = FakeCalls()
    async with opened(calls) as device:
        for _ in range(50):
            device.model_stream.record()
            last: Event = device.model_stream.record()
            device.model_stream.flush()
            await come(last)
        gc.collect()
        assert len(calls.named("cuEventCreate")) < 10


async def test_times_stay_near_an_anchor() -> None:
    """float32 milliseconds are no better than 0.25 ms after an hour: no two events that are compared lie seconds apart."""
    calls, clock = FakeCalls(), Hands()
    async with opened(calls, clock=clock) as device:
        stamps = []
        for _ in range(100):
            calls.machine.now_us += 300_000
            clock.ns += 300_000_000
            event = device.model_stream.record()
            device.model_stream.flush()
            assert event.done
            stamps.append(event.completed_ns)
        steps = {(after - before) // 1000 for before, after in itertools.pairwise(stamps)}
        assert steps <= {300_000, 300_001, 300_002}
        before = len(calls.named("cuEventSynchronize"))
        assert before == 1, "only the first anchor is set by the host's clock"
        calls.machine.now_us += 3600e6
        clock.ns += 3600 * 10**9
        event = device.model_stream.record()
        device.model_stream.flush()
        assert event.done
        assert abs(event.completed_ns - clock.ns) < 100_000
        assert len(calls.named("cuEventSynchronize")) == before + 1
        assert PAUSE_NS < 3600 * 10**9


@pytest.mark.parametrize("completion", ["bell", "query"])
async def test_a_gpu_that_fails_ends_everything_it_was_given(completion: CompletionName) -> None:
    calls = FakeCalls()
    device = CudaDevice(
        Driver(calls),
        WallClock(),
        asyncio.get_running_loop(),
        CpuKernels(),
        completion=completion,
        current=lambda handle: contextlib.nullcontext(),
    )
    calls.hold(device.model_stream.handles.stream)
    device.model_stream.run(WORK, lambda: None)
    done = device.model_stream.record()
    device.model_stream.flush()
    waiting = asyncio.ensure_future(done.wait(timeout_us=PATIENCE_US))
    await asyncio.sleep(0)
    calls.fail_gpu()  # no host function is called any more
    with pytest.raises(DeviceError, match=r"experts of l0/m1/s2: CudaError: .*memory that is not its own"):
        await waiting
    later = device.migration_stream.record()
    device.migration_stream.flush()
    with pytest.raises(DeviceError, match="experts of l0/m1/s2"):
        await come(later)
    device.close()


async def test_an_earlier_event_awaited_after_a_later_one() -> None:
    calls = FakeCalls()
    async with opened(calls) as device:
        model = device.model_stream
        first = model.record()
        model.flush()
        calls.hold(model.handles.stream)
        last = model.record()
        model.flush()
        waiting = asyncio.ensure_future(last.wait(timeout_us=PATIENCE_US))
        await asyncio.sleep(0)
        await come(first)
        calls.let_go(model.handles.stream)
        await waiting


def test_the_ring_is_compiled_code_that_needs_no_python() -> None:
    import ctypes

    bell = os.eventfd(0, os.EFD_NONBLOCK)
    ring = compiled_ring()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ring.address)
    function(bell)
    function(bell)
    assert os.eventfd_read(bell) == 2
    os.close(bell)
