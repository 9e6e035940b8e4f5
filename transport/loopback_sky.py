"""What is in the air of a loopback network: everything that lands at one instant lands by one timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from afore.core.clock import Clock
from afore.core.virtual_loop import VirtualLoop

Flight = tuple[Any, ...]
"""What lands: the arguments of its airway's ``land``."""


class Sky:
    """Landings by time. A target has a hundred flights, most of which start, and land, together.

    A virtual loop that shuffles what is due at one instant gets a timer for each landing: that order is what its seed explores.
    """

    __slots__ = ("_last", "_last_ns", "_loop", "clock")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._loop: VirtualLoop | None = None
        """The loop, once it is known to keep order."""
        self._last_ns = -1
        self._last: list[tuple[Airway, Flight]] = []

    def land(self, lands_ns: int, now_ns: int, airway: Airway, flight: Flight) -> None:
        """``flight`` lands at ``lands_ns``, after what was to land then already."""
        if lands_ns == self._last_ns:
            self._last.append((airway, flight))
            return
        loop = self._loop
        if loop is None:
            running = asyncio.get_running_loop()
            if not (isinstance(running, VirtualLoop) and running.in_order):
                airway.line.append(flight)
                running.call_later((lands_ns - now_ns) * 1e-9, airway.land_oldest)
                return
            loop = self._loop = running
        self._last_ns, self._last = lands_ns, [(airway, flight)]
        loop.alarm_ns(lands_ns, self._land_all, self._last)

    def _land_all(self, flights: list[tuple[Airway, Flight]]) -> None:
        if flights is self._last:
            self._last_ns = -1  # what comes for this instant from now on would come too late
        for airway, flight in flights:
            if airway.open:
                airway.land(*flight)


class Airway:
    """The flights of one link, or of one direction of a channel: they land in the order in which they started."""

    __slots__ = ("land", "line", "open", "sky")

    def __init__(self, sky: Sky, land: Callable[..., None]) -> None:
        self.sky = sky
        self.land = land
        self.open = True
        self.line: deque[Flight] = deque()
        """Under a loop that does not keep order: there is a timer for each, and each lands the oldest."""

    def send(self, lands_ns: int, now_ns: int, *flight: Any) -> None:
        """Calls ``land(*flight)`` at ``lands_ns``, unless the airway is cut before."""
        self.sky.land(lands_ns, now_ns, self, flight)

    def land_oldest(self) -> None:
        """A timer is due."""
        if self.open:
            self.land(*self.line.popleft())

    def cut(self) -> None:
        """What flies is lost."""
        self.open = False
