"""What a reader does before it sleeps on its descriptor: nothing (``fd``), or look for a bounded while (``spin-then-fd``).

To look is a turn of the event loop that does not sleep: every descriptor is polled, other coroutines run, and the GIL is let go
each time. What comes meanwhile is seen without the sleep of the process and its wake-up, which take longer than the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from afore.core.clock import Clock
from afore.core.link_options import IdleOptions

SAVED_SPINS: Final = 16
"""Whole spins that a reader may save up while it has slept or been busy."""


class Idle(Protocol):
    """A strategy; one for each endpoint."""

    async def linger(self, done: Callable[[], bool], timeout_us: float | None) -> float | None:
        """Returns once ``done()``, or when it is time to sleep; what is left of ``timeout_us`` then, 0 or more."""
        ...


class Spin:
    """Turns of the event loop without sleep, within ``spin_us`` a wait and ``cpu_share`` of all time."""

    def __init__(self, config: IdleOptions, clock: Clock) -> None:
        self._clock = clock
        self._spin_ns = config.spin_us * 1e3
        self._share = config.cpu_share
        self._saved_ns = self._spin_ns
        self._updated_ns = clock.now_ns()

    async def linger(self, done: Callable[[], bool], timeout_us: float | None) -> float | None:
        """As ``Idle``. Time that other coroutines take meanwhile is charged too."""
        now_ns = self._clock.now_ns
        began_ns = now = now_ns()
        earned_ns = self._share * (began_ns - self._updated_ns)
        self._saved_ns = min(self._saved_ns + earned_ns, SAVED_SPINS * self._spin_ns)
        self._updated_ns = began_ns
        if self._saved_ns < self._spin_ns:
            return timeout_us
        ends_ns = began_ns + (self._spin_ns if timeout_us is None else min(self._spin_ns, timeout_us * 1e3))
        try:
            while now < ends_ns and not done():
                await asyncio.sleep(0)
                now = now_ns()
        finally:
            self._saved_ns -= now - began_ns
        return None if timeout_us is None else max(0.0, timeout_us - (now - began_ns) / 1e3)


def make_idle(config: IdleOptions, clock: Clock) -> Idle | None:
    """The strategy of ``config``; none for ``fd``, which has nothing to do."""
    return Spin(config, clock) if config.strategy == "spin-then-fd" else None
