"""Virtual time for tests: run a coroutine in no time, with exact deadlines and a repeatable order.

    from afore.testing import run_virtual

    async def main() -> float:
        async with asyncio.timeout(3600):          # takes no time at all
            await asyncio.sleep(0.000_001)         # exactly 1,000 ns
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 1e-6

- What needs no file descriptor works as in asyncio: tasks, groups, timeouts, queues, events, conditions, executors (inline).
- Two runs do the same in the same order. ``seed=`` gives another legal order of what is ready at the same time; an error names
  the seed, so that it can be repeated.
- A deadlock, a livelock and ``limit_ns`` end in an error that names the pending tasks and where each waits.
- Sockets, subprocesses, signals and threads are refused by name (``FencedCallError``).

With pytest, ``@virtual_test`` makes a coroutine function a test that runs in virtual time, once for each seed:

    @virtual_test(seeds=range(100))
    async def test_nothing_is_lost(tmp_path): ...

Roles read the time through ``afore.core.clock.LoopClock``; ``virtual_now_ns`` reads it in a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

from afore.core.virtual_fence import DeadlockError, FencedCallError, LivelockError, TimeLimitError, VirtualTimeError
from afore.core.virtual_loop import STALL_CALLBACKS, VirtualLoop

__all__ = [
    "DeadlockError",
    "FencedCallError",
    "LivelockError",
    "TimeLimitError",
    "VirtualLoop",
    "VirtualTimeError",
    "run_virtual",
    "virtual_now_ns",
    "virtual_test",
]

T = TypeVar("T")
P = ParamSpec("P")
GARBAGE = 50_000
"""Objects that come to be, and stay, before the collector looks for cycles.

A run in virtual time makes a cluster's worth of them at its start, and next to no cycles: at Python's 700 a sixth of the start is
spent looking.
"""
Main = Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]


def run_virtual(
    main: Main[T],
    seed: int | None = None,
    limit_ns: int | None = None,
    *,
    debug: bool | None = None,
    stall_callbacks: int = STALL_CALLBACKS,
) -> T:
    """Runs ``main`` (a coroutine, or a function that makes one) on a fresh virtual-clock loop and returns its result.

    ``seed``: none for first in, first out; a number for a random legal order. ``limit_ns``: the time it must not pass.
    What is left at the end is cancelled, in order of creation, and gets the virtual time to clean up.
    Raises what ``main`` raises, and ``DeadlockError``, ``LivelockError`` or ``TimeLimitError``, each with a note of time and seed.
    """
    loop: VirtualLoop | None = None

    def make_loop() -> VirtualLoop:
        nonlocal loop
        loop = VirtualLoop(seed=seed, limit_ns=limit_ns, stall_callbacks=stall_callbacks)
        return loop

    coro = main() if callable(main) else main
    try:
        if _is_running():
            raise RuntimeError("run_virtual() cannot be called from a running event loop; await the coroutine there")
        with _seldom_collecting(), asyncio.Runner(debug=debug, loop_factory=make_loop) as runner:
            return runner.run(coro)
    except BaseException as error:
        if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
            coro.close()  # never started, it would warn
        if loop is not None:
            error.add_note(f"virtual time {loop.time_ns():,} ns, seed {seed}")
        raise


@contextlib.contextmanager
def _seldom_collecting() -> Iterator[None]:
    """The collector's first threshold is ``GARBAGE``, unless it is higher, or the collector is off."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], GARBAGE), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@overload
def virtual_test(function: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]: ...
@overload
def virtual_test(
    *, seeds: Iterable[int | None] = (None,), limit_ns: int | None = None, debug: bool | None = None
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]: ...
def virtual_test(
    function: Callable[..., Coroutine[Any, Any, None]] | None = None,
    *,
    seeds: Iterable[int | None] = (None,),
    limit_ns: int | None = None,
    debug: bool | None = None,
) -> Any:
    """Makes a coroutine function an ordinary test function that runs in virtual time, once for each of ``seeds``.

    Fixtures and parameters stay as they are; they are made once and shared by the seeds. Raises ``ValueError`` for no seeds.
    """
    all_seeds = tuple(seeds)
    if not all_seeds:
        raise ValueError("seeds: none given, so the test would run nothing; give at least one")

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        if not inspect.iscoroutinefunction(test):
            raise ValueError(f"{test!r} is not a coroutine function; write `async def`")

        @functools.wraps(test)
        def run_test(*args: Any, **kwargs: Any) -> None:
            for seed in all_seeds:
                run_virtual(functools.partial(test, *args, **kwargs), seed=seed, limit_ns=limit_ns, debug=debug)

        return run_test

    return decorate if function is None else decorate(function)


def virtual_now_ns() -> int:
    """The virtual time of the running loop. Raises ``RuntimeError`` where no virtual-clock loop is running."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError(f"the running loop is {loop!r}, not a VirtualLoop; use run_virtual")
    return loop.time_ns()
