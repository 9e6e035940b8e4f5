"""A wall-clock loop whose second is longer: it tells its own time everywhere, and a virtual run keeps its order on it."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from afore.core.clock import LoopClock
from afore.core.config import RunConfig
from afore.core.dilated_loop import DilatedLoop, run_dilated
from afore.core.topology import Topology
from afore.serving.virtual import Ask, EmulatedRun, Emulation, run_emulated
from tests.serving.virtual_cases import SMALL, SPEC

pytestmark = pytest.mark.slow


def test_its_time_is_slower_than_the_walls() -> None:
    async def main() -> tuple[float, float, int]:
        clock, loop = LoopClock(asyncio.get_running_loop()), asyncio.get_running_loop()
        wall_s, began_s, began_ns = time.monotonic(), loop.time(), clock.now_ns()
        await clock.sleep_us(20_000)
        return time.monotonic() - wall_s, loop.time() - began_s, clock.now_ns() - began_ns

    wall_s, own_s, own_ns = run_dilated(main, 5)
    assert own_s >= 0.0199
    assert own_ns >= 19_900_000
    assert wall_s >= own_s * 4.9


def test_a_factor_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        DilatedLoop(0.5)


def entries(run: EmulatedRun) -> list[object]:
    """Every plan in ring order: its sequence, target, shares and copies."""
    return [
        (span.args["sequence"], span.target, span.args["kind"], span.args["shares"], span.args["copies"])
        for span in run.log.records("entry", "scheduler-0")
    ]


FACTORS = (2, 5, 20)
TRIES = 4
"""One pause of the host, longer than two events are apart, reorders them: that says something of the host, not of the loop."""


def first_difference(virtual: EmulatedRun, dilated: EmulatedRun, factor: int) -> str:
    """Where the order parts, and how short the wall's time was there; empty where it does not."""
    planned, found = entries(virtual), entries(dilated)
    if planned == found:
        return ""
    spans = virtual.log.records("entry", "scheduler-0")
    at = next(
        (i for i, (a, b) in enumerate(zip(planned, found, strict=False)) if a != b), min(len(planned), len(found))
    )
    gaps_us = [(spans[i].start_ns - spans[i - 1].start_ns) / 1e3 for i in (at, at + 1) if 0 < i < len(spans)]
    apart = (
        f"its neighbours are {min(gaps_us):.0f} us away, {min(gaps_us) * factor / 1e3:.1f} ms of the wall"
        if gaps_us
        else ""
    )
    return f"entry {at} of {len(planned)} is another at x{factor}; {apart}"


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("policy", ["afore", "static", "libra"])
def test_frozen_costs_keep_plans_and_order_on_the_walls_clock(policy: str, factor: int) -> None:
    """At each factor. Where the host is too slow for a lower one, that is skipped and says for what; the last must hold."""
    # Slow enough that what the host does between two events is short beside them.
    slow = dataclasses.replace(
        Emulation().profile, name="slow", attention_us=9000.0, gate_us=100.0, experts_us=4000.0, tile_us=300.0
    )
    config: RunConfig = dataclasses.replace(
        SMALL,
        policy=policy,
        topology=Topology(attention=1, ffn=2, microbatches=2, redundant_slots=2),
        times=dataclasses.replace(
            SMALL.times, target_s=30.0, verdict_s=30.0, step_s=60.0, lease_s=60.0, control_s=30.0, join_s=60.0
        ),
    )
    assert not config.costs.adapt
    asks = [Ask(prompt=(1, 2, 3), max_new_tokens=3), Ask(prompt=(5, 6, 7), max_new_tokens=3, at_us=9_000.0)]
    emulation = Emulation(spec=SPEC, profile=slow)
    virtual = run_emulated(config, asks, emulation)
    assert entries(virtual)
    assert policy != "afore" or any(span.args["copies"] for span in virtual.log.records("entry", "scheduler-0"))
    reasons = []
    for _ in range(TRIES):
        dilated = run_emulated(config, asks, emulation, dilation=factor)
        assert dilated.tokens == virtual.tokens, "whatever the order"
        if not (reason := first_difference(virtual, dilated, factor)):
            return
        reasons.append(reason)
    if factor == FACTORS[-1]:
        pytest.fail(f"{policy}: {'; '.join(reasons)}")
    pytest.skip(f"this host pauses for too long for {policy} at x{factor}: {'; '.join(reasons)}")
