"""What pieces of work take on a GPU, without the time that the host takes to enqueue them.

Two events around a launch also measure the host wherever it is the slower one: the GPU reaches the first event at once, and then
waits. So the stream is held by a kernel that only waits; everything is enqueued behind it, and runs without a gap. Whether the
hold was long enough is seen, not assumed: its end must not have been reached when the host is done. Where it was, the hold is made
longer and the measurement made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from afore.workers.device.cuda.driver import Driver

FIRST_CYCLES = 1 << 20
"""Of a hold: half a millisecond of a GPU at 2 GHz."""
MOST_CYCLES = 1 << 28
"""The longest: who enqueues for more than a tenth of a second waits for the GPU itself."""
Current = Callable[[int], AbstractContextManager[object]]
Sleep = Callable[[int, int], None]
"""(stream, cycles): enqueues what only waits."""


class Timed(NamedTuple):
    """Of one piece of work, from the instant in which the streams were let go."""

    begin_us: float
    end_us: float

    @property
    def took_us(self) -> float:
        """What it took."""
        return self.end_us - self.begin_us


class Stopwatch:
    """Measures over ``driver``. ``sleep`` None: the GPU cannot be held, and what is measured has the host's time in it."""

    def __init__(self, driver: Driver, current: Current, sleep: Sleep | None) -> None:
        self._driver = driver
        self._current = current
        self._sleep = sleep
        self._cycles = FIRST_CYCLES
        self.late = 0
        """Measurements that have the host's time in them: the longest hold was too short."""

    def together(self, works: Sequence[tuple[int, Callable[[], None]]]) -> list[Timed]:
        """What each work takes, each enqueued on its stream, all of them let go at one instant. Raises ``CudaError``."""
        while True:
            times, held = self._once(works)
            if held:
                return times
            if self._sleep is None or self._cycles >= MOST_CYCLES:
                self.late += 1
                return times
            self._cycles *= 4

    def _once(self, works: Sequence[tuple[int, Callable[[], None]]]) -> tuple[list[Timed], bool]:
        driver, events = self._driver, []

        def mark(stream: int) -> int:
            events.append(driver.create_event())
            driver.record(events[-1], stream)
            return events[-1]

        try:
            first = works[0][0]
            if self._sleep is not None:
                self._sleep(first, self._cycles)
            gate = mark(first)
            for stream in {stream for stream, _ in works} - {first}:
                driver.wait(stream, gate)
            marks = []
            for stream, enqueue in works:
                begin = mark(stream)
                with self._current(stream):
                    enqueue()
                marks.append((begin, mark(stream)))
            held = self._sleep is not None and not driver.reached(gate)
            for _, end in marks:
                driver.synchronise(end)
            return [Timed(driver.elapsed_us(gate, begin), driver.elapsed_us(gate, end)) for begin, end in marks], held
        finally:
            for event in events:
                driver.destroy_event(event)


def torch_sleep(current: Current) -> Sleep | None:
    """By torch's own waiting kernel; none where this torch has none."""
    import torch

    wait: Any = getattr(torch.cuda, "_sleep", None)
    if wait is None:
        return None

    def sleep(stream: int, cycles: int) -> None:
        with current(stream):
            wait(cycles)

    return sleep
