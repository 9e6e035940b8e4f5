"""What is measured of a GPU has none of the host's time in it, and where it has, that is said."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.stopwatch import FIRST_CYCLES, MOST_CYCLES, Sleep, Stopwatch
from tests.workers.device.cuda.fake_driver import FakeCalls


class Bed:
    """A driver, two streams, and work that costs the host 500 µs and the GPU one for each piece."""

    def __init__(self, make_sleep: Callable[[FakeCalls], Sleep | None]) -> None:
        self.calls = FakeCalls()
        self.driver = Driver(self.calls)
        self.driver.retain_context(0)
        self.one, self.two = self.driver.create_stream(-5), self.driver.create_stream(0)
        self.watch = Stopwatch(self.driver, lambda stream: contextlib.nullcontext(), make_sleep(self.calls))

    def work(self, stream: int, pieces: int = 1) -> tuple[int, Callable[[], None]]:
        def enqueue() -> None:
            for _ in range(pieces):
                self.calls.machine.now_us += 500
                self.driver.call(stream, self.calls.NOTHING, 0)

        return stream, enqueue


def test_the_hosts_time_is_not_in_it() -> None:
    bed = Bed(lambda calls: calls.sleep)
    (timed,) = bed.watch.together([bed.work(bed.one, 3)])
    assert timed.took_us == 4, "three pieces and the event behind them"
    assert bed.watch.late == 0
    assert bed.calls.mistakes == []
    assert bed.calls.live["events"] == 0


def test_works_of_two_streams_begin_at_one_instant() -> None:
    bed = Bed(lambda calls: calls.sleep)
    one, two = bed.watch.together([bed.work(bed.one, 2), bed.work(bed.two, 2)])
    assert max(one.begin_us, two.begin_us) < 500
    assert max(one.end_us, two.end_us) < 500


def test_a_gpu_that_cannot_be_held_is_said() -> None:
    bed = Bed(lambda calls: None)
    (timed,) = bed.watch.together([bed.work(bed.one)])
    assert timed.took_us > 500
    assert bed.watch.late == 1


def test_a_hold_that_was_too_short_is_made_longer() -> None:
    """It is over before the host is done unless it is the third, or longer."""
    asked: list[int] = []

    def make(calls: FakeCalls) -> Sleep:
        def sleep(stream: int, cycles: int) -> None:
            asked.append(cycles)
            if cycles >= 16 * FIRST_CYCLES:
                calls.sleep(stream)

        return sleep

    bed = Bed(make)
    assert bed.watch.together([bed.work(bed.one)])[0].took_us < 500
    assert asked == [FIRST_CYCLES, 4 * FIRST_CYCLES, 16 * FIRST_CYCLES]
    bed.watch.together([bed.work(bed.one)])
    assert asked[3:] == [16 * FIRST_CYCLES], "what was long enough is kept"
    assert bed.watch.late == 0


def test_the_longest_hold_is_the_last() -> None:
    asked: list[int] = []
    bed = Bed(lambda calls: lambda stream, cycles: asked.append(cycles))
    bed.watch.together([bed.work(bed.one)])
    assert asked[-1] == MOST_CYCLES
    assert bed.watch.late == 1
