"""``Signal``: news, deadlines to the nanosecond, and one timer for many waits."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.clock import LoopClock
from afore.core.signal import Signal
from afore.testing import run_virtual


def now_ns() -> int:
    return asyncio.get_running_loop().time_ns()  # type: ignore[attr-defined, no-any-return]  # the virtual loop's


def test_news_wakes_and_stays_until_it_is_cleared() -> None:
    async def main() -> None:
        signal = Signal()
        waiting = asyncio.create_task(signal.wait(1e6))
        await asyncio.sleep(0)
        signal.set()
        assert await waiting
        assert await signal.wait(0)
        signal.clear()
        assert not await signal.wait(10)

    run_virtual(main)


@pytest.mark.parametrize(("first_us", "second_us"), [(100.0, 100.0), (100.0, 30.0), (30.0, 500.0)])
def test_a_later_wait_ends_at_its_own_deadline(first_us: float, second_us: float) -> None:
    async def main() -> None:
        signal = Signal()
        asyncio.get_running_loop().call_later(7e-6, signal.set)
        assert await signal.wait(first_us)
        signal.clear()
        began_ns = now_ns()
        assert not await signal.wait(second_us)
        assert now_ns() - began_ns == second_us * 1000

    run_virtual(main)


def test_the_timer_that_rests_does_not_end_a_wait_without_deadline() -> None:
    async def main() -> None:
        signal = Signal()
        asyncio.get_running_loop().call_later(1e-6, signal.set)
        assert await signal.wait(50)
        signal.clear()
        asyncio.get_running_loop().call_later(1e-3, signal.set)
        assert await signal.wait()
        assert now_ns() == 1_001_000

    run_virtual(main)


def test_a_cancelled_wait_leaves_the_signal_usable() -> None:
    async def main() -> None:
        signal = Signal()
        waiting = asyncio.create_task(signal.wait(100))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not await signal.wait(200)
        assert now_ns() == 200_000

    run_virtual(main)


@given(st.lists(st.tuples(st.floats(0.001, 5e4), st.floats(0.0, 1e5)), min_size=1, max_size=8))
def test_no_deadline_is_looked_at_for_ever(waits: list[tuple[float, float]]) -> None:
    """Deadlines are sums of floats, the clock counts whole nanoseconds: a timer may run just before its time."""

    async def main() -> None:
        signal = Signal()
        for pause_us, timeout_us in waits:
            await LoopClock().sleep_us(pause_us)
            began_ns = now_ns()
            assert not await signal.wait(timeout_us)
            assert abs(now_ns() - began_ns - timeout_us * 1e3) <= 2

    run_virtual(main)
