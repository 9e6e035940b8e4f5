"""The virtual-clock loop: exact time, one order, seeded interleavings, errors instead of hangs, and the pinned private names."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from afore.core.clock import LoopClock, deadline
from afore.core.errors import AforeError, DeadlineExceeded
from afore.core.virtual_fence import FENCED
from afore.core.virtual_loop import EXACT_UNTIL_NS, PINNED
from afore.testing import (
    DeadlockError,
    FencedCallError,
    LivelockError,
    TimeLimitError,
    VirtualLoop,
    VirtualTimeError,
    run_virtual,
    virtual_now_ns,
    virtual_test,
)

HOUR_NS = 3_600 * 10**9


# Exact time


@settings(deadline=None)
@given(delays_us=st.lists(st.integers(1, 10**9), min_size=1, max_size=20))
def test_sleeps_of_whole_microseconds_add_up_exactly(delays_us: list[int]) -> None:
    async def main() -> int:
        for delay_us in delays_us:
            await LoopClock().sleep_us(delay_us)
        return virtual_now_ns()

    assert run_virtual(main) == sum(delays_us) * 1_000


@settings(deadline=None)
@given(start_ns=st.integers(0, EXACT_UNTIL_NS // 2), delay_ns=st.integers(1, EXACT_UNTIL_NS // 2))
@example(start_ns=EXACT_UNTIL_NS // 2, delay_ns=1)
@example(start_ns=EXACT_UNTIL_NS // 2 - 1, delay_ns=EXACT_UNTIL_NS // 2)
@example(start_ns=1, delay_ns=1)
def test_relative_and_absolute_deadlines_hit_their_nanosecond(start_ns: int, delay_ns: int) -> None:
    async def main() -> list[int]:
        hits: list[int] = []
        if start_ns:
            await asyncio.sleep(start_ns / 1e9)
        loop = asyncio.get_running_loop()
        assert virtual_now_ns() == start_ns
        loop.call_later(delay_ns / 1e9, lambda: hits.append(virtual_now_ns()))
        loop.call_at(loop.time() + delay_ns / 1e9, lambda: hits.append(virtual_now_ns()))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(delay_ns / 1e9):
                await asyncio.Event().wait()
        hits.append(virtual_now_ns())
        return hits

    assert run_virtual(main) == [start_ns + delay_ns] * 3


@virtual_test
async def test_every_waiting_tool_of_asyncio_ends_on_its_deadline() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 3e-6)
    assert virtual_now_ns() == 3_000
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Queue[int]().get(), 1e-9)
    assert virtual_now_ns() == 3_001
    condition = asyncio.Condition()
    async with condition:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1e-6):
                await condition.wait()
    assert virtual_now_ns() == 4_001
    with pytest.raises(TimeoutError):
        async with asyncio.timeout_at(loop.time() + 1e-6):
            await asyncio.Semaphore(0).acquire()
    assert virtual_now_ns() == 5_001
    done, pending = await asyncio.wait({asyncio.create_task(asyncio.sleep(HOUR_NS))}, timeout=7e-6)
    assert not done
    assert len(pending) == 1
    assert virtual_now_ns() == 12_001
    with pytest.raises(DeadlineExceeded, match="peer ffn-1: reading did not finish within 1e-05 s"):
        async with deadline(10, peer="ffn-1", operation="reading"):
            await asyncio.Event().wait()
    assert virtual_now_ns() == 22_001


@virtual_test
async def test_groups_queues_events_and_conditions_pass_values_without_time() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
    event, condition, seen = asyncio.Event(), asyncio.Condition(), list[int]()

    async def produce() -> None:
        for value in range(5):
            await queue.put(value)
        event.set()
        async with condition:
            condition.notify_all()

    async def consume() -> None:
        while len(seen) < 5:
            seen.append(await queue.get())
        await event.wait()

    async def watch() -> None:
        async with condition:
            await condition.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        group.create_task(consume())
        group.create_task(produce())
    assert seen == [0, 1, 2, 3, 4]
    assert virtual_now_ns() == 0


@virtual_test
async def test_an_endless_deadline_and_a_cancelled_one_leave_time_alone() -> None:
    async with asyncio.timeout(float("inf")):
        await asyncio.sleep(1e-9)
    async with asyncio.timeout(3600):
        await asyncio.sleep(1e-9)
    await asyncio.sleep(0)
    assert virtual_now_ns() == 2


def test_cancelled_timers_do_not_pile_up() -> None:
    loop = VirtualLoop()

    async def main() -> int:
        keep = [loop.call_later(10, lambda: None) for _ in range(10)]
        most = 0
        for _ in range(5_000):
            async with asyncio.timeout(5):
                await asyncio.sleep(0)
                most = max(most, len(loop._timers))
        await asyncio.sleep(1e-9)
        assert all(not timer.cancelled() for timer in keep)
        return most

    try:
        assert loop.run_until_complete(main()) < 600
        assert loop.time_ns() == 1
    finally:
        loop.close()


def test_alarms_come_in_the_same_order_as_timers_and_a_cancelled_sleep_leaves_none() -> None:
    loop = VirtualLoop()

    async def main() -> list[str]:
        log: list[str] = []
        loop.alarm_ns(5, log.append, "first")
        loop.call_at_ns(5, log.append, "second")
        loop.alarm_ns(5, log.append, "third")
        loop.alarm_ns(0, log.append, "now")
        sleeping = [asyncio.create_task(loop.sleep_ns(10**9)) for _ in range(3)]
        await loop.sleep_ns(6)
        for task in sleeping:
            task.cancel()
        await asyncio.wait(sleeping)
        assert all(task.cancelled() for task in sleeping)
        return log

    try:
        assert loop.run_until_complete(main()) == ["now", "first", "second", "third"]
        assert loop.time_ns() == 6
        assert loop.callbacks > 0
        with pytest.raises(DeadlockError):
            loop.run_until_complete(loop.create_future())
        assert loop.time_ns() == 6, "no sleep was left to wait for"
    finally:
        loop.close()


# One order


@settings(deadline=None)
@given(delays_ns=st.lists(st.integers(0, 3), max_size=30), cancelled=st.sets(st.integers(0, 29)))
def test_callbacks_run_in_total_order_of_time_and_sequence(delays_ns: list[int], cancelled: set[int]) -> None:
    async def main() -> list[tuple[int, int]]:
        loop = asyncio.get_running_loop()
        log: list[tuple[int, int]] = []

        def note(index: int) -> None:
            log.append((virtual_now_ns(), index))

        for index, delay_ns in enumerate(delays_ns):
            handle = loop.call_later(delay_ns / 1e9, note, index) if index % 2 else _at(loop, delay_ns, note, index)
            if index in cancelled:
                handle.cancel()
        await asyncio.sleep(1e-6)
        return log

    def _at(loop: asyncio.AbstractEventLoop, delay_ns: int, note: Callable[[int], None], index: int) -> asyncio.Handle:
        return loop.call_at(loop.time() + delay_ns / 1e9, note, index) if delay_ns else loop.call_soon(note, index)

    expected = sorted((delay, index) for index, delay in enumerate(delays_ns) if index not in cancelled)
    assert run_virtual(main) == expected


async def _race(log: list[str]) -> None:
    async def worker(name: str) -> None:
        for round_ in range(3):
            log.append(f"{name}{round_}")
            await (asyncio.sleep(0) if round_ else asyncio.sleep(1e-6))

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(worker(name))


def _race_log(seed: int | None) -> tuple[str, ...]:
    log: list[str] = []
    run_virtual(_race(log), seed=seed)
    return tuple(log)


def test_a_seed_repeats_its_interleaving_and_seeds_differ() -> None:
    assert _race_log(None) == _race_log(None) == tuple(f"{name}{round_}" for round_ in range(3) for name in "abc")
    by_seed = {seed: _race_log(seed) for seed in range(20)}
    assert all(_race_log(seed) == log for seed, log in by_seed.items())
    assert len(set(by_seed.values())) > 10
    for log in by_seed.values():
        for name in "abc":
            assert [entry for entry in log if entry[0] == name] == [f"{name}{round_}" for round_ in range(3)]


def test_seeds_reach_the_lost_update_that_first_in_first_out_hides() -> None:
    async def main() -> int:
        total = 0

        async def add() -> None:
            nonlocal total
            before = total
            await asyncio.sleep(0)
            total = before + 1

        async def late_add() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            await add()

        await asyncio.gather(add(), late_add())
        return total

    assert run_virtual(main) == 2
    assert {run_virtual(main, seed=seed) for seed in range(200)} == {1, 2}


_ABORT_ORDER = """
import asyncio, os
from afore.testing import run_virtual
junk = [bytearray(os.urandom(1)[0] * 64 + 1) for _ in range(200)]
log = []
async def wait(name):
    try:
        await asyncio.Event().wait()
    finally:
        log.append(name)
        junk.append(bytearray(os.urandom(1)[0] + 1))
async def fail():
    await asyncio.sleep(1)
    raise ValueError
async def main():
    leftover = [asyncio.create_task(wait(f"left{i}")) for i in range(20)]
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(50):
                group.create_task(wait(i))
            group.create_task(fail())
    except* ValueError:
        pass
run_virtual(main)
print(log)
"""


@pytest.mark.slow
def test_groups_and_shutdown_cancel_in_order_of_creation_in_every_process() -> None:
    for hash_seed in ("0", "1"):
        shown = subprocess.run(
            [sys.executable, "-c", _ABORT_ORDER],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout.strip() == str([*range(50), *(f"left{index}" for index in range(20))])


# Errors instead of hangs


def test_a_deadlock_names_the_tasks_and_where_each_waits() -> None:
    async def inner(queue: asyncio.Queue[int]) -> int:
        return await queue.get()

    async def numbers(queue: asyncio.Queue[int]) -> AsyncIterator[int]:
        yield await inner(queue)

    async def main() -> None:
        async def sequencer() -> None:
            async for _ in numbers(asyncio.Queue()):
                pass

        async def joiner(task: asyncio.Task[None]) -> None:
            await task

        task = asyncio.create_task(sequencer(), name="ffn-0.sequencer")
        joining = asyncio.create_task(joiner(task))
        await asyncio.sleep(2e-6)
        await joining

    with pytest.raises(DeadlockError) as raised:
        run_virtual(main, seed=7)
    error = raised.value
    assert isinstance(error, AforeError)
    assert error.time_ns == 2_000
    assert [task.name for task in error.pending] == ["Task-1", "ffn-0.sequencer", "Task-3"]
    assert "3 pending tasks" in str(error)
    assert any("test_virtual_loop.py:" in where and "sequencer" in where for where in error.pending[1].where)
    assert error.pending[2].awaits == "task ffn-0.sequencer"
    assert error.__notes__ == ["virtual time 2,000 ns, seed 7"]


def test_a_deadlock_looks_through_coroutines() -> None:
    async def main() -> None:
        async def inner() -> None:
            await asyncio.Event().wait()

        await inner()

    with pytest.raises(DeadlockError, match=r"main \(.*\) > .*inner \(.*\) > Event.wait \(asyncio/locks.py"):
        run_virtual(main)


def test_a_deadlock_still_cleans_up() -> None:
    log: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(5)
            log.append(f"cleaned at {virtual_now_ns()}")

    with pytest.raises(DeadlockError):
        run_virtual(main)
    assert log == ["cleaned at 5000000000"]


def test_polling_without_waiting_is_a_livelock_not_a_hang() -> None:
    async def poll() -> None:
        while True:  # noqa: ASYNC110  # the mistake under test
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.create_task(poll(), name="spinner")

    with pytest.raises(LivelockError, match=r"1,000 callbacks ran and time did not move[\s\S]*spinner: .*poll"):
        run_virtual(main, stall_callbacks=1_000)


def test_many_callbacks_while_time_moves_are_no_livelock() -> None:
    async def main() -> None:
        for _ in range(2_000):
            await asyncio.sleep(1e-9)

    run_virtual(main, stall_callbacks=100)


def test_the_limit_ends_what_would_go_on_for_ever_and_clean_up_gets_as_much_again() -> None:
    log: list[int] = []

    async def heartbeat() -> None:
        while True:  # noqa: ASYNC110  # what the limit is for
            await asyncio.sleep(1)

    async def main() -> None:
        task = asyncio.create_task(heartbeat(), name="heartbeat")
        try:
            await task
        finally:
            await asyncio.sleep(2)
            log.append(virtual_now_ns())

    with pytest.raises(
        TimeLimitError, match=r"due at 4,000,000,000 ns, beyond the limit of 3,500,000,000 ns[\s\S]*heartbeat"
    ):
        run_virtual(main, limit_ns=3_500_000_000)
    assert log == [5_000_000_000]


def test_the_limit_itself_may_be_reached() -> None:
    assert run_virtual(asyncio.sleep(1, "there"), limit_ns=10**9) == "there"


# The fence


@pytest.mark.parametrize("call", FENCED)
def test_calls_into_the_world_are_refused_by_name(call: str) -> None:
    async def main() -> None:
        getattr(asyncio.get_running_loop(), call)()

    with pytest.raises(
        FencedCallError, match=rf"loop\.{call}\(\) reaches outside the virtual-clock loop; use the injected"
    ):
        run_virtual(main)


def test_the_usual_entrances_to_the_world_are_refused() -> None:
    async def connect() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    async def spawn() -> None:
        await asyncio.create_subprocess_exec("true")

    for main, call in ((connect, "create_connection"), (spawn, "subprocess_exec")):
        with pytest.raises(FencedCallError) as raised:
            run_virtual(main)
        assert raised.value.call == call


def test_cleaning_up_what_could_not_be_added_is_harmless() -> None:
    loop = VirtualLoop()
    assert not loop.remove_reader(0)
    assert not loop.remove_writer(0)
    assert not loop.remove_signal_handler(2)
    loop.close()


@pytest.mark.parametrize(
    ("call", "running"),
    [("call_soon", True), ("call_soon_threadsafe", True), ("call_later", True), ("call_soon_threadsafe", False)],
)
def test_other_threads_are_refused_by_name(call: str, running: bool) -> None:
    errors: list[BaseException] = []
    loop = VirtualLoop()

    def intrude() -> None:
        try:
            arguments: tuple[Any, ...] = (0, print) if call == "call_later" else (print,)
            getattr(loop, call)(*arguments)
        except BaseException as error:
            errors.append(error)

    def from_thread() -> None:
        thread = threading.Thread(target=intrude, name="migration")
        thread.start()
        thread.join()

    async def main() -> None:
        from_thread()

    if running:
        loop.run_until_complete(main())
    else:
        from_thread()
    loop.close()
    (error,) = errors
    assert isinstance(error, FencedCallError)
    assert f"loop.{call}()" in str(error)
    assert "thread 'migration'" in str(error)


@virtual_test
async def test_executors_run_inline_in_this_thread() -> None:
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, threading.get_ident) == threading.get_ident()
    assert await asyncio.to_thread(lambda: virtual_now_ns()) == 0
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(None, lambda: 1 // 0)


# Debug mode


def test_debug_mode_warns_of_slow_callbacks_by_the_clock_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        asyncio.get_running_loop().slow_callback_duration = 0.0
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING, "asyncio"):
        run_virtual(main, debug=True)
    assert any("Executing" in record.message and "took" in record.message for record in caplog.records)


def test_debug_mode_tells_where_a_never_awaited_coroutine_was_made() -> None:
    async def forgotten() -> None: ...

    async def main() -> None:
        forgotten()  # type: ignore[unused-coroutine]  # the mistake under test
        gc.collect()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_virtual(main, debug=True)
    (warning,) = caught
    assert issubclass(warning.category, RuntimeWarning)
    assert "never awaited" in str(warning.message)
    assert "Coroutine created at" in str(warning.message)


def test_debug_mode_refuses_a_coroutine_as_callback() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def callback() -> None: ...

        with pytest.raises(TypeError, match="coroutines cannot be used with call_later"):
            loop.call_later(1, callback)

    run_virtual(main, debug=True)


# Shutdown


@pytest.mark.parametrize("seed", [None, 3])
def test_the_end_cancels_leftovers_and_closes_generators(seed: int | None) -> None:
    log: list[str] = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            log.append(name)
            raise

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            log.append("generator")

    async def main() -> None:
        asyncio.get_running_loop().create_task(forever("left")).add_done_callback(lambda _: log.append("done"))
        kept.append(numbers())
        await anext(kept[0])
        await asyncio.sleep(0.1)

    kept: list[AsyncIterator[int]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_virtual(main, seed=seed)
        gc.collect()
    assert log == ["left", "done", "generator"]


def test_clean_up_that_hangs_is_named_too() -> None:
    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def main() -> None:
        asyncio.create_task(stubborn(), name="stubborn")  # noqa: RUF006  # left behind on purpose
        await asyncio.sleep(1)

    with pytest.raises(DeadlockError, match=r"stubborn: .*Event.wait"):
        run_virtual(main)


def test_results_and_errors_come_through() -> None:
    async def main() -> int:
        return 42

    async def bad() -> None:
        raise KeyError("lost")

    assert run_virtual(main) == run_virtual(main()) == 42
    with pytest.raises(KeyError) as raised:
        run_virtual(bad, seed=11)
    assert raised.value.__notes__ == ["virtual time 0 ns, seed 11"]


def test_inside_a_running_loop_it_is_refused_without_a_warning() -> None:
    async def inner() -> None: ...

    async def main() -> None:
        run_virtual(inner)

    with pytest.raises(RuntimeError, match="running event loop"):
        asyncio.run(main())
    gc.collect()


def test_virtual_now_needs_the_virtual_loop() -> None:
    async def main() -> None:
        virtual_now_ns()

    with pytest.raises(RuntimeError, match="not a VirtualLoop; use run_virtual"):
        asyncio.run(main())


def test_virtual_test_runs_each_seed_and_refuses_to_run_nothing() -> None:
    log: list[int] = []

    @virtual_test(seeds=range(5))
    async def body(step: int) -> None:
        log.append(step)

    body(3)
    assert log == [3] * 5
    assert list(inspect.signature(body).parameters) == ["step"]
    with pytest.raises(ValueError, match="at least one"):
        virtual_test(seeds=())
    with pytest.raises(ValueError, match="async def"):
        virtual_test(lambda: None)  # type: ignore[arg-type, return-value]  # the mistake under test


# Conformance: what this Python's asyncio must still be


def test_the_private_names_exist_and_behave() -> None:
    loop = VirtualLoop()
    for name in PINNED:
        assert hasattr(loop, name), f"asyncio of Python {sys.version_info[:3]} has no BaseEventLoop.{name}"
    assert type(loop._ready) is deque
    assert loop._stopping is False
    assert loop._thread_id is None
    assert loop._current_handle is None

    calls: list[str] = []
    handle = loop.call_soon(calls.append, "called")
    assert loop._ready[0] is handle
    assert not handle._cancelled
    handle._run()
    assert calls == ["called"]
    handle.cancel()
    assert getattr(handle, "_cancelled") is True  # noqa: B009  # read anew: mypy takes the first answer for final

    timer = loop.call_later(1, print)
    assert loop._cancelled_resting == 0
    timer.cancel()
    assert loop._cancelled_resting == 1, "TimerHandle.cancel no longer calls _timer_handle_cancelled"
    timer.cancel()
    assert loop._cancelled_resting == 1
    loop.close()
    assert loop._closed is True
    with pytest.raises(RuntimeError, match="closed"):
        loop._check_closed()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)


def test_run_forever_calls_run_once_until_stopping() -> None:
    seen: list[tuple[int | None, bool]] = []

    class Counting(VirtualLoop):
        def _run_once(self) -> None:
            seen.append((self._thread_id, self._stopping))
            super()._run_once()

    loop = Counting()
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert seen == [(threading.get_ident(), False)]
    assert loop._stopping is False
    loop.close()


@pytest.mark.parametrize("seed", [None, 0])
def test_stop_runs_what_is_ready_and_nothing_later(seed: int | None) -> None:
    log: list[str] = []
    loop = VirtualLoop(seed=seed)
    loop.call_soon(log.append, "a")
    loop.call_soon(loop.stop)
    loop.call_soon(log.append, "b")
    loop.call_later(1, log.append, "later")
    loop.run_forever()
    assert sorted(log) == ["a", "b"]
    assert loop.time_ns() == 0
    loop.close()


SUPPORTED = {
    "call_at",
    "call_exception_handler",
    "call_later",
    "call_soon",
    "call_soon_threadsafe",
    "close",
    "create_future",
    "create_task",
    "default_exception_handler",
    "get_debug",
    "get_exception_handler",
    "get_task_factory",
    "is_closed",
    "is_running",
    "remove_reader",
    "remove_signal_handler",
    "remove_writer",
    "run_forever",
    "run_in_executor",
    "run_until_complete",
    "set_debug",
    "set_exception_handler",
    "set_task_factory",
    "shutdown_asyncgens",
    "shutdown_default_executor",
    "stop",
    "time",
}


def test_every_public_method_of_an_event_loop_is_either_supported_or_fenced() -> None:
    public = {name for name in dir(asyncio.AbstractEventLoop) if not name.startswith("_")}
    assert public == SUPPORTED | set(FENCED)


def test_one_error_tree() -> None:
    for error in (DeadlockError, LivelockError, TimeLimitError, FencedCallError):
        assert issubclass(error, VirtualTimeError)
