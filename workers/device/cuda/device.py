"""One GPU of one worker: the ``Device`` promises over the CUDA driver.

Streams are used from the event loop's thread only. The model stream has the greatest priority, migration the least: a copy engine
does not mind, and a copy that runs on the cores must not delay experts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from afore.core.clock import Clock
from afore.workers.device.cuda.completion import BellCompletion, Completion, QueryCompletion
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.errors import CudaError
from afore.workers.device.cuda.events import CudaEvent, EventClock, EventPool
from afore.workers.device.cuda.streams import CudaStream, Handles
from afore.workers.device.events import Failure

_log = logging.getLogger(__name__)

CompletionName = Literal["bell", "query"]


class CudaDevice:
    """GPU ``ordinal``, opened in this process.

    ``kernels``: what runs on the model stream. ``current`` makes a driver's stream the one that closures issue to: torch's.
    """

    def __init__(
        self,
        driver: Driver,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        kernels: Any = None,
        *,
        ordinal: int = 0,
        name: str = "cuda",
        completion: CompletionName = "bell",
        current: Callable[[int], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.driver = driver
        self.clock = clock
        self.ordinal = ordinal
        self._name = name
        self.kernels = kernels
        self._at_close: list[Callable[[], None]] = []
        self._closed = False
        self.context = driver.retain_context(ordinal)
        least, greatest = driver.priority_range()
        self._handles = [driver.create_stream(priority) for priority in (greatest, greatest, least, least, least)]
        model, model_bell, migration, migration_bell, idle = self._handles
        self.events = EventPool(driver)
        self.times = EventClock(driver, clock, idle, self.events)
        self._awaited: list[CudaEvent] = []
        self._issuing = False
        if current is None:
            current = torch_streams(ordinal)
        self._current = current
        self._model = CudaStream(self, "model", Handles(model, model_bell), current)
        self._migration = CudaStream(self, "migration", Handles(migration, migration_bell), current)
        self.completion: Completion = (
            BellCompletion(driver, loop, self._look)
            if completion == "bell"
            else QueryCompletion(clock, loop, self._look)
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def model_stream(self) -> CudaStream:
        return self._model

    @property
    def migration_stream(self) -> CudaStream:
        return self._migration

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def current_model_stream(self) -> AbstractContextManager[object]:
        """What torch does in this block goes to the model stream: for what is prepared outside of a target."""
        return self._current(self._model.handles.stream)

    def on_close(self, free: Callable[[], None]) -> None:
        """``free`` is called once the GPU is done with everything, before its context is given back."""
        self._at_close.append(free)

    def drain(self) -> None:
        """Blocks until the GPU has done what it was given: before memory that it may still touch is let go."""
        if self._handles:
            with contextlib.suppress(CudaError):  # a GPU that has failed touches nothing any more
                for handle in self._handles:
                    last = self.events.take()
                    self.driver.record(last, handle)
                    self.driver.synchronise(last)
                    self.events.give_back(last)

    def close(self) -> None:
        """Waits for what the GPU was given, and gives everything back. Idempotent; in the event loop's thread."""
        if self._closed:
            return
        self._poll()
        self._closed = True
        for stream in (self._model, self._migration):
            stream.drop()
        self.drain()
        self.completion.close()
        try:
            for free in reversed(self._at_close):
                free()
            self.events.close()
            for handle in self._handles:
                self.driver.destroy_stream(handle)
            self.driver.release_context(self.ordinal)
        except CudaError as error:
            _log.warning("%s: %s", self._name, error)
        self._handles.clear()
        for event in self._awaited:
            event.release_if_over()
        self._awaited.clear()

    # Called by streams and events

    def issue_all(self) -> None:
        """Issues what was flushed to either stream, as far as waits allow."""
        if self._issuing:  # a closure has flushed: what it enqueued is issued after it
            return
        self._issuing = True
        try:
            self.times.keep()
            while self._model.issue_ready() | self._migration.issue_ready():
                pass
        finally:
            self._issuing = False

    def await_in_loop(self, event: CudaEvent) -> None:
        """Somebody awaits ``event``: it is looked at until it is over."""
        self._awaited.append(event)
        stream = self._model if event.stream_name == self._model.name else self._migration
        self.completion.awaited(event, stream.handles)

    def fail(self, failure: Failure) -> None:
        """The GPU has failed: so has all that it was given."""
        _log.error("%s: %s", self._name, failure.as_error())
        for stream in (self._model, self._migration):
            stream.fail(failure, self.clock.now_ns())

    def _poll(self) -> None:
        self._model.poll()
        self._migration.poll()

    def _look(self) -> bool:
        self._poll()
        self._awaited = [event for event in self._awaited if not event.release_if_over()]
        return bool(self._awaited)


def torch_streams(ordinal: int) -> Callable[[int], AbstractContextManager[object]]:
    """Makes a driver's stream torch's current one: what torch and Triton launch goes there, and nothing to the default stream."""
    import torch

    streams: dict[int, Any] = {}

    def current(handle: int) -> AbstractContextManager[object]:
        stream = streams.get(handle)
        if stream is None:
            stream = streams[handle] = torch.cuda.ExternalStream(handle, device=ordinal)  # type: ignore[no-untyped-call]
        context: AbstractContextManager[object] = torch.cuda.stream(stream)
        return context

    return current
