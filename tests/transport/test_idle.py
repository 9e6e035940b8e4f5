"""What readers do before they sleep: bounded in each wait, bounded in the long run, and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError, DeadlineExceeded, RegionRevoked
from afore.core.link_options import IdleOptions
from afore.testing import run_virtual, virtual_now_ns, virtual_test
from afore.transport.api import Notification
from afore.transport.idle import SAVED_SPINS, Spin, make_idle
from afore.transport.queues import Inbox

SPIN_US = 100.0


class Ticking:
    """A clock on which each look takes ``tick_ns``."""

    def __init__(self, tick_ns: int = 1_000) -> None:
        self.time_ns = 0
        self.tick_ns = tick_ns

    def now_ns(self) -> int:
        self.time_ns += self.tick_ns
        return self.time_ns

    async def sleep_us(self, duration_us: float) -> None:
        self.time_ns += int(duration_us * 1e3)


class Nobody:
    """A sender that keeps no account."""

    def give_back(self, count: int) -> None:
        pass


def spinning(clock: Ticking, **options: Any) -> Spin:
    idle = make_idle(
        IdleOptions(**{"strategy": "spin-then-fd", "spin_us": SPIN_US, "cpu_share": 1.0, **options}), clock
    )
    assert isinstance(idle, Spin)
    return idle


def never() -> bool:
    return False


def test_fd_does_nothing() -> None:
    assert make_idle(IdleOptions(), Ticking()) is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "spin"}, "idle.strategy"),
        ({"spin_us": 0}, "idle.spin_us"),
        ({"spin_us": 2e6}, "idle.spin_us"),
        ({"cpu_share": 0}, "idle.cpu_share"),
        ({"cpu_share": 1.5}, "idle.cpu_share"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        IdleOptions(**options)


@virtual_test
async def test_a_wait_looks_for_so_long_and_no_longer() -> None:
    clock = Ticking()
    began_ns = clock.time_ns
    assert await spinning(clock).linger(never, None) is None
    assert SPIN_US * 1e3 <= clock.time_ns - began_ns <= SPIN_US * 1e3 + 3 * clock.tick_ns


@virtual_test
async def test_a_deadline_that_is_nearer_ends_it_and_what_is_left_is_said() -> None:
    clock = Ticking()
    left_us = await spinning(clock).linger(never, 30.0)
    assert left_us == 0
    assert clock.time_ns <= 34 * clock.tick_ns
    left_us = await spinning(clock).linger(never, 1_000.0)
    assert left_us is not None
    assert 1_000.0 - SPIN_US - 2 <= left_us <= 1_000.0 - SPIN_US


@virtual_test
async def test_other_coroutines_run_meanwhile_and_what_they_bring_ends_it() -> None:
    inbox = Inbox("owner", "r", idle=spinning(Ticking(tick_ns=10)))
    taking = asyncio.create_task(inbox.take(None))
    for _ in range(3):
        await asyncio.sleep(0)
    inbox.put(Notification("p", 7), Nobody())
    assert [told.immediate for told in await taking] == [7]
    assert virtual_now_ns() == 0


@virtual_test
async def test_who_has_looked_in_vain_sleeps_until_it_comes_or_the_deadline() -> None:
    inbox = Inbox("owner", "r", idle=spinning(Ticking()))
    taking = asyncio.create_task(inbox.take(None))
    await asyncio.sleep(1e-3)
    inbox.put(Notification("p", 8), Nobody())
    assert [told.immediate for told in await taking] == [8]
    with pytest.raises(DeadlineExceeded):
        await inbox.take(5_000.0)
    assert virtual_now_ns() < 7e6


@virtual_test
async def test_the_end_of_a_region_and_a_cancellation_end_it() -> None:
    inbox = Inbox("owner", "r", idle=spinning(Ticking(tick_ns=1)))
    cancelled, taking = (asyncio.create_task(inbox.take(None)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    inbox.put(Notification("p", 9), Nobody())
    assert [told.immediate for told in await taking] == [9]
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    last = asyncio.create_task(inbox.take(None))
    await asyncio.sleep(0)
    inbox.revoke("r", "owner", "was closed")
    with pytest.raises(RegionRevoked):
        await last


@given(
    share=st.floats(0.01, 1),
    naps_us=st.lists(st.one_of(st.just(0.0), st.floats(0, 1e4)), min_size=1, max_size=40),
)
def test_in_the_long_run_it_takes_its_share_of_a_core_and_no_more(share: float, naps_us: list[float]) -> None:
    async def main() -> None:
        clock = Ticking()
        spin = spinning(clock, cpu_share=share)
        began_ns, looked_ns = clock.time_ns, 0
        for nap_us in naps_us:
            before_ns = clock.time_ns
            await spin.linger(never, None)
            looked_ns += clock.time_ns - before_ns
            # Each wait overshoots by two ticks at most, and the clock is read once where nothing is looked at.
            slack_ns = 3 * clock.tick_ns * len(naps_us)
            assert looked_ns <= SPIN_US * 1e3 + share * (clock.time_ns - began_ns) + slack_ns
            await clock.sleep_us(nap_us)

    run_virtual(main)


@virtual_test
async def test_after_a_long_sleep_only_so_much_is_saved_up() -> None:
    clock = Ticking()
    spin = spinning(clock, cpu_share=0.001)
    await clock.sleep_us(3600e6)
    spins = 0
    for _ in range(3 * SAVED_SPINS):
        before_ns = clock.time_ns
        await spin.linger(never, None)
        spins += clock.time_ns - before_ns >= SPIN_US * 1e3
    assert SAVED_SPINS - 1 <= spins <= SAVED_SPINS
