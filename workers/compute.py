"""Where an attention or prefill worker's model code runs.

On a CPU it runs in the event loop itself: handing a piece to a thread and back costs 18-41 µs, a layer has several pieces of
100-500 µs, and the process has nothing else to do meanwhile but to read bells, which wait in their queues. In virtual time the same
pieces are charged to an emulated device, one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from afore.core.clock import Clock
from afore.core.trace import SpanName, Tracer
from afore.workers.device.base import Work

R = TypeVar("R")


class Compute(Protocol):
    """Runs pieces of model code one at a time, in the order of the calls."""

    async def run(self, work: Work, do: Callable[[], R], span: SpanName | None = None) -> R:
        """Runs ``do`` and returns its result once it is there; records ``span``. Raises what ``do`` raises."""
        ...


class InlineCompute:
    """In the event loop, at once."""

    def __init__(self, clock: Clock, tracer: Tracer) -> None:
        self._clock = clock
        self._tracer = tracer

    async def run(self, work: Work, do: Callable[[], R], span: SpanName | None = None) -> R:
        start_ns = self._clock.now_ns()
        result = do()
        if span is not None:
            self._tracer.span(span, work.target, start_ns, self._clock.now_ns(), tokens=work.tokens)
        return result
