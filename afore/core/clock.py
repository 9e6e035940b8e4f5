"""Time as roles see it: injected, monotonic, in integer nanoseconds.

No role reads a wall clock or sleeps by itself. ``WallClock`` serves real processes (CLOCK_MONOTONIC, the same in every
process of one host, so spans of different processes can be subtracted); under the virtual-clock loop ``LoopClock`` reads the
loop's own time, and every deadline, being built on ``asyncio.timeout``, runs in virtual time by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from afore.core.errors import DeadlineExceeded


class Clock(Protocol):
    """The only source of time for roles."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        ...

    async def sleep_us(self, duration_us: float) -> None:
        """Suspends the calling coroutine for ``duration_us`` microseconds."""
        ...


class WallClock:
    """CLOCK_MONOTONIC."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep_us(self, duration_us: float) -> None:
        await asyncio.sleep(duration_us * 1e-6)


class LoopClock:
    """The running loop's time; exact under the virtual-clock loop, whose ``time_ns`` is an integer.

    ``loop`` binds the clock to that loop, which is read without asking each time which one is running.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        time_ns: Callable[[], int] | None = getattr(loop, "time_ns", None)
        # A target asks for the time some two hundred times: the loop's own method is one call instead of two.
        self.now_ns = self._now_ns if time_ns is None else time_ns
        self._sleep_ns: Callable[[int], Coroutine[Any, Any, None]] | None = getattr(loop, "sleep_ns", None)

    def _now_ns(self) -> int:
        loop = self._loop or asyncio.get_running_loop()
        time_ns = getattr(loop, "time_ns", None)
        return int(time_ns()) if time_ns is not None else int(loop.time() * 1e9)

    def sleep_us(self, duration_us: float) -> Coroutine[Any, Any, None]:
        """See ``Clock.sleep_us``: the loop's own coroutine."""
        return asyncio.sleep(duration_us * 1e-6) if self._sleep_ns is None else self._sleep_ns(round(duration_us * 1e3))


@asynccontextmanager
async def deadline(timeout_us: float | None, *, peer: str, operation: str, hint: str = "") -> AsyncIterator[None]:
    """Bounds the block by ``timeout_us``; raises ``DeadlineExceeded`` naming ``peer`` and ``operation``.

    ``None`` is for a service's idle wait only, which its owner ends by closing what is awaited.
    """
    try:
        async with asyncio.timeout(None if timeout_us is None else timeout_us * 1e-6):
            yield
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        shown = "" if timeout_us is None else f" within {timeout_us / 1e6:g} s"
        raise DeadlineExceeded(peer, f"{operation} did not finish{shown}", hint) from error
