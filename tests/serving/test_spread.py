"""Steps are held back until they begin evenly apart, in a world where each takes as long as it takes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from afore.serving.spread import EARNED_PER_STEP, LEAST, MOST_HOLDS, Spread

STEP_NS = 900_000


def run(
    count: int, steps: int, took_ns: Callable[[int, int], int], starts_ns: Callable[[int], int] = lambda number: 0
) -> tuple[list[list[int]], list[list[int]]]:
    """So many microbatches and steps of each; returns when each step began and for how long it was held back, by microbatch."""
    spread = Spread(count)
    begun: list[list[int]] = [[] for _ in range(count)]
    held: list[list[int]] = [[] for _ in range(count)]
    ready = [(starts_ns(number), number) for number in range(count)]
    heapq.heapify(ready)
    while ready:
        now_ns, number = heapq.heappop(ready)
        if begun[number]:
            spread.ended(number, now_ns)
        if len(begun[number]) == steps:
            continue
        held[number].append(spread.hold_ns(number, now_ns))
        begun[number].append(now_ns + held[number][-1])
        heapq.heappush(ready, (begun[number][-1] + took_ns(number, len(begun[number])), number))
    return begun, held


@given(count=st.integers(LEAST, 8))
def test_microbatches_that_begin_together_come_evenly_apart_and_stay_so(count: int) -> None:
    begun, held = run(count, 12, lambda number, step: STEP_NS)
    last = sorted(times[-1] for times in begun)
    apart = [later - earlier for earlier, later in pairwise(last)]
    assert all(abs(distance - STEP_NS / count) <= 1 for distance in apart)
    assert all(not any(waits[2:]) for waits in held), "each is held back once"
    assert sum(map(sum, held)) <= STEP_NS * (count - 1) / 2 + count


@given(count=st.integers(LEAST, 6), data=st.data())
def test_a_step_waits_less_than_a_step_takes_whatever_the_times(count: int, data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(1, 10 * STEP_NS), min_size=1, max_size=40))
    starts = data.draw(st.lists(st.integers(0, 5 * STEP_NS), min_size=count, max_size=count))
    _, held = run(count, 10, lambda number, step: times[(number * 7 + step) % len(times)], starts.__getitem__)
    assert all(0 <= wait <= max(times) for waits in held for wait in waits)


@given(count=st.integers(LEAST, 5), data=st.data())
def test_times_that_differ_a_little_hold_nobody_once_they_are_apart(count: int, data: st.DataObject) -> None:
    near = st.floats(-0.02, 0.02)
    noise = data.draw(st.lists(near, min_size=50, max_size=50))
    _, held = run(count, 10, lambda number, step: round(STEP_NS * (1 + noise[(number * 11 + step) % 50] / count)))
    assert all(not any(waits[3:]) for waits in held)


@given(starts=st.lists(st.integers(0, STEP_NS), min_size=2, max_size=2))
def test_two_are_left_as_they_come(starts: list[int]) -> None:
    _, held = run(2, 6, lambda number, step: STEP_NS, starts.__getitem__)
    assert not any(map(any, held))


def test_whoever_ended_long_ago_counts_no_more() -> None:
    spread = Spread(3)
    for number in range(3):
        assert spread.hold_ns(number, 0) == 0
    for number in range(3):
        spread.ended(number, STEP_NS)
    later_ns = 5 * STEP_NS
    assert spread.hold_ns(0, later_ns) == 0
    assert spread.hold_ns(1, later_ns) == 0, "the third has stopped: two are left"
    assert spread.hold_ns(2, later_ns) > 0, "it has come back"


@given(count=st.integers(LEAST, 5))
def test_those_that_fall_together_again_and_again_are_seldom_parted(count: int) -> None:
    """A limit that all of them share lets whoever is behind catch up within a step."""
    steps = 400
    spread, now_ns, held = Spread(count), 0, 0
    for _ in range(steps):
        latest_ns = now_ns
        for number in range(count):
            hold_ns = spread.hold_ns(number, now_ns)
            held += hold_ns > 0
            latest_ns = max(latest_ns, now_ns + hold_ns)
        now_ns = latest_ns + STEP_NS
        for number in range(count):
            spread.ended(number, now_ns)
    assert 0 < held <= count * (MOST_HOLDS + steps * EARNED_PER_STEP)


def test_a_step_that_never_began_has_no_time() -> None:
    spread = Spread(3)
    spread.ended(1, STEP_NS)
    assert [spread.hold_ns(number, STEP_NS) for number in range(3)] == [0, 0, 0]
