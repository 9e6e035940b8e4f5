"""The whole runtime in virtual time: the same roles, twice the same to the byte, whatever order simultaneous events take."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from afore.core.config import BatchOptions, RunConfig
from afore.core.errors import ConfigError, RoleLost
from afore.core.target import Target
from afore.core.topology import Topology
from afore.models.emulated import RoutingProfile
from afore.serving.event_log import EventLog
from afore.serving.virtual import Ask, EmulatedRun, EmulatedWorld, Emulation, run_emulated, running_virtual
from afore.testing import FencedCallError, run_virtual
from afore.transport import session
from afore.transport.loopback import LoopbackFaults
from afore.transport.session import RoleContext
from afore.workers.compute import Compute
from afore.workers.device.ports import Jitter
from tests.serving.virtual_cases import EMULATION, FFN_BOUND, SMALL, SMOKE, asks, prescribed, smoke

POLICIES = ("static", "afore", "afore-no-prefetch", "afore-no-overlap", "afore-reactive")


@pytest.fixture(scope="module")
def runs() -> dict[str, EmulatedRun]:
    """The smoke run under every policy."""
    return {policy: smoke(policy) for policy in POLICIES}


def exposed_ms(run: EmulatedRun) -> float:
    """How long model streams waited for slots, over all workers and targets."""
    return sum(wait.end_ns - wait.start_ns for wait in run.log.records("wait", "ffn")) / 1e6


# The smoke test of the design


@pytest.mark.slow
def test_two_runs_leave_the_same_event_log(runs: dict[str, EmulatedRun]) -> None:
    again = smoke("afore")
    assert again.log.to_bytes() == runs["afore"].log.to_bytes()
    assert again.stats == runs["afore"].stats


@pytest.mark.slow
@pytest.mark.processes
def test_other_processes_and_hash_seeds_leave_the_same_event_log(runs: dict[str, EmulatedRun]) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.serving.virtual_cases"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    seen = []
    for process in processes:
        with process:
            stdout, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr
        seen.append(json.loads(stdout))
    assert seen[0].pop("hash") != seen[1].pop("hash"), "the hash seeds made no difference: nothing was tested"
    assert seen == [{"digest": runs["afore"].log.digest(), "tokens": runs["afore"].tokens}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_tokens_that_the_model_prescribes(runs: dict[str, EmulatedRun], policy: str) -> None:
    run = runs[policy]
    assert run.tokens == prescribed(asks())
    entries = [entry for entry in run.log.records("entry") if entry.args["kind"] == "PLAN"]
    targets = [entry.target for entry in entries if entry.target is not None]
    assert len({target.step for target in targets}) >= 5
    assert {target.layer for target in targets} == {0, 1, 2}
    assert {target.microbatch for target in targets} == {0, 1, 2}
    assert [entry.args["sequence"] for entry in entries] == list(range(len(entries)))
    copies = run.stats["migration"]["copies"]
    assert copies == sum(len(entry.args["copies"]) for entry in entries)
    assert copies == sum(report.writes for report in run.stores)
    assert (copies > 0) == (policy != "static")
    assert (sum(report.replica_reads for report in run.stores) > 0) == (policy != "static")


@pytest.mark.slow
def test_prefetched_and_overlapped_copies_are_worth_what_the_paper_says(runs: dict[str, EmulatedRun]) -> None:
    elapsed = {policy: run.elapsed_ns for policy, run in runs.items()}
    assert elapsed["afore"] < elapsed["afore-no-overlap"] < elapsed["afore-reactive"] < elapsed["static"]
    assert elapsed["afore"] < elapsed["afore-no-prefetch"] < elapsed["static"]
    assert exposed_ms(runs["afore"]) < exposed_ms(runs["afore-no-overlap"])
    assert runs["afore"].stats["migration"]["copies"] == runs["afore-no-overlap"].stats["migration"]["copies"]
    for policy in ("afore", "afore-no-overlap"):
        tile = runs[policy].stats["imbalance"]["tile"]
        assert tile["bound"] <= tile["after"] < tile["before"]


@pytest.mark.slow
def test_every_worker_executes_in_ring_order(runs: dict[str, EmulatedRun]) -> None:
    log = runs["afore"].log
    order = [(entry.args["sequence"], entry.target) for entry in log.records("entry") if entry.args["kind"] == "PLAN"]
    for worker in range(SMOKE.topology.ffn):
        experts = log.records("experts", f"ffn-{worker}")
        assert [(span.args["sequence"], span.target) for span in experts] == order
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(experts))


# Other orders, other weather


@pytest.mark.slow
def test_every_interleaving_gives_the_same_tokens() -> None:
    requests = asks(6, 4)
    expected = prescribed(requests)
    emulation = dataclasses.replace(EMULATION, record=False, latency_us=0.0)
    elapsed = set()
    for seed in range(30):
        run = run_emulated(SMALL, requests, emulation, seed=seed)
        assert run.tokens == expected, f"seed {seed}"
        assert run.stats["counters"].get("aborts", 0) == 0
        elapsed.add(run.elapsed_ns)
    assert len(elapsed) > 1, "all seeds took the same order"


@pytest.mark.slow
def test_every_weather_gives_the_same_tokens() -> None:
    requests = asks(6, 4)
    expected = prescribed(requests)
    for weather in range(10):
        emulation = dataclasses.replace(
            EMULATION,
            record=False,
            weather=weather,
            faults=LoopbackFaults(jitter_us=20.0, overtake=0.2, overtake_us=300.0, torn=0.3, torn_us=50.0),
            jitter=Jitter(compute_us=60.0, copy_us=200.0),
            bandwidth_gbps=1.0,
        )
        run = run_emulated(SMALL, requests, emulation, seed=weather)
        assert run.tokens == expected, f"weather {weather}"


@pytest.mark.slow
def test_a_slow_prefill_worker_delays_nobody_who_runs() -> None:
    slow = dataclasses.replace(FFN_BOUND, name="slow", launch_us=100_000.0)
    requests = asks(5, 15)
    run = run_emulated(SMALL, requests, dataclasses.replace(EMULATION, profiles={"prefill": slow}))
    assert run.tokens == prescribed(requests)
    prefills = run.log.records("prefill")
    assert len(prefills) == 5
    assert all(span.end_ns - span.start_ns >= 100_000_000 for span in prefills)
    # Prompts come one by one, so requests run alone: on one attention worker, in one microbatch, the others with T_a = 0.
    tokens = [entry.args["tokens"] for entry in run.log.records("entry")]
    assert all(sorted(tokens_A) == [0, 1] for tokens_A in tokens)


@pytest.mark.slow
def test_a_straggler_among_the_ffn_workers_changes_no_token() -> None:
    slow = dataclasses.replace(FFN_BOUND, name="slow", tile_us=300.0)
    requests = asks(6, 4)
    run = run_emulated(SMALL, requests, dataclasses.replace(EMULATION, profiles={"ffn-1": slow}))
    assert run.tokens == prescribed(requests)


@pytest.mark.slow
def test_workers_that_need_not_meet_are_faster_and_give_the_same_tokens() -> None:
    requests = asks(6, 4)
    together = run_emulated(SMALL, requests, EMULATION)
    alone = run_emulated(SMALL, requests, dataclasses.replace(EMULATION, collectives=False))
    assert alone.tokens == together.tokens == prescribed(requests)
    assert alone.elapsed_ns < together.elapsed_ns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "count"),
    [
        (Topology(attention=1, ffn=1, microbatches=1, redundant_slots=0), 3),
        (Topology(attention=3, ffn=2, microbatches=5, redundant_slots=1), 2),
        (Topology(attention=2, ffn=5, microbatches=4, redundant_slots_per_worker=(0, 3, 1, 0, 2), prefill=2), 7),
        (Topology(attention=1, ffn=66, microbatches=1, redundant_slots=1), 1),
    ],
    ids=["all-of-one", "more-microbatches-than-requests", "uneven-slots", "more-workers-than-experts"],
)
def test_shapes(topology: Topology, count: int) -> None:
    requests = asks(count, 5 if topology.ffn < 10 else 2)
    run = run_emulated(dataclasses.replace(SMALL, topology=topology), requests, EMULATION)
    assert run.tokens == prescribed(requests)


@pytest.mark.slow
def test_requests_come_and_go_in_mid_stream() -> None:
    requests = asks(12, 5, apart_us=150.0)
    run = run_emulated(SMALL, requests, EMULATION)
    assert run.tokens == prescribed(requests)
    tokens = [tuple(entry.args["tokens"]) for entry in run.log.records("entry")]
    assert any(0 in tokens_A for tokens_A in tokens)
    assert len(set(tokens)) > 3


# What has no place in a role


class _Fenced(EmulatedWorld):
    """A world whose attention compute is what nobody may call in a role."""

    call: Callable[[], object]

    def compute(self, ctx: RoleContext) -> Compute:
        if ctx.role == "attention":
            type(self).call()
        return super().compute(ctx)


@pytest.mark.parametrize("method", ["add_reader", "getaddrinfo", "subprocess_exec", "add_signal_handler"])
def test_a_role_that_reaches_outside_virtual_time_fails_the_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Escaping(_Fenced):
        @staticmethod
        def call() -> object:
            return getattr(asyncio.get_running_loop(), method)()

    monkeypatch.setattr("afore.serving.virtual.EmulatedWorld", Escaping)
    with pytest.raises(FencedCallError, match=method) as raised:
        run_emulated(SMALL, asks(1))
    assert "attention" in "".join(raised.value.__notes__)
    assert isinstance(raised.value.__context__, RoleLost)


def test_a_role_with_a_defect_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(_Fenced):
        @staticmethod
        def call() -> object:
            raise ZeroDivisionError

    monkeypatch.setattr("afore.serving.virtual.EmulatedWorld", Broken)
    with pytest.raises(ZeroDivisionError):
        run_emulated(SMALL, asks(1))


def test_what_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="policy"):
        run_emulated(dataclasses.replace(SMALL, policy="afor"), [])
    with pytest.raises(ConfigError, match=r"topology\.fabric"):
        run_emulated(RunConfig(topology=Topology(fabric="shm")), [])
    with pytest.raises(ConfigError, match=r"batch\.max_model_len"):
        run_emulated(RunConfig(batch=BatchOptions(max_model_len=10**6)), [])


# What a run tells


@pytest.mark.slow
def test_a_run_takes_no_time_however_long_it_lasts() -> None:
    ages = dataclasses.replace(FFN_BOUND, name="ages", launch_us=30e6)
    patient = dataclasses.replace(SMALL.times, target_s=1e6, step_s=1e6)
    began = time.monotonic()
    run = run_emulated(
        dataclasses.replace(SMALL, times=patient), asks(1, 3), dataclasses.replace(EMULATION, profiles={"ffn": ages})
    )
    assert run.tokens == prescribed(asks(1, 3))
    assert run.elapsed_ns > 100e9 > time.monotonic() - began


@pytest.mark.slow
def test_a_virtual_cluster_can_be_watched_while_it_runs() -> None:
    seen = []

    async def main() -> None:
        async with running_virtual(SMALL, EMULATION) as cluster:

            async def watch() -> None:
                async for plan in cluster.client.plans():
                    seen.append(plan)

            watching = asyncio.create_task(watch())
            await cluster.ask_all(asks(3, 4))
            watching.cancel()
            assert (await cluster.client.stats())["counters"]["targets"] >= len(seen)

    run_virtual(main)
    assert seen
    assert {plan.layer for plan in seen} == {0, 1, 2}


@pytest.mark.slow
def test_spans_of_a_long_unwatched_run_come_in_pieces_and_stay_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SPAN_BATCH", 100)
    sizes: dict[str, list[int]] = {}

    async def main() -> EventLog:
        async with running_virtual(SMALL, EMULATION) as cluster:
            await cluster.ask_all(asks(4, 4))

            async def watch() -> None:
                async for batch in cluster.client.spans():
                    sizes.setdefault(batch.process, []).append(len(batch.spans))

            watching = asyncio.create_task(watch())
            await asyncio.sleep(0.2)
            watching.cancel()
        return cluster.log

    log = run_virtual(main)
    assert max(len(pieces) for pieces in sizes.values()) > 1
    assert max(size for pieces in sizes.values() for size in pieces) == 100
    for process, pieces in sizes.items():
        assert sum(pieces) <= sum(line.startswith(f'["{process}"') for line in log.lines())


@pytest.mark.slow
def test_routing_without_skew_leaves_little_to_move() -> None:
    even = Emulation(spec=EMULATION.spec, profile=FFN_BOUND, routing=RoutingProfile(skew=0.0, drift=0.0))
    requests = asks(6, 4)
    run = run_emulated(SMALL, requests, even)
    skewed = run_emulated(SMALL, requests, EMULATION)
    assert run.tokens == skewed.tokens == prescribed(requests)
    before = [r.stats["imbalance"]["tile"]["before"] for r in (run, skewed)]
    assert before[0] < before[1]


def test_the_log_names_targets_and_tokens() -> None:
    run = run_emulated(SMALL, [Ask(prompt=(1, 2, 3), max_new_tokens=2)], EMULATION)
    tokens = run.log.records("token", "client")
    assert [record.args["token"] for record in tokens] == run.tokens[0]
    assert {record.target for record in run.log.records("attention")} == {Target(layer, 0, 0) for layer in range(3)} | {
        None
    }
    assert len(list(run.log.lines())) == run.log.to_bytes().count(b"\n")
