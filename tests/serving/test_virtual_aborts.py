"""Late inputs in virtual time, with the real roles: the target is aborted, its step comes again, and no token changes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from functools import partial

import pytest

from afore.core.config import RunConfig
from afore.core.errors import RoleLost
from afore.core.trace import Span
from afore.serving.event_log import EventLog
from afore.serving.virtual import Ask, Emulation, running_virtual
from afore.testing import run_virtual
from afore.transport.api import Lane
from afore.transport.bells import BellKind, decode
from afore.transport.loopback import LoopbackFaults
from tests.serving.faulty_fabric import FaultyFabric, Stalls, Weather
from tests.serving.virtual_cases import EMULATION, QUIET, SMALL, asks, prescribed, whatever_comes

pytestmark = pytest.mark.slow

TARGET_US = SMALL.times.target_s * 1e6


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run under weather has left."""

    tokens: list[list[int]]
    counters: dict[str, int]
    elapsed_us: float
    log: EventLog


def serve(
    requests: list[Ask],
    weather: Weather,
    *,
    config: RunConfig = SMALL,
    emulation: Emulation = EMULATION,
    seed: int | None = None,
) -> Outcome:
    """Serves ``requests`` under ``weather``."""

    async def main() -> Outcome:
        async with running_virtual(config, emulation, make_fabric=partial(FaultyFabric, weather=weather)) as cluster:
            clock = cluster.network.clock
            began_ns = clock.now_ns()
            tokens = await cluster.ask_all(requests)
            elapsed_us = (clock.now_ns() - began_ns) / 1e3
            counters = (await cluster.client.stats())["counters"]
        cluster.check_stores()
        return Outcome(tokens, counters, elapsed_us, cluster.log)

    return run_virtual(main, seed=seed)


def check_aborts(log: EventLog) -> list[Span]:
    """The ABORT entries; nothing of their steps was published behind them, and each step came again."""
    entries = log.records("entry", "scheduler")
    plans = {entry.args["sequence"]: entry for entry in entries if entry.args["kind"] == "PLAN"}
    aborts = [entry for entry in entries if entry.args["kind"] == "ABORT"]
    for abort in aborts:
        cancelled = plans[abort.args["cancels"]]
        assert cancelled.target == abort.target
        assert abort.target is not None
        for later in plans.values():
            if later.args["sequence"] > abort.args["sequence"]:
                assert later.target is not None
                assert (later.target.microbatch, later.target.step) != (abort.target.microbatch, abort.target.step)
    return aborts


@pytest.mark.parametrize("number", [0, 1, 2, 5, 9])
def test_a_target_whose_inputs_are_late_is_aborted_and_comes_again(number: int) -> None:
    requests = asks(6, 4)
    weather = Stalls({(0, number): 1.5 * TARGET_US})
    outcome = serve(requests, weather)
    assert weather.stalled == 1
    assert outcome.tokens == prescribed(requests)
    (abort,) = check_aborts(outcome.log)
    assert outcome.counters["aborts"] == 1
    assert abort.target is not None
    # Every worker skipped it, and said so.
    for worker in range(SMALL.topology.ffn):
        assert len(outcome.log.records("abort", f"ffn-{worker}")) == 1
        assert abort.target not in {span.target for span in outcome.log.records("experts", f"ffn-{worker}")}
    # The step came again under the next number, with the same rows at least.
    again = dataclasses.replace(abort.target, layer=0, step=abort.target.step + 1)
    tokens = {entry.target: entry.args["tokens"] for entry in outcome.log.records("entry")}
    before = tokens[dataclasses.replace(again, step=abort.target.step)]
    assert all(now >= then for now, then in zip(tokens[again], before, strict=True)), "others may have joined"


def test_late_inputs_at_any_time_of_any_worker_change_no_token() -> None:
    requests = asks(6, 4)
    aborts = 0
    for seed in range(8):
        numbers = random.Random(seed)
        stalls = {(a, n): numbers.uniform(0.5, 2.5) * TARGET_US for a in range(2) for n in numbers.sample(range(30), 4)}
        outcome = serve(requests, Stalls(stalls), seed=seed)
        assert outcome.tokens == prescribed(requests), f"seed {seed}"
        assert len(check_aborts(outcome.log)) == outcome.counters.get("aborts", 0)
        aborts += outcome.counters.get("aborts", 0)
    assert aborts > 8


def test_inputs_that_come_just_as_they_are_reported_missing_change_no_token() -> None:
    """Some workers run the target, some skip it; or all run it and it is aborted all the same, its later layers under way."""
    requests = asks(4, 4)
    aborts = ran_on_some = ran_on_all = 0
    # Messages that are slower than the data path let a step go on after its abort.
    slow = LoopbackFaults(jitter_us=5.0, overtake=0.3, overtake_us=400.0)
    for seed, faults in itertools.product(range(8), (None, slow)):
        numbers = random.Random(seed)
        stalls = {
            (a, n): TARGET_US + numbers.uniform(-2.0, 20.0) for a in range(2) for n in numbers.sample(range(12), 2)
        }
        emulation = dataclasses.replace(EMULATION, weather=seed, faults=faults)
        outcome = serve(requests, Stalls(stalls), emulation=emulation, seed=seed)
        assert outcome.tokens == prescribed(requests), f"seed {seed}"
        for abort in check_aborts(outcome.log):
            ran = sum(span.target == abort.target for span in outcome.log.records("experts"))
            aborts += 1
            ran_on_some += 0 < ran < SMALL.topology.ffn
            ran_on_all += ran == SMALL.topology.ffn
    assert aborts > ran_on_all + ran_on_some
    assert ran_on_all > 0
    assert ran_on_some > 0


@pytest.mark.parametrize("policy", ["static", "afore-no-overlap", "afore-reactive"])
def test_other_policies_survive_aborts(policy: str) -> None:
    requests = asks(6, 4)
    weather = Stalls({(0, 3): 1.5 * TARGET_US, (1, 7): 1.2 * TARGET_US, (1, 15): 2.0 * TARGET_US})
    outcome = serve(requests, weather, config=dataclasses.replace(SMALL, policy=policy))
    assert outcome.tokens == prescribed(requests)
    assert len(check_aborts(outcome.log)) >= 3


@pytest.mark.parametrize("policy", ["lina", "libra"])
def test_policies_that_predict_survive_aborts(policy: str) -> None:
    """Some of the stalled writes are predictions: those delay a step, and abort none."""
    requests = asks(6, 4)
    weather = Stalls({(0, 3): 1.5 * TARGET_US, (1, 7): 1.2 * TARGET_US, (1, 15): 2.0 * TARGET_US})
    outcome = serve(requests, weather, config=dataclasses.replace(SMALL, policy=policy))
    assert outcome.tokens == prescribed(requests)
    assert len(check_aborts(outcome.log)) >= 1


def test_a_lost_bell_changes_nothing() -> None:
    requests = asks(4, 4)
    lost: list[int] = []

    async def swallow(source: str, target: str, lane: Lane, immediate: int | None) -> bool:
        if target == "ffn-2" and immediate and decode(immediate).kind is BellKind.INPUTS and not lost:
            lost.append(immediate)
            return False
        return True

    outcome = serve(requests, swallow)
    assert len(lost) == 1
    assert outcome.tokens == prescribed(requests)
    assert outcome.counters.get("aborts", 0) == 0


@pytest.mark.parametrize("stall_us", [3e6, 30e6])
def test_an_attention_worker_that_stands_still_is_named(stall_us: float) -> None:
    """Its target is aborted, it never comes back to its step, and the step's deadline names it."""

    async def main() -> None:
        weather = Stalls({(1, 4): stall_us})
        async with running_virtual(SMALL, QUIET, make_fabric=partial(FaultyFabric, weather=weather)) as cluster:
            results = await whatever_comes(cluster, asks(6, 6))
            lost = [result for result in results if isinstance(result, RoleLost)]
            assert lost
            assert all(
                "attention-1" in f"{error.role} {error.reason}" and "no report" in error.reason for error in lost
            )

    run_virtual(main)
