"""What is in the air of a loopback network: everything that lands at one instant lands by one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context

from afore.core.clock import Clock
from afore.core.virtual_loop import VirtualLoop


class Sky:
    """Landings by time. A target has a hundred flights, most of which start, and land, together.

    A virtual loop that shuffles what is due at one instant gets a timer for each landing: that order is what its seed explores.
    """

    __slots__ = ("_clock", "_context", "_last", "_last_ns", "_loop")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop: VirtualLoop | None = None
        """The loop, once it is known to keep order."""
        self._context = Context()
        """Landings read no context of their senders."""
        self._last_ns = -1
        self._last: list[Callable[[], None]] = []

    def land(self, lands_ns: int, now_ns: int, landing: Callable[[], None]) -> None:
        """Calls ``landing`` at ``lands_ns``, after what was to land then already."""
        if lands_ns == self._last_ns:
            self._last.append(landing)
            return
        loop = self._loop
        if loop is None:
            running = asyncio.get_running_loop()
            if not (isinstance(running, VirtualLoop) and running.in_order):
                running.call_later((lands_ns - now_ns) * 1e-9, landing)
                return
            loop = self._loop = running
        self._last_ns, self._last = lands_ns, [landing]
        loop.call_at_ns(lands_ns, self._land_all, self._last, context=self._context)

    def _land_all(self, landings: list[Callable[[], None]]) -> None:
        if landings is self._last:
            self._last_ns = -1  # what comes for this instant from now on would come too late
        for landing in landings:
            landing()
