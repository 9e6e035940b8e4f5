"""What is in the air of a loopback network: everything that lands at one instant lands by one timer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from afore.core.clock import Clock
from afore.core.virtual_loop import VirtualLoop


class Sky:
    """Landings by time. A target has a hundred flights, most of which start, and land, together.

    A virtual loop that shuffles what is due at one instant gets a timer for each landing: that order is what its seed explores.
    """

    __slots__ = ("_loop", "clock", "last", "last_ns")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._loop: VirtualLoop | None = None
        """The loop, once it is known to keep order."""
        self.last: list[tuple[Airway, Any]] = []
        """What lands at ``last_ns``, in this order: the timer that was set last."""
        self.last_ns = -1

    def begin(self, lands_ns: int, now_ns: int, airway: Airway, flight: Any) -> None:
        """``flight`` lands at ``lands_ns``, for which no timer is set."""
        loop = self._loop
        if loop is None:
            running = asyncio.get_running_loop()
            if not (isinstance(running, VirtualLoop) and running.in_order):
                airway.queue(flight)
                running.call_later((lands_ns - now_ns) * 1e-9, airway.land_oldest)
                return
            loop = self._loop = running
        self.last_ns, self.last = lands_ns, [(airway, flight)]
        loop.alarm_ns(lands_ns, self._land_all, self.last)

    def _land_all(self, flights: list[tuple[Airway, Any]]) -> None:
        if flights is self.last:
            self.last_ns = -1  # what comes for this instant from now on would come too late
        for airway, flight in flights:
            if not airway._cut:
                airway.land(flight)


class Airway(ABC):
    """A link, or one direction of a channel, as the sky sees it: its flights land in the order in which they started."""

    __slots__ = ("_cut", "_queued", "sky")

    def __init__(self, sky: Sky) -> None:
        self.sky = sky
        self._cut = False
        self._queued: deque[Any] | None = None
        """Under a loop that does not keep order: there is a timer for each flight, and each lands the oldest."""

    @abstractmethod
    def land(self, flight: Any) -> None:
        """What was sent lands."""

    def fly(self, lands_ns: int, now_ns: int, flight: Any) -> None:
        """Calls ``land(flight)`` at ``lands_ns``, after what was to land then already, unless the airway is cut before."""
        sky = self.sky
        if lands_ns == sky.last_ns:
            sky.last.append((self, flight))
        else:
            sky.begin(lands_ns, now_ns, self, flight)

    def queue(self, flight: Any) -> None:
        """``land_oldest`` will be called for it."""
        if self._queued is None:
            self._queued = deque()
        self._queued.append(flight)

    def land_oldest(self) -> None:
        """A timer is due."""
        assert self._queued is not None
        flight = self._queued.popleft()
        if not self._cut:
            self.land(flight)

    def cut(self) -> None:
        """What flies is lost."""
        self._cut = True
