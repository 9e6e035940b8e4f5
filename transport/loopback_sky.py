"""What is in the air of a loopback network: everything that lands at one instant lands by one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from afore.core.clock import Clock


class Sky:
    """Landings by time. A target has a hundred flights, most of which start, and land, together.

    A virtual loop that shuffles what is due at one instant gets a timer for each landing: that order is what its seed explores.
    """

    __slots__ = ("_clock", "_last", "_last_ns")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_ns = -1
        self._last: list[Callable[[], None]] = []

    def land(self, lands_ns: int, now_ns: int, landing: Callable[[], None]) -> None:
        """Calls ``landing`` at ``lands_ns``, after what was to land then already."""
        if lands_ns == self._last_ns:
            self._last.append(landing)
            return
        loop = asyncio.get_running_loop()
        if not getattr(loop, "in_order", False):
            loop.call_later((lands_ns - now_ns) * 1e-9, landing)
            return
        self._last_ns, self._last = lands_ns, [landing]
        loop.call_later((lands_ns - now_ns) * 1e-9, self._land_all, self._last)

    def _land_all(self, landings: list[Callable[[], None]]) -> None:
        if landings is self._last:
            self._last_ns = -1  # what comes for this instant from now on would come too late
        for landing in landings:
            landing()
