"""Every host-side device under one roof: the same scenario runs on each, in the loop that belongs to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import uvloop

from afore.core.clock import LoopClock, WallClock
from afore.testing import run_virtual
from afore.workers.device.base import CopyJob, Device, Event, Stream, Work
from afore.workers.device.cpu import CpuDevice
from afore.workers.device.cuda.device import CudaDevice
from afore.workers.device.cuda.driver import Driver, load_driver
from afore.workers.device.emulated import EmulatedDevice
from afore.workers.device.ports import EmulatedFleet, Jitter
from afore.workers.device.profile import LAPTOP_EMULATED
from afore.workers.kernels import CpuKernels
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.presence import need_gpu

KINDS = (
    "threads",
    "threads-uvloop",
    "inline",
    "emulated",
    "emulated-shaken",
    "fake-cuda",
    "fake-cuda-query",
    "fake-cuda-uvloop",
)
GPU_KINDS = ("cuda", "cuda-query")
"""On a real GPU, where there is one."""
EVERY_KIND = (*KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS))
PATIENCE_US = 20e6
"""For what must come: only a defect waits so long."""

WORK = Work("reply", None)


@dataclass
class Rig:
    """A device, another one of its kind, and a log that closures write into."""

    device: Device
    other: Device
    log: list[str] = field(default_factory=list)

    @property
    def model(self) -> Stream:
        return self.device.model_stream

    @property
    def migration(self) -> Stream:
        return self.device.migration_stream

    def note(self, stream: Stream, entry: str) -> None:
        """Enqueues a closure that writes ``entry``."""
        stream.run(WORK, lambda: self.log.append(entry))

    def copy(self, stream: Stream, do: Callable[[], object]) -> None:
        """Enqueues one copy."""

        def run() -> None:
            do()

        stream.copy(Work("copy", None), [CopyJob(source=1, destination=0, nbytes=64, run=run)])


async def come(*events: Event) -> None:
    """Awaits events that must come."""
    for event in events:
        await event.wait(timeout_us=PATIENCE_US)


def on_device(kind: str, scenario: Callable[[Rig], Awaitable[None]]) -> None:
    """Runs ``scenario`` on a new device of ``kind`` in a new loop; closes the devices."""

    if kind in GPU_KINDS:
        need_gpu()

    async def main() -> None:
        device, other = _devices(kind)
        try:
            await scenario(Rig(device, other))
        finally:
            device.close()
            other.close()

    if kind.startswith("emulated"):
        run_virtual(main, seed=7 if kind == "emulated-shaken" else None)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if kind.endswith("uvloop") else None) as runner:
        runner.run(main())


def _devices(kind: str) -> tuple[Device, Device]:
    loop = asyncio.get_running_loop()
    if kind.startswith("emulated"):
        jitter = Jitter(compute_us=50, copy_us=100) if kind == "emulated-shaken" else None
        fleet = EmulatedFleet(LoopClock(), loop, seed=3, jitter=jitter)
        return EmulatedDevice(fleet, 0, LAPTOP_EMULATED), EmulatedDevice(fleet, 1, LAPTOP_EMULATED)
    if "cuda" in kind:
        return _cuda_device(kind, loop, "cuda"), _cuda_device(kind, loop, "other")
    inline = kind == "inline"
    return CpuDevice(WallClock(), loop, inline=inline), CpuDevice(WallClock(), loop, name="other", inline=inline)


def _cuda_device(kind: str, loop: asyncio.AbstractEventLoop, name: str) -> CudaDevice:
    """Over the real driver, or over the fake one: there, closures run without torch."""
    fake = kind.startswith("fake")
    return CudaDevice(
        Driver(FakeCalls()) if fake else load_driver(),
        WallClock(),
        loop,
        CpuKernels(),
        name=name,
        completion="query" if kind.endswith("query") else "bell",
        current=(lambda handle: contextlib.nullcontext()) if fake else None,
    )
