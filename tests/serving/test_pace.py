"""How many microbatches run, against models of what each number would serve."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.serving import pace
from afore.serving.pace import Pace


def run(
    paced: Pace, round_us: Callable[[int], float], steps: int, tokens: Callable[[int], int] = lambda step: 120
) -> list[int]:
    """So many rounds, each as long as the number that runs would take; returns that number of each round."""
    now_us, ran = 0.0, []
    for step in range(steps):
        running = paced.microbatches
        for microbatch in range(1, running):
            paced.step_ended(microbatch, tokens(step) // running, round(now_us * 1e3))
        now_us += round_us(running)
        paced.step_ended(0, tokens(step) - (running - 1) * (tokens(step) // running), round(now_us * 1e3))
        ran.append(running)
    return ran


def saturated(fixed_us: float, latency_us: float) -> Callable[[int], float]:
    """A bottleneck that pays ``fixed_us`` for each microbatch; below two or so of them, what one takes alone decides."""
    return lambda running: max(running * fixed_us + 1000.0, latency_us / running)


@given(
    fixed_us=st.floats(10, 2000),
    latency_us=st.floats(1, 20_000),
    most=st.integers(1, 6),
    data=st.data(),
)
def test_it_keeps_to_its_limits_and_ends_where_one_fewer_is_no_faster(
    fixed_us: float, latency_us: float, most: int, data: st.DataObject
) -> None:
    least = data.draw(st.integers(1, most))
    paced, round_us = Pace(most=most, least=least), saturated(fixed_us, latency_us)
    ran = run(paced, round_us, 6 * (pace.SETTLE_STEPS + pace.MEASURE_STEPS) + 1)  # the last trial has ended too
    assert all(least <= running <= most for running in ran)
    assert ran[: pace.SETTLE_STEPS + pace.MEASURE_STEPS][-1] == most, "the most is measured first"
    kept = ran[-1]
    assert kept == paced.microbatches
    assert kept == least or round_us(kept - 1) * (1 + pace.MARGIN) >= round_us(kept) * (1 - 1e-9)
    assert round_us(kept) <= round_us(most)


def test_a_trial_that_fails_is_taken_back_and_comes_ever_more_seldom() -> None:
    ran = run(Pace(most=3, least=1), lambda running: 3000.0 / running, 4000)
    trials = [step for step, running in enumerate(ran) if running != 3]
    firsts = [step for step in trials if step - 1 not in trials]
    assert len(trials) <= len(firsts) * (pace.SETTLE_STEPS + pace.MEASURE_STEPS)
    gaps = [later - earlier for earlier, later in pairwise(firsts)]
    assert gaps == sorted(gaps)
    assert 0 < len(trials) < 0.02 * len(ran)


def test_another_load_is_measured_at_once_and_may_end_elsewhere() -> None:
    """With few tokens two microbatches are best, with many three: attention has become the longer part."""
    paced = Pace(most=3, least=2)
    light, heavy = saturated(500.0, 1.0), lambda running: 9000.0 / running
    assert run(paced, light, 40)[-1] == 2
    ran = run(paced, heavy, 2 * pace.HOLD_STEPS + 40, tokens=lambda step: 480)
    assert ran[-1] == 3


def test_a_load_that_changes_in_mid_trial_decides_nothing() -> None:
    paced = Pace(most=2, least=1)
    trial = pace.SETTLE_STEPS + pace.MEASURE_STEPS
    ran = run(paced, lambda running: 1000.0, 2 * trial + 1, tokens=lambda step: 120 if step < trial else 480)
    assert ran == [2] * trial + [1] * trial + [2], "more tokens in the same time, but of another load"


@pytest.mark.parametrize("microbatch", [1, 2])
def test_rounds_are_those_of_microbatch_0(microbatch: int) -> None:
    paced = Pace(most=3, least=1)
    for step in range(100):
        assert paced.step_ended(microbatch, 10, step * 1000) == 3
