"""How the event loop learns that an event is done: a bell that the GPU's stream rings, or looking.

The bell: a compiled function, called by the driver's own thread behind the event, adds to an eventfd that the loop watches. It
takes no GIL and runs no Python. It stands on a stream of its own, so that it holds up no work. Looking: a short run of queries in
the loop, then one a millisecond. Which of them is sooner, and what each costs, is for the calibration to measure.

The driver calls no function when the GPU has failed, and a bell for an earlier event of a stream may stand behind that of a later
one: so whoever is awaited is also looked at now and then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from numba import cfunc, types

from afore.core.clock import Clock
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.events import CudaEvent

if TYPE_CHECKING:
    from afore.workers.device.cuda.streams import Handles

LOOK_S = 0.02
"""How often awaited events are looked at beside the bell."""
SPIN_US = 50.0
"""How long looking goes on without a pause; longer waits are looked at once a millisecond."""
PAUSE_S = 0.001


class Completion(Protocol):
    """Tells the device to look at awaited events."""

    def issued(self, event: CudaEvent, handles: Handles) -> None:
        """An event was issued."""
        ...

    def awaited(self, event: CudaEvent, handles: Handles) -> None:
        """Somebody awaits the event, issued or not."""
        ...

    def close(self) -> None: ...


class BellCompletion:
    """By host functions and one eventfd."""

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop, look: Callable[[], bool]) -> None:
        """``look`` wakes those whose events are over; says whether any are left."""
        self._driver = driver
        self._loop = loop
        self._look = look
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ring = compiled_ring()
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(self._bell, self._on_bell)

    def issued(self, event: CudaEvent, handles: Handles) -> None:
        """See ``Completion``."""
        if event.armed:
            self._enqueue(event, handles)

    def awaited(self, event: CudaEvent, handles: Handles) -> None:
        """See ``Completion``."""
        if event.handle:
            self._enqueue(event, handles)
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._on_timer)

    def close(self) -> None:
        """The bell streams must have run dry: the driver's thread would add to whatever file has the number next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bell >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._bell)
            os.close(self._bell)
            self._bell = -1

    def _enqueue(self, event: CudaEvent, handles: Handles) -> None:
        self._driver.wait(handles.bell, event.handle)
        self._driver.call(handles.bell, self._ring.address, self._bell)

    def _on_bell(self) -> None:
        os.eventfd_read(self._bell)
        self._look()

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._on_timer) if self._look() else None


class QueryCompletion:
    """By looking."""

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop, look: Callable[[], bool]) -> None:
        self._clock = clock
        self._loop = loop
        self._look = look
        self._next: asyncio.Handle | None = None
        self._since_ns = 0

    def issued(self, event: CudaEvent, handles: Handles) -> None:
        """See ``Completion``."""
        if event.armed:
            self._since_ns = self._clock.now_ns()

    def awaited(self, event: CudaEvent, handles: Handles) -> None:
        """See ``Completion``."""
        self._since_ns = self._clock.now_ns()
        if self._next is None:
            self._next = self._loop.call_soon(self._on_turn)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _on_turn(self) -> None:
        self._next = None
        if self._look():
            spinning = self._clock.now_ns() - self._since_ns < SPIN_US * 1e3
            later = self._loop.call_later(PAUSE_S, self._on_turn) if not spinning else None
            self._next = later or self._loop.call_soon(self._on_turn)


class Ring(Protocol):
    """Compiled code that the driver may call."""

    @property
    def address(self) -> int: ...


def compiled_ring() -> Ring:
    """``void ring(void *fd)``: adds one to that eventfd. The caller keeps it as long as it may be called."""
    add = types.ExternalFunction("eventfd_write", types.int32(types.int32, types.uint64))

    def ring(fd):  # type: ignore[no-untyped-def]  # numba infers
        add(fd, 1)

    function: Ring = cfunc(types.void(types.intp))(ring)
    return function
