"""A GPU as an attention or prefill worker uses it: model code runs on the model stream, and the event loop awaits what it needs.

Pieces whose results stay on the GPU are enqueued and not awaited: the stream keeps their order. The host awaits the GPU once a
layer, for the demand, and once a step, for the logits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from afore.core.clock import Clock
from afore.core.config import RunConfig
from afore.core.trace import SpanName, Tracer
from afore.transport.session import RoleContext
from afore.workers.device.base import Work
from afore.workers.device.cuda.device import CudaDevice
from afore.workers.device.cuda.driver import Driver, Span, load_driver
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.device.cuda.probe import gpu_of

R = TypeVar("R")
Current = Callable[[int], contextlib.AbstractContextManager[object]]
STAYS = frozenset({"begin", "dense", "combine"})
"""Works whose results nobody on the host looks at."""
HOST_ONLY = frozenset({"gate"})
"""Works of the host: what they count has come with the layer's attention."""


class GpuPlace:
    """One worker's GPU, opened. ``on_gpu`` False: the driver's memory is the host's, as in tests."""

    def __init__(
        self,
        driver: Driver,
        clock: Clock,
        *,
        name: str,
        ordinal: int,
        completion: Any = "bell",
        on_gpu: bool = True,
        current: Current | None = None,
        process: int | None = None,
    ) -> None:
        """To be made in the event loop's thread. ``process``: this one's number, where several are played in one."""
        self.driver = driver
        self.ordinal = ordinal
        self.process = process
        self.device = CudaDevice(
            driver,
            clock,
            asyncio.get_running_loop(),
            ordinal=ordinal,
            name=name,
            completion=completion,
            current=current,
        )
        self.memory = DeviceMemory(driver, ordinal if on_gpu else None)
        self.device.on_close(self.memory.close)

    @classmethod
    def on_gpu(cls, ctx: RoleContext) -> GpuPlace:
        """On this machine's GPU: the workers of a role take those of ``device.gpus`` in turn. Raises ``HostError``."""
        driver = load_driver(name=ctx.name)
        ordinal = gpu_of(ctx.config.device.gpus, ctx.rank, driver.device_count())
        torch.cuda.set_device(ordinal)
        return cls(driver, ctx.clock, name=ctx.name, ordinal=ordinal, completion=ctx.config.device.completion)

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors lie."""
        return self.memory.torch_device

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability."""
        ask = self.driver.attribute
        return ask("COMPUTE_CAPABILITY_MAJOR", self.ordinal), ask("COMPUTE_CAPABILITY_MINOR", self.ordinal)

    def copy(self, spans: list[Span]) -> None:
        """Enqueues copies on the model stream."""
        if spans:
            self.driver.copy(spans, self.device.model_stream.handles.stream)

    def compute(self, config: RunConfig, clock: Clock, tracer: Tracer) -> StreamCompute:
        """What runs model code here. Awaits give up after ``times.step_s``."""
        return StreamCompute(self.device, clock, tracer, timeout_us=config.times.step_s * 1e6)

    def close(self) -> None:
        """Waits for the GPU and gives everything back. Idempotent."""
        self.device.close()


class StreamCompute:
    """``Compute`` by a device's model stream."""

    def __init__(self, device: CudaDevice, clock: Clock, tracer: Tracer, *, timeout_us: float) -> None:
        self._device = device
        self._clock = clock
        self._tracer = tracer
        self._timeout_us = timeout_us

    async def run(self, work: Work, do: Callable[[], R], span: SpanName | None = None) -> R:
        """See ``Compute``. What stays on the GPU is only enqueued. Raises ``DeviceError``, ``DeadlineExceeded``."""
        start_ns = self._clock.now_ns()
        if work.span in HOST_ONLY:
            result = do()
        else:
            results: list[R] = []
            stream = self._device.model_stream
            stream.run(work, lambda: results.append(do()))
            done = stream.record()
            stream.flush()
            if work.span not in STAYS or not results:  # a failure is told by the event
                await done.wait(timeout_us=self._timeout_us)
            (result,) = results
        if span is not None:
            self._tracer.span(span, work.target, start_ns, self._clock.now_ns(), tokens=work.tokens)
        return result
