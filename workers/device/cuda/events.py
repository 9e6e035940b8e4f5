"""Events of CUDA streams, and the clock that turns their times into the host's nanoseconds.

The driver tells the time between two events as float32 milliseconds, which after an hour is no better than 0.25 ms. So times are
counted from an *anchor*, an event whose nanoseconds are known, and an event that lies half a second behind it becomes the
next one. After a pause an anchor is set anew by the host's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afore.core.clock import Clock
from afore.workers.device.base import Work
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.events import DeviceEvent, Failure

if TYPE_CHECKING:
    from afore.workers.device.cuda.streams import CudaStream

ANCHOR_US = 0.5e6
"""How far behind the anchor an event takes its place: float32 milliseconds are good to 0.06 µs there."""
PAUSE_NS = 2_000_000_000
"""After so long without an anchor the host's clock sets the next one."""


class CudaEvent(DeviceEvent):
    """A point in a CUDA stream. Until its stream has issued it, no stream may be told to wait for it: CUDA would not wait."""

    __slots__ = ("_completed_ns", "_stream", "armed", "behind", "handle", "issued")

    def __init__(self, stream: CudaStream) -> None:
        super().__init__(stream.device, stream.name)
        self._stream = stream
        self._completed_ns = -1
        self.handle = 0
        """The driver's; 0 before it is issued and once its time is known."""
        self.issued = False
        self.behind: Work | None = None
        """The last work before it: what is named when the GPU fails."""
        self.armed = False
        """Somebody in the loop awaits it, or has."""

    @property
    def done(self) -> bool:
        if self._completed_ns < 0 and self.issued:
            self._stream.poll()
        return self._completed_ns >= 0

    @property
    def completed_ns(self) -> int:
        assert self._completed_ns >= 0, "completed_ns is known once the event is done"
        return self._completed_ns

    def complete(self, completed_ns: int, failure: Failure | None) -> None:
        """The stream has reached it."""
        self.failure = failure
        self._completed_ns = completed_ns
        self.handle = 0

    def release_if_over(self) -> bool:
        """Wakes those who await it once it is over; says whether it was."""
        over = self.over
        if over:
            self._release()
        return over

    def _arm(self) -> None:
        if not self.armed:
            self.armed = True
            self._stream.device.await_in_loop(self)


class EventClock:
    """The host's nanoseconds of a device's events. ``stream`` is one that nothing else runs on."""

    def __init__(self, driver: Driver, clock: Clock, stream: int, pool: EventPool) -> None:
        self._driver = driver
        self._clock = clock
        self._stream = stream
        self._pool = pool
        self._anchor = 0
        self._anchor_ns = 0
        self.keep()

    def keep(self) -> None:
        """Sets the anchor by the host's clock where the last one is too old: an idle stream answers in microseconds."""
        begin_ns = self._clock.now_ns()
        if self._anchor and begin_ns - self._anchor_ns < PAUSE_NS:
            return
        handle = self._pool.take()
        self._driver.record(handle, self._stream)
        self._driver.synchronise(handle)
        self._replace(handle, (begin_ns + self._clock.now_ns()) // 2)

    def stamp(self, handle: int) -> int:
        """Nanoseconds of an event that is done. Its handle is taken back."""
        elapsed_us = self._driver.elapsed_us(self._anchor, handle)
        stamp_ns = self._anchor_ns + round(elapsed_us * 1e3)
        if elapsed_us > ANCHOR_US:
            self._replace(handle, stamp_ns)
        else:
            self._pool.give_back(handle)
        return stamp_ns

    def _replace(self, handle: int, stamp_ns: int) -> None:
        if self._anchor:
            self._pool.give_back(self._anchor)
        self._anchor, self._anchor_ns = handle, stamp_ns


class EventPool:
    """The driver's events, used again and again: making one costs as much as everything else about it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: list[int] = []
        self._all: list[int] = []

    def take(self) -> int:
        """An event that nothing speaks of any more."""
        if self._free:
            return self._free.pop()
        handle = self._driver.create_event()
        self._all.append(handle)
        return handle

    def give_back(self, handle: int) -> None:
        """It is done and its time was read; waits that were enqueued for it keep the record they were made for."""
        self._free.append(handle)

    def close(self) -> None:
        """Destroys all of them; no stream may still be running."""
        for handle in self._all:
            self._driver.destroy_event(handle)
        self._all.clear()
        self._free.clear()
