"""Faults in virtual time, with the real roles: late inputs, dead roles, clients that leave, plans that somebody refuses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from functools import partial
from typing import Any

import pytest

from afore.core.config import BatchOptions, RunConfig
from afore.core.errors import AforeError, RoleLost, TransportError
from afore.core.topology import Topology, member_name
from afore.core.trace import Span
from afore.models.emulated import emulated_tokens
from afore.serving.client import Client
from afore.serving.event_log import EventLog
from afore.serving.spec import HUB_ADDRESS
from afore.serving.virtual import Ask, Emulation, VirtualCluster, running_virtual
from afore.testing import run_virtual
from afore.transport.api import Lane
from afore.transport.bells import BellKind, decode
from afore.transport.loopback import LoopbackFabric, LoopbackFaults, LoopbackNetwork
from afore.workers import ffn
from afore.workers.slot_table import SlotState, SlotTable
from tests.serving.faulty_fabric import FaultyFabric, Weather
from tests.serving.virtual_cases import EMULATION, FFN_BOUND, SMOKE, SPEC, asks, prescribed

pytestmark = pytest.mark.slow

CONFIG = dataclasses.replace(
    SMOKE,
    topology=Topology(attention=2, ffn=3, microbatches=3, redundant_slots=2),
    batch=BatchOptions(max_num_seqs=12, block_tokens=4, kv_blocks=30),
)
TARGET_US = CONFIG.times.target_s * 1e6
QUIET = dataclasses.replace(EMULATION, record=False)


# Late inputs


@dataclasses.dataclass
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
    config: RunConfig = CONFIG,
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


class Stalls:
    """Attention workers that stop between their demand and their inputs: the n-th demand of a worker for so many µs."""

    def __init__(self, stalls: dict[tuple[int, int], float]) -> None:
        self.stalls = stalls
        self.demands: dict[str, int] = {}
        self.stalled = 0

    async def __call__(self, source: str, target: str, lane: Lane, immediate: int | None) -> bool:
        if source.startswith("attention") and target == "scheduler-0" and lane is Lane.DEMAND:
            number = self.demands.get(source, 0)
            self.demands[source] = number + 1
            stall_us = self.stalls.get((int(source[-1]), number))
            if stall_us is not None:
                self.stalled += 1
                await asyncio.sleep(stall_us * 1e-6)
        return True


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
    for worker in range(CONFIG.topology.ffn):
        assert len(outcome.log.records("abort", f"ffn-{worker}")) == 1
        assert abort.target not in {span.target for span in outcome.log.records("experts", f"ffn-{worker}")}
    # The step came again under the next number, with the same rows.
    announced = [
        (entry.target.step, entry.args["tokens"])
        for entry in outcome.log.records("entry")
        if entry.target is not None and entry.target.layer == 0 and entry.target.microbatch == abort.target.microbatch
    ]
    assert abort.target.step in {step for step, _ in announced}
    assert abort.target.step + 1 in {step for step, _ in announced}


def test_late_inputs_at_any_time_of_any_worker_change_no_token() -> None:
    requests = asks(6, 4)
    aborts = 0
    for seed in range(12):
        numbers = random.Random(seed)
        stalls = {(a, n): numbers.uniform(0.5, 2.5) * TARGET_US for a in range(2) for n in numbers.sample(range(30), 4)}
        outcome = serve(requests, Stalls(stalls), seed=seed)
        assert outcome.tokens == prescribed(requests), f"seed {seed}"
        assert len(check_aborts(outcome.log)) == outcome.counters.get("aborts", 0)
        aborts += outcome.counters.get("aborts", 0)
    assert aborts > 12


def test_inputs_that_come_just_as_they_are_reported_missing_change_no_token() -> None:
    """Some workers run the target, some skip it; or all run it and it is aborted all the same, its later layers under way."""
    requests = asks(4, 4)
    aborts = ran_all_the_same = 0
    for seed in range(40):
        numbers = random.Random(seed)
        stalls = {(0, numbers.randrange(9)): TARGET_US + numbers.uniform(-10.0, 20.0)}
        # Messages that are slower than the data path let a step go on after its abort.
        faults = LoopbackFaults(jitter_us=5.0, overtake=0.3, overtake_us=400.0)
        emulation = dataclasses.replace(EMULATION, weather=seed, faults=faults)
        outcome = serve(requests, Stalls(stalls), emulation=emulation, seed=seed)
        assert outcome.tokens == prescribed(requests), f"seed {seed}"
        for abort in check_aborts(outcome.log):
            aborts += 1
            ran = [span for span in outcome.log.records("experts") if span.target == abort.target]
            ran_all_the_same += bool(ran)
    assert aborts > 5
    assert ran_all_the_same > 5


@pytest.mark.parametrize("policy", ["static", "afore-no-overlap", "afore-reactive"])
def test_other_policies_survive_aborts(policy: str) -> None:
    requests = asks(6, 4)
    weather = Stalls({(0, 3): 1.5 * TARGET_US, (1, 7): 1.2 * TARGET_US, (1, 15): 2.0 * TARGET_US})
    outcome = serve(requests, weather, config=dataclasses.replace(CONFIG, policy=policy))
    assert outcome.tokens == prescribed(requests)
    assert len(check_aborts(outcome.log)) >= 3


def test_a_lost_bell_costs_time_and_nothing_else() -> None:
    requests = asks(4, 4)
    lost = []

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
        async with running_virtual(CONFIG, QUIET, make_fabric=partial(FaultyFabric, weather=weather)) as cluster:
            results = await ask_whatever_comes(cluster, asks(6, 6))
            lost = [result for result in results if isinstance(result, RoleLost)]
            assert lost
            assert all("attention-1" in error.role and "no report" in error.reason for error in lost)

    run_virtual(main)


# Dead roles


async def ask_whatever_comes(cluster: VirtualCluster, requests: list[Ask]) -> list[list[int] | BaseException]:
    """Tokens, or what each request ended with."""

    async def one(ask: Ask) -> list[int]:
        await asyncio.sleep(ask.at_us * 1e-6)
        return await cluster.ask(ask)

    return await asyncio.gather(*(one(ask) for ask in requests), return_exceptions=True)


def duration_us() -> float:
    """How long ``asks(8, 6)`` take where nobody dies."""

    async def main() -> float:
        async with running_virtual(CONFIG, QUIET) as cluster:
            began_ns = cluster.network.clock.now_ns()
            await cluster.ask_all(asks(8, 6))
            return (cluster.network.clock.now_ns() - began_ns) / 1e3

    return run_virtual(main)


@pytest.mark.parametrize("member", [member_name(*member) for member in CONFIG.topology.members()])
def test_a_role_that_dies_at_any_moment_is_named_and_nothing_hangs(member: str) -> None:
    requests = asks(8, 6)
    expected = prescribed(requests)
    whole_us = duration_us()
    cut_short = 0
    for seed in range(6):
        moment_us = random.Random(f"{member}/{seed}").random() * whole_us

        async def main(moment_us: float = moment_us) -> int:
            async with running_virtual(CONFIG, QUIET) as cluster:
                asking = asyncio.create_task(ask_whatever_comes(cluster, requests))
                await asyncio.sleep(moment_us * 1e-6)
                cluster.kill(member)
                results = await asking
                lost = [result for result in results if isinstance(result, BaseException)]
                for error in lost:
                    assert isinstance(error, RoleLost), error
                    assert error.role == member
                for result, tokens in zip(results, expected, strict=True):
                    assert isinstance(result, BaseException) or result == tokens
                # Later requests are refused in the same words, at once.
                with pytest.raises(RoleLost) as refused:
                    await cluster.ask(Ask(prompt=(1,), max_new_tokens=1))
                if member != "door-0":
                    assert refused.value.role == member
                    assert cluster.client.status.lost.startswith(f"{member}: ")
                    assert not cluster.client.status.serving
                return len(lost)

        cut_short += run_virtual(main, seed=None if seed == 0 else seed)
    assert cut_short > 0, "no request was running at any of the moments"


@pytest.mark.parametrize("member", ["ffn-1", "attention-0", "scheduler-0", "prefill-0", "door-0"])
def test_a_role_that_dies_while_the_cluster_comes_up_ends_the_start(member: str) -> None:
    named = 0
    for moment_us in range(1, 60, 4):

        async def main(moment_us: int = moment_us) -> bool:
            networks: list[LoopbackNetwork] = []

            def make_fabric(network: LoopbackNetwork, address: str) -> LoopbackFabric:
                networks.append(network)
                return LoopbackFabric(network, address)

            async def serve_for_ever() -> None:
                async with running_virtual(CONFIG, QUIET, make_fabric=make_fabric):
                    serving.set()
                    await asyncio.sleep(1e6)

            serving = asyncio.Event()
            task = asyncio.create_task(serve_for_ever())
            await asyncio.sleep(moment_us * 1e-6)
            networks[0].kill(member)
            await asyncio.wait({task}, timeout=10)
            if serving.is_set():
                task.cancel()
                await asyncio.wait({task})
                return False
            assert task.done()
            error = task.exception()
            # One that never reached the hub is missed by the deadline; the door's end is the end of everything.
            assert isinstance(error, AforeError)
            return isinstance(error, RoleLost) and error.role == member

        named += run_virtual(main)
    assert named > 0 or member == "door-0"


# Clients that leave


def test_requests_that_are_left_at_any_moment_give_back_their_cache() -> None:
    """After a storm of cancelled requests and vanished clients every worker's whole cache can be had again."""
    config = dataclasses.replace(CONFIG, batch=BatchOptions(max_num_seqs=12, block_tokens=4, kv_blocks=12))
    whole = config.batch.kv_blocks * config.batch.block_tokens if config.batch.kv_blocks else 0
    for seed in range(12):
        numbers = random.Random(seed)
        requests = [
            Ask(
                prompt=tuple(numbers.randrange(256) for _ in range(numbers.randint(1, 20))),
                max_new_tokens=numbers.randint(1, 12),
                at_us=numbers.uniform(0, 3000),
                leaves_after=numbers.choice([None, 1, 2, 5]),
            )
            for _ in range(24)
        ]
        slow_prefill = dataclasses.replace(FFN_BOUND, name="slow", launch_us=numbers.choice([1.0, 300.0]))
        emulation = dataclasses.replace(EMULATION, profiles={"prefill": slow_prefill})

        async def main(
            requests: list[Ask] = requests, numbers: random.Random = numbers, emulation: Emulation = emulation
        ) -> None:
            async with running_virtual(config, emulation) as cluster:
                clock, network = cluster.network.clock, cluster.network

                async def vanishing(number: int) -> None:
                    """A client of its own, whose process dies."""
                    await clock.sleep_us(numbers.uniform(0, 2000))
                    fabric = LoopbackFabric(network, f"guest-{number}")
                    with contextlib.suppress(RoleLost, TransportError):
                        async with Client.connect(fabric, HUB_ADDRESS, clock, timeout_us=1e6) as client:
                            async for _ in client.submit(tuple(range(1, 9)), max_new_tokens=20):
                                pass

                async def killing(number: int) -> None:
                    await clock.sleep_us(numbers.uniform(2000, 4000))
                    network.kill(f"guest-{number}")

                async def cancelled(ask: Ask) -> None:
                    """A caller that is cancelled from outside, at any moment."""
                    await clock.sleep_us(ask.at_us)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(numbers.uniform(0, 1000) * 1e-6):
                            await cluster.ask(ask)

                async with asyncio.TaskGroup() as group:
                    for number in range(3):
                        group.create_task(vanishing(number))
                        group.create_task(killing(number))
                    for ask in requests[:12]:
                        group.create_task(cancelled(ask))
                    for ask in requests[12:]:
                        group.create_task(check(cluster, ask))
                since_ns = clock.now_ns()
                # Each of these needs every block of a worker, and they run side by side.
                largest = [Ask(prompt=(5, 6, a), max_new_tokens=whole - 3) for a in range(config.topology.attention)]
                tokens = await cluster.ask_all(largest)
                assert tokens == [emulated_tokens(SPEC, a.prompt, a.max_new_tokens, seed=config.seed) for a in largest]
                took_ns = clock.now_ns() - since_ns
                alone_ns = clock.now_ns()
                await cluster.ask(largest[0])
                alone_ns = clock.now_ns() - alone_ns
                assert took_ns < 1.5 * alone_ns, "one after the other: a worker has no room for a whole cache"

        run_virtual(main, seed=seed)


async def check(cluster: VirtualCluster, ask: Ask) -> None:
    """The request's tokens, as far as its client reads, are the prescribed ones."""
    await cluster.network.clock.sleep_us(ask.at_us)
    tokens = await cluster.ask(ask)
    expected = emulated_tokens(SPEC, ask.prompt, ask.max_new_tokens, seed=CONFIG.seed)
    assert tokens == (expected if ask.leaves_after is None else expected[: ask.leaves_after])


# Refused plans


def test_a_worker_whose_slots_are_not_what_the_scheduler_thinks_costs_balance_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables: dict[int, SlotTable] = {}

    def keep(**kwargs: Any) -> SlotTable:
        tables[kwargs["rank"]] = table = SlotTable(**kwargs)
        return table

    monkeypatch.setattr(ffn, "SlotTable", keep)
    requests = asks(8, 8)
    refusals = 0
    for seed in range(6):

        async def main(numbers: random.Random) -> dict[str, Any]:
            async with running_virtual(CONFIG, EMULATION) as cluster:
                serving = asyncio.create_task(cluster.ask_all(requests))
                for _ in range(4):
                    await asyncio.sleep(numbers.uniform(200, 900) * 1e-6)
                    tamper(tables[numbers.randrange(3)], numbers)
                assert await serving == prescribed(requests)
                stats = await cluster.client.stats()
            cluster.check_stores()
            check_recovery(cluster.log, stats["counters"])
            return stats

        stats = run_virtual(partial(main, random.Random(seed)), seed=seed)
        refusals += stats["counters"]["refusals"]
    assert refusals > 6


def tamper(table: SlotTable, numbers: random.Random) -> None:
    """One worker forgets what one of its slots holds (a defect, or a damaged memory)."""
    layer, slot = numbers.randrange(3), numbers.randrange(table.num_slots)
    if table.state(layer, slot)[2] is not SlotState.EMPTY:
        table._slots[layer][slot].generation = 10**6


def check_recovery(log: EventLog, counters: dict[str, int]) -> None:
    """The refused targets ran on primaries, on every worker; later ones of the same layer were accepted with replicas again."""
    refused = {record.args["sequence"]: record.target for record in log.records("refused", "ffn")}
    for sequence in refused:
        workers = [r for r in log.records("refused", "ffn") if r.args["sequence"] == sequence]
        assert len(workers) == CONFIG.topology.ffn
        waits = [wait for wait in log.records("wait", "ffn") if wait.args["sequence"] == sequence]
        assert all(wait.args["slots"] == [] for wait in waits)
    assert counters["refusals"] == len(refused)
    if refused:
        last = max(refused)
        layer = refused[last].layer if refused[last] is not None else -1
        again = [
            entry
            for entry in log.records("entry")
            if entry.args["sequence"] > last
            and entry.target is not None
            and entry.target.layer == layer
            and entry.args["shares"]
        ]
        assert again or last > max(entry.args["sequence"] for entry in log.records("entry")) - 12
