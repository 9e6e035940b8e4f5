"""A virtual-clock asyncio event loop: the same coroutines, exact deadlines, no waiting, and the same order every time.

Time is an integer of nanoseconds that jumps to the next timer when nothing is ready. Callbacks run in one total order,
(when, sequence): those of one instant run in the order in which they were scheduled. With a seed, one randomly chosen ready
callback runs at a time instead, so that every seed is another legal interleaving, repeatable by its number.

The world is fenced: no file descriptors, sockets, subprocesses, signals or other threads; ``run_in_executor`` runs inline. What
would hang becomes an error that names the tasks and where each waits. ``afore.testing`` has the convenient entrance.

Deadlines given in float seconds are rounded to the nearest nanosecond, which is exact up to ``EXACT_UNTIL_NS`` of virtual time.
Private names of asyncio are used (``PINNED`` lists them); a conformance test holds each for every Python version.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from afore.core.virtual_fence import DeadlockError, FencedLoop, LivelockError, TimeLimitError
from afore.core.waiting import pending_tasks

_asyncio_logger = logging.getLogger("asyncio")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EXACT_UNTIL_NS = 10**14
"""About 28 hours: up to here asyncio's float seconds name every nanosecond."""
STALL_CALLBACKS = 1_000_000
"""Callbacks that may run at one instant before the loop calls it a livelock."""
_COMPACT_ABOVE = 256
"""Cancelled timers that may rest in the heap before it is rebuilt without them."""

PINNED = (
    "_run_once",
    "_ready",
    "_stopping",
    "_closed",
    "_debug",
    "_thread_id",
    "_current_handle",
    "_check_closed",
    "_check_callback",
    "_timer_handle_cancelled",
    "_write_to_self",
)
"""Private names of ``asyncio.BaseEventLoop`` that this loop overrides or reads, beside ``Handle._run`` and ``_cancelled``."""


class _Handle(asyncio.Handle):
    """What asyncio's constructor sets, without asking for its debug mode: there are fifty of these for every target."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualLoop, context: Context
    ) -> None:
        self._context = context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Alarm:
    """A timer without a handle, for those who never look back: what ``_run_once`` looks at, and no more."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "resting")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self.resting = True


class _Timer(asyncio.TimerHandle):
    """A timer that knows whether it still rests in the heap."""

    __slots__ = ("resting",)
    resting: bool

    def __init__(
        self,
        when_ns: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: Context,
    ) -> None:
        # What asyncio's two constructors set, likewise.
        self._context = context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when_ns / 1e9
        self._scheduled = False
        self.resting = False


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class VirtualTask(asyncio.Task[T]):
    """A task whose hash is its birth number.

    asyncio keeps tasks in sets (TaskGroup, all_tasks, wait) and walks them in hash order; by address that order would
    differ from run to run.
    """

    def __init__(self, coro: Coroutine[Any, Any, T], *, birth: int, **kwargs: Any) -> None:
        self.birth = birth
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.birth


class VirtualLoop(FencedLoop):
    """A virtual-clock event loop.

    ``seed``: none runs callbacks in total order (when, sequence); a number picks one ready callback at a time at random.
    ``limit_ns``: the time that must not be passed; what cleans up after a ``TimeLimitError`` gets as much again.
    ``stall_callbacks``: callbacks that may run at one instant. Raises ``VirtualTimeError`` out of ``run_until_complete``.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _closed: bool
    _debug: bool
    _thread_id: int | None
    _current_handle: asyncio.Handle | None

    if TYPE_CHECKING:

        def _check_closed(self) -> None: ...
        def _check_callback(self, callback: object, method: str) -> None: ...

    def __init__(
        self, *, seed: int | None = None, limit_ns: int | None = None, stall_callbacks: int = STALL_CALLBACKS
    ) -> None:
        super().__init__()
        self._now_ns = 0
        self._sequence = 0
        self._births = 0
        self._timers: list[tuple[int, int, _Timer | _Alarm]] = []
        self._no_context = Context()
        """Of alarms, whose callbacks read none."""
        self._cancelled_resting = 0
        self._random = None if seed is None else random.Random(seed)
        self._limit_ns = limit_ns
        self._limit_step_ns = limit_ns or 0
        self._stall_callbacks = stall_callbacks
        self._callbacks_now = 0
        """Callbacks of this instant."""
        self._callbacks_before = 0
        self._owner = threading.get_ident()

    @property
    def in_order(self) -> bool:
        """Whether what is due at one instant runs in the order in which it was scheduled, not in a seed's."""
        return self._random is None

    @property
    def callbacks(self) -> int:
        """Callbacks that have run: what a run costs, as far as the loop knows."""
        return self._callbacks_before + self._callbacks_now

    # Time

    def time_ns(self) -> int:
        """Virtual nanoseconds since the loop was made."""
        return self._now_ns

    def time(self) -> float:
        """Virtual seconds, for asyncio; ``time_ns`` is the truth."""
        return self._now_ns / 1e9

    # Scheduling

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._debug or self._closed:
            return super().call_soon(callback, *args, context=context)
        # The hot path of every wake-up: the same as asyncio's in one call instead of three.
        if self._thread_id is not None and threading.get_ident() != self._thread_id:
            self._refuse_thread("call_soon")
        handle = _Handle(callback, args, self, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != (self._owner if self._thread_id is None else self._thread_id):
            self._refuse_thread("call_soon_threadsafe")
        return super().call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        delay_ns = math.inf if delay == math.inf else round(delay * 1e9)
        return self._call_at_ns(self._now_ns + delay_ns, callback, args, context, "call_later")

    def call_at_ns(
        self, when_ns: int, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """``call_at`` in the loop's own unit."""
        return self._call_at_ns(when_ns, callback, args, context, "call_at_ns")

    def alarm_ns(self, when_ns: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """``call_at_ns`` for what is not cancelled and reads no context: half the price. ``when_ns`` in the past is now."""
        self._set_alarm(when_ns, callback, args)

    def _set_alarm(self, when_ns: int, callback: Callable[..., object], args: tuple[Any, ...]) -> _Alarm | _Timer:
        if self._closed or self._debug:
            return self._call_at_ns(when_ns, callback, args, None, "alarm_ns")
        alarm = _Alarm(callback, args, self._no_context)
        if when_ns <= self._now_ns:
            alarm.resting = False
            self._ready.append(alarm)  # type: ignore[arg-type]  # it has all that is looked at
        else:
            self._sequence += 1
            heapq.heappush(self._timers, (when_ns, self._sequence, alarm))
        return alarm

    async def sleep_ns(self, duration_ns: int) -> None:
        """``asyncio.sleep`` in the loop's own unit: one future and one timer."""
        if duration_ns <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = self.create_future()
        alarm = self._set_alarm(self._now_ns + duration_ns, _wake, (future,))
        try:
            await future
        except asyncio.CancelledError:
            if not alarm._cancelled:
                self._forget(alarm)
                alarm._cancelled = True
            raise

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        when_ns = math.inf if when == math.inf else round(when * 1e9)
        return self._call_at_ns(when_ns, callback, args, context, "call_at")

    def _call_at_ns(
        self, when_ns: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, call: str
    ) -> _Timer:
        if self._closed:
            self._check_closed()
        if self._thread_id is not None and threading.get_ident() != self._thread_id:
            self._refuse_thread(call)
        if self._debug:
            self._check_callback(callback, call)
        timer = _Timer(when_ns, callback, args, self, copy_context() if context is None else context)
        if when_ns <= self._now_ns:
            self._ready.append(timer)
        elif when_ns != math.inf:
            assert isinstance(when_ns, int)
            timer.resting = True
            self._sequence += 1
            heapq.heappush(self._timers, (when_ns, self._sequence, timer))
        return timer

    def create_task(  # type: ignore[override]  # typeshed's signature differs between the Python versions
        self, coro: Coroutine[Any, Any, T], *, name: object = None, context: Context | None = None, **kwargs: Any
    ) -> asyncio.Task[T]:
        self._check_closed()
        if self.get_task_factory() is not None:
            return super().create_task(coro, name=name, context=context, **kwargs)
        self._births += 1
        # asyncio would number the unnamed over all loops of the process, so two equal runs would differ.
        shown = f"Task-{self._births}" if name is None else name
        return VirtualTask(coro, birth=self._births, loop=self, name=shown, context=context, **kwargs)

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Runs ``func`` here and now: there are no threads in virtual time."""
        self._check_closed()
        if self._debug:
            self._check_callback(func, "run_in_executor")
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is no executor."""

    # Running

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        if self._random is None:
            count = len(ready)
            if self._debug:
                for _ in range(count):
                    self._run_handle(ready.popleft())
            else:
                for _ in range(count):
                    due: Any = ready.popleft()  # typeshed hides what Handle._run looks at
                    if not due._cancelled:
                        try:
                            due._context.run(due._callback, *due._args)
                        except (SystemExit, KeyboardInterrupt):
                            raise
                        except BaseException as error:
                            self._callback_failed(due, error)
        else:
            count = min(len(ready), 1)
            if count:
                self._run_handle(self._pick(self._random))
            if self._stopping:  # what is ready still runs, as asyncio promises
                for _ in range(len(ready)):
                    self._run_handle(self._pick(self._random))
        self._callbacks_now += count
        if self._callbacks_now > self._stall_callbacks:
            self._callbacks_before += self._callbacks_now
            self._callbacks_now = 0
            raise LivelockError(
                self._now_ns,
                f"{self._stall_callbacks:,} callbacks ran and time did not move: a task polls (sleep(0)?) instead of waiting",
                pending_tasks(self),
            )

    def _pick(self, generator: random.Random) -> asyncio.Handle:
        ready = self._ready
        chosen = int(generator.random() * len(ready))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        return ready.pop()

    def _run_handle(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        if not self._debug:
            due: Any = handle  # typeshed hides what Handle._run looks at, too
            try:
                due._context.run(due._callback, *due._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._callback_failed(handle, error)
            return
        # The loop's own clock stands still while a callback runs: what is slow, is slow on the host.
        self._current_handle = handle
        try:
            begin = time.perf_counter()
            handle._run()
            took = time.perf_counter() - begin
            if took >= self.slow_callback_duration:
                _asyncio_logger.warning("Executing %r took %.3f seconds", handle, took)
        finally:
            self._current_handle = None

    def _callback_failed(self, handle: asyncio.Handle, error: BaseException) -> None:
        """As ``Handle._run`` does."""
        self.call_exception_handler(
            {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
        )

    def _advance(self) -> None:
        """Moves time to the next timer and makes everything due then ready, in sequence. Called when nothing is ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)[2].resting = False
            self._cancelled_resting -= 1
        if not timers:
            raise DeadlockError(self._now_ns, "deadlock: nothing is ready and no timer is pending", pending_tasks(self))
        now_ns = timers[0][0]
        if self._limit_ns is not None and now_ns > self._limit_ns:
            limit_ns = self._limit_ns
            self._limit_ns += self._limit_step_ns
            raise TimeLimitError(
                self._now_ns,
                f"the next timer is due at {now_ns:,} ns, beyond the limit of {limit_ns:,} ns",
                pending_tasks(self),
            )
        self._now_ns = now_ns
        self._callbacks_before += self._callbacks_now
        self._callbacks_now = 0
        while timers and timers[0][0] == now_ns:
            timer = heapq.heappop(timers)[2]
            timer.resting = False
            if timer._cancelled:
                self._cancelled_resting -= 1
            else:
                self._ready.append(timer)  # type: ignore[arg-type]  # an alarm has all that is looked at

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by ``TimerHandle.cancel``. Deadlines are mostly cancelled: without this the heap would keep them all."""
        assert isinstance(handle, _Timer)
        self._forget(handle)

    def _forget(self, handle: _Timer | _Alarm) -> None:
        if not handle.resting:
            return
        self._cancelled_resting += 1
        if self._cancelled_resting > _COMPACT_ABOVE and self._cancelled_resting * 2 > len(self._timers):
            kept = []
            for entry in self._timers:
                # The caller marks ``handle`` as cancelled only after this call.
                if entry[2]._cancelled or entry[2] is handle:
                    entry[2].resting = False
                else:
                    kept.append(entry)
            heapq.heapify(kept)
            self._timers = kept
            self._cancelled_resting = 0

    def close(self) -> None:
        super().close()
        self._timers.clear()
