"""What one coroutine waits for again and again: an ``asyncio.Event`` for a single waiter, whose deadlines share one timer.

Most waits end long before their deadline. A timer for each, made and cancelled, costs as much as what was waited for; so the
one that is there stays, and looks, when it is due, whether anybody waits whose deadline has passed. Deadlines are kept all
the same, to the rounding of the loop's clock: a timer that was set for an earlier one sets another.
"""

from __future__ import annotations

import asyncio


class Signal:
    """Set by whoever has news; its one waiter clears it, looks, and waits."""

    __slots__ = ("_armed_s", "_due_s", "_loop", "_set", "_timer", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        """The deadline of the wait that is under way."""
        self._armed_s = 0.0
        """The deadline that the timer was set for."""

    def is_set(self) -> bool:
        """Whether it was set since it was cleared."""
        return self._set

    def set(self) -> None:
        """There is news."""
        self._set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def clear(self) -> None:
        """The news so far is known."""
        self._set = False

    async def wait(self, timeout_us: float | None = None) -> bool:
        """Returns once it is set; False when that has not happened for ``timeout_us``. At most one waits at a time."""
        if self._set:
            return True
        assert self._waiter is None, "a signal has one waiter"
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        if timeout_us is not None:
            self._due_s = loop.time() + timeout_us * 1e-6
            timer = self._timer
            if timer is not None and self._armed_s > self._due_s:
                timer.cancel()
                timer = None
            if timer is None:
                self._arm(loop)
        else:
            self._due_s = float("inf")
        self._waiter = waiter
        try:
            return await waiter
        finally:
            self._waiter = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._armed_s = self._due_s
        self._timer = loop.call_at(self._due_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        waiter, loop = self._waiter, self._loop
        assert loop is not None
        if waiter is None or waiter.done() or self._due_s == float("inf"):
            return
        # Not by the clock: a loop may run a timer some rounding before its time, and would be asked for that time again and again.
        if self._armed_s < self._due_s:
            self._arm(loop)
        else:
            waiter.set_result(False)
