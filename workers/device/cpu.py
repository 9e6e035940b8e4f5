"""The CPU as a device: one compute thread, one migration thread, events as sequence numbers.

Handing every piece to a thread costs 18-41 µs a target. Here a stream collects a target's work and hands it over once, at
``flush``; the compute thread runs the list. The migration thread sleeps unless there are copies. Completion reaches the event
loop through one eventfd, rung only when somebody awaits. A stream that waits for the other one blocks its thread (on a
condition: it does not spin), never the loop. ``inline`` runs the same lists on the calling thread instead: for scripts where
threads do not pay.

Streams are used from the event loop's thread only. Closures should release the GIL while they compute, as the kernels do.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

from afore.core.clock import Clock
from afore.workers.device.base import CopyJob
from afore.workers.device.events import DeviceEvent, Failure
from afore.workers.device.streams import CollectingStream, CopyBatch, Run, Wait
from afore.workers.kernels import CpuKernels

_JOIN_S = 10.0
"""How long ``close`` waits for a closure that is running; a thread cannot be ended from outside."""


class CpuEvent(DeviceEvent):
    """A point in a stream: the stream's ``sequence`` th record."""

    __slots__ = ("_completed_ns", "_device", "_done", "_rings", "sequence")

    def __init__(self, device: CpuDevice, stream_name: str, sequence: int) -> None:
        super().__init__(device, stream_name)
        self._device = device
        self._done = False
        self._completed_ns = -1
        self._rings = False
        self.sequence = sequence

    @property
    def done(self) -> bool:
        return self._done

    @property
    def completed_ns(self) -> int:
        assert self._done, "completed_ns is known once the event is done"
        return self._completed_ns

    def complete(self, completed_ns: int, failure: Failure | None) -> None:
        """Called by the stream that reaches it, in whichever thread. Readers look at done first, so it is stored last."""
        self._completed_ns = completed_ns
        self.failure = failure
        self._done = True
        # A waiter announces itself before it looks at done for the last time: one of the two sides always sees the other.
        self._device.reached(rings=self._rings)

    def _arm(self) -> None:
        if not self._rings:
            self._rings = True
            self._device.await_in_loop(self)
        if self._done:
            self._release()

    def release_if_over(self) -> bool:
        """In the loop: wakes those who await it once it is over; says whether it was."""
        over = self.over
        if over:
            self._release()
        return over


_Item = Run | CopyBatch | Wait[CpuEvent] | CpuEvent


class CpuStream(CollectingStream[CpuEvent]):
    """One of the two streams of a ``CpuDevice``."""

    def __init__(self, device: CpuDevice, name: str) -> None:
        super().__init__(device, name)
        self._device = device
        self._recorded = 0
        self._failure: Failure | None = None
        self._inbox: SimpleQueue[list[_Item] | None] = SimpleQueue()
        self._left: deque[_Item] = deque()
        """Inline: what was flushed and has not run, because it waits for the other stream."""

    def flush(self) -> None:
        if not self._collected:
            return
        items, self._collected = self._collected, []
        if self._device.inline:
            self._left.extend(items)
            self._device.run_inline()
        else:
            self._inbox.put(items)

    def _new_event(self) -> CpuEvent:
        self._recorded += 1
        return CpuEvent(self._device, self._name, self._recorded)

    # Running, in the stream's thread (or inline)

    def thread_main(self) -> None:
        """Runs lists until the device closes."""
        while (items := self._inbox.get()) is not None:
            for item in items:
                if isinstance(item, Wait) and not self._device.block_until(item.event):
                    return
                if self._device.closed:
                    return
                self._perform(item)

    def end_thread(self) -> None:
        self._inbox.put(None)

    def run_ready(self) -> bool:
        """Inline: runs what can run; says whether anything did."""
        ran = False
        while self._left and not self._device.closed:
            item = self._left[0]
            if isinstance(item, Wait) and not item.event.done:
                break
            ran = True
            self._left.popleft()
            self._perform(item)
        return ran

    def _perform(self, item: _Item) -> None:
        if isinstance(item, CpuEvent):
            item.complete(self._device.clock.now_ns(), self._failure)
        elif isinstance(item, Wait):
            if self._failure is None:
                self._failure = item.event.failure
        elif self._failure is None:
            try:
                if isinstance(item, Run):
                    item.do()
                else:
                    self._device.copy_all(item.jobs)
            except Exception as error:
                self._failure = Failure(self._device.name, item.work, error)
            except BaseException as error:
                # In a thread, SystemExit would end it in silence and every later event would hang.
                self._failure = Failure(self._device.name, item.work, error)
                if self._device.inline:
                    raise


class CpuDevice:
    """The CPU of one worker.

    ``inline``: no threads; closures run at ``flush``. ``emulate_copy_us``: each copy takes at least so long, and
    ``emulate_copy_gb_per_s`` (10^9 bytes a second, 0: no limit) bounds its rate, so that small experts behave like large ones.
    """

    def __init__(
        self,
        clock: Clock,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        name: str = "cpu",
        inline: bool = False,
        emulate_copy_us: float = 0.0,
        emulate_copy_gb_per_s: float = 0.0,
    ) -> None:
        self.clock = clock
        self.inline = inline
        self._name = name
        self._emulate_copy_us = emulate_copy_us
        self._emulate_copy_us_per_byte = 1e-3 / emulate_copy_gb_per_s if emulate_copy_gb_per_s > 0 else 0.0
        self._kernels = CpuKernels()
        self._closing = threading.Event()
        self._reached = threading.Condition()
        self._blocked = 0
        """Threads that wait for an event of the other stream."""
        self._awaited: list[CpuEvent] = []
        """Events that somebody in the loop awaits. Touched by the loop's thread only."""
        self._running_inline = False
        self._model = CpuStream(self, "model")
        self._migration = CpuStream(self, "migration")
        self._threads: list[threading.Thread] = []
        self._bell = -1
        self._loop = loop
        if not inline:
            if loop is None:
                raise ValueError("a device with threads needs the event loop that its completions go to")
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            loop.add_reader(self._bell, self._on_bell)
            for stream, role in ((self._model, "compute"), (self._migration, "migration")):
                # Daemons: a forgotten close() must not keep a process alive.
                thread = threading.Thread(target=stream.thread_main, name=f"{name}-{role}", daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def model_stream(self) -> CpuStream:
        return self._model

    @property
    def migration_stream(self) -> CpuStream:
        return self._migration

    @property
    def kernels(self) -> CpuKernels:
        return self._kernels

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing.is_set()

    def close(self) -> None:
        """Ends both threads; a closure that runs just now is waited for. Idempotent; call it in the event loop's thread."""
        if self.closed:
            return
        self._closing.set()
        with self._reached:
            self._reached.notify_all()
        for stream in (self._model, self._migration):
            stream.end_thread()
        for thread in self._threads:
            thread.join(_JOIN_S)
        if self._bell >= 0:
            assert self._loop is not None
            if not self._loop.is_closed():
                self._loop.remove_reader(self._bell)
            if not any(thread.is_alive() for thread in self._threads):
                os.close(self._bell)
            self._bell = -1
        self._wake_awaited()

    # Called by streams and events

    def block_until(self, event: CpuEvent) -> bool:
        """In a stream's thread: sleeps until ``event`` is done (true) or the device closes (false)."""
        if event.done:
            return True
        with self._reached:
            self._blocked += 1
            try:
                self._reached.wait_for(lambda: event.done or self.closed)
            finally:
                self._blocked -= 1
        return event.done

    def reached(self, *, rings: bool) -> None:
        """An event is done: wakes the other stream if it waits, and the loop if it awaits."""
        if self._blocked:
            with self._reached:
                self._reached.notify_all()
        if rings:
            if self.inline:
                self._wake_awaited()
            elif not self.closed:
                os.eventfd_write(self._bell, 1)

    def await_in_loop(self, event: CpuEvent) -> None:
        """In the loop: ``event`` is looked at whenever the bell rings."""
        self._awaited.append(event)

    def copy_all(self, jobs: Sequence[CopyJob]) -> None:
        """Runs copies one after another, each as slow as is emulated."""
        for job in jobs:
            begin_ns = self.clock.now_ns()
            job.run()
            least_us = self._emulate_copy_us + job.nbytes * self._emulate_copy_us_per_byte
            if least_us > 0:
                left_us = least_us - (self.clock.now_ns() - begin_ns) / 1e3
                if left_us > 0 and self._closing.wait(left_us * 1e-6):
                    return

    def run_inline(self) -> None:
        """Runs what was flushed to either stream, as far as waits allow."""
        if self._running_inline:  # a closure has flushed: what it enqueued runs after it, as on a thread
            return
        self._running_inline = True
        try:
            while self._model.run_ready() | self._migration.run_ready():
                pass
        finally:
            self._running_inline = False

    def _on_bell(self) -> None:
        os.eventfd_read(self._bell)
        self._wake_awaited()

    def _wake_awaited(self) -> None:
        self._awaited = [event for event in self._awaited if not event.release_if_over()]
