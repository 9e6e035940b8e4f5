"""Clients that leave, plans that somebody refuses, and everything at once: in virtual time, with the real roles."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from functools import partial
from typing import Any

import pytest

from afore.core.config import BatchOptions
from afore.core.errors import RoleLost, TransportError
from afore.core.topology import Topology
from afore.models.emulated import emulated_tokens
from afore.serving.client import Client
from afore.serving.event_log import EventLog
from afore.serving.spec import HUB_ADDRESS
from afore.serving.virtual import Ask, Emulation, VirtualCluster, running_virtual
from afore.testing import run_virtual
from afore.transport.loopback import LoopbackFabric, LoopbackFaults
from afore.workers import ffn_epoch
from afore.workers.device.ports import Jitter
from afore.workers.slot_table import SlotState, SlotTable
from tests.serving.faulty_fabric import FaultyFabric, Stalls
from tests.serving.virtual_cases import EMULATION, FFN_BOUND, QUIET, SMALL, SPEC, asks, prescribed

pytestmark = pytest.mark.slow

TARGET_US = SMALL.times.target_s * 1e6


# Clients that leave


def test_requests_that_are_left_at_any_moment_give_back_their_cache() -> None:
    """After a storm of cancelled requests and vanished clients every worker's whole cache can be had again."""
    blocks, block_tokens = 8, 4
    batch = BatchOptions(max_num_seqs=12, block_tokens=block_tokens, kv_blocks=blocks)
    config = dataclasses.replace(SMALL, batch=batch)
    for seed in range(4):
        numbers = random.Random(seed)
        requests = [
            Ask(
                prompt=tuple(numbers.randrange(256) for _ in range(numbers.randint(1, 20))),
                max_new_tokens=numbers.randint(1, 12),
                at_us=numbers.uniform(0, 3000),
                leaves_after=numbers.choice([None, 1, 2, 5]),
            )
            for _ in range(16)
        ]
        slow_prefill = dataclasses.replace(FFN_BOUND, name="slow", launch_us=numbers.choice([1.0, 300.0]))
        emulation = dataclasses.replace(QUIET, profiles={"prefill": slow_prefill})

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

                async with asyncio.TaskGroup() as group:
                    for number in range(3):
                        group.create_task(vanishing(number))
                        group.create_task(killing(number))
                    for ask in requests[:8]:
                        group.create_task(given_up(cluster, ask, numbers.uniform(0, 1000)))
                    for ask in requests[8:]:
                        group.create_task(check(cluster, ask))
                # Nobody owes anybody an answer: no deadline of any request fires.
                await clock.sleep_us(3 * config.times.step_s * 1e6)
                assert cluster.client.status.lost == ""
                since_ns = clock.now_ns()
                # Each of these needs every block of a worker, and they run side by side.
                whole = blocks * block_tokens
                largest = [Ask(prompt=(5, 6, a), max_new_tokens=whole - 3) for a in range(config.topology.attention)]
                tokens = await cluster.ask_all(largest)
                assert tokens == [emulated_tokens(SPEC, a.prompt, a.max_new_tokens, seed=config.seed) for a in largest]
                took_ns = clock.now_ns() - since_ns
                alone_ns = clock.now_ns()
                await cluster.ask(largest[0])
                alone_ns = clock.now_ns() - alone_ns
                assert took_ns < 1.5 * alone_ns, "one after the other: a worker has no room for a whole cache"

        run_virtual(main, seed=seed)


async def given_up(cluster: VirtualCluster, ask: Ask, patience_us: float) -> None:
    """A caller that is cancelled from outside, at any moment."""
    await cluster.network.clock.sleep_us(ask.at_us)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_us * 1e-6):
            await cluster.ask(ask)


async def check(cluster: VirtualCluster, ask: Ask) -> None:
    """The request's tokens, as far as its client reads, are the prescribed ones."""
    await cluster.network.clock.sleep_us(ask.at_us)
    tokens = await cluster.ask(ask)
    expected = emulated_tokens(SPEC, ask.prompt, ask.max_new_tokens, seed=SMALL.seed)
    assert tokens == (expected if ask.leaves_after is None else expected[: ask.leaves_after])


# Refused plans


def test_a_worker_whose_slots_are_not_what_the_scheduler_thinks_costs_balance_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables: dict[int, SlotTable] = {}

    def keep(**kwargs: Any) -> SlotTable:
        tables[kwargs["rank"]] = table = SlotTable(**kwargs)
        return table

    monkeypatch.setattr(ffn_epoch, "SlotTable", keep)
    requests = asks(8, 8)
    refusals = 0
    for seed in range(5):

        async def main(numbers: random.Random) -> dict[str, Any]:
            async with running_virtual(SMALL, EMULATION) as cluster:
                serving = asyncio.create_task(cluster.ask_all(requests))
                for _ in range(8):
                    await asyncio.sleep(numbers.uniform(100, 500) * 1e-6)
                    tamper(tables[numbers.randrange(3)], numbers)
                assert await serving == prescribed(requests)
                stats = await cluster.client.stats()
            cluster.check_stores()
            check_recovery(cluster.log, stats["counters"])
            return stats

        stats = run_virtual(partial(main, random.Random(seed)), seed=seed)
        refusals += stats["counters"]["refusals"]
    assert refusals > 4


def tamper(table: SlotTable, numbers: random.Random) -> None:
    """One worker forgets what one of its slots holds (a defect, or a damaged memory)."""
    if table.num_slots == 0:
        return
    layer, slot = numbers.randrange(3), numbers.randrange(table.num_slots)
    if table.state(layer, slot)[2] is not SlotState.EMPTY:
        table._slots[layer][slot].generation = 10**6


def check_recovery(log: EventLog, counters: dict[str, int]) -> None:
    """Refused targets ran on primaries, on every worker; behind them their layer's replicas were used again."""
    entries = [entry for entry in log.records("entry") if entry.target is not None]
    refused = {record.args["sequence"]: record.target for record in log.records("refused", "ffn")}
    assert counters["refusals"] == len(refused)
    for sequence, target in refused.items():
        assert len([r for r in log.records("refused", "ffn") if r.target == target]) == SMALL.topology.ffn
        waits = [wait for wait in log.records("wait", "ffn") if wait.args["sequence"] == sequence]
        assert len(waits) == SMALL.topology.ffn
        assert all(wait.args["slots"] == [] for wait in waits)
        later = [
            entry
            for entry in entries
            if entry.args["sequence"] > sequence and entry.target and target and entry.target.layer == target.layer
        ]
        accepted = [entry for entry in later if entry.args["shares"] and entry.args["sequence"] not in refused]
        assert accepted or len(later) < 4, f"after sequence {sequence} the layer never used a replica again"


# Everything at once


@pytest.mark.parametrize("seed", range(8))
def test_everything_at_once_changes_no_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random shapes and policies; stalls, lost order, jitter, damaged slot tables, requests that come, go and are cancelled."""
    numbers = random.Random(seed)
    tables: dict[int, SlotTable] = {}

    def keep(**kwargs: Any) -> SlotTable:
        tables[kwargs["rank"]] = table = SlotTable(**kwargs)
        return table

    monkeypatch.setattr(ffn_epoch, "SlotTable", keep)
    topology = Topology(
        attention=numbers.randint(1, 3),
        ffn=numbers.randint(1, 4),
        microbatches=numbers.randint(1, 4),
        redundant_slots=numbers.randint(0, 3),
        prefill=numbers.randint(1, 2),
    )
    config = dataclasses.replace(
        SMALL,
        topology=topology,
        policy=numbers.choice(["afore", "afore", "afore-no-overlap", "afore-reactive", "afore-no-prefetch"]),
        batch=BatchOptions(
            max_num_seqs=numbers.randint(2, 12),
            block_tokens=numbers.choice([1, 4, 16]),
            kv_blocks=numbers.randint(30, 60),
        ),
    )
    emulation = dataclasses.replace(
        QUIET,
        weather=seed,
        latency_us=numbers.choice([0.0, 2.0, 30.0]),
        faults=LoopbackFaults(jitter_us=20.0, overtake=0.3, overtake_us=400.0, torn=0.3, torn_us=50.0),
        jitter=Jitter(compute_us=60.0, copy_us=200.0),
    )
    stalls = {
        (a, n): numbers.choice([numbers.uniform(0.3, 2.5) * TARGET_US, TARGET_US + numbers.uniform(-10, 30)])
        for a in range(topology.attention)
        for n in numbers.sample(range(40), 3)
    }
    requests = [
        Ask(
            prompt=tuple(numbers.randrange(256) for _ in range(numbers.randint(1, 15))),
            max_new_tokens=numbers.randint(1, 10),
            at_us=numbers.uniform(0, numbers.choice([4_000, 200_000])),
            leaves_after=numbers.choice([None, None, None, 1, 2, 5]),
        )
        for _ in range(14)
    ]

    async def main() -> None:
        make_fabric = partial(FaultyFabric, weather=Stalls(stalls))
        async with running_virtual(config, emulation, make_fabric=make_fabric) as cluster:

            async def tampering() -> None:
                for _ in range(5):
                    await asyncio.sleep(numbers.uniform(200, numbers.choice([1_500, 50_000])) * 1e-6)
                    tamper(tables[numbers.randrange(topology.ffn)], numbers)

            async with asyncio.TaskGroup() as group:
                for ask in requests[:4]:
                    patience_us = numbers.uniform(0, numbers.choice([1_000, 150_000]))
                    group.create_task(given_up(cluster, ask, patience_us))
                for ask in requests[4:]:
                    group.create_task(check(cluster, ask))
                group.create_task(tampering())
        cluster.check_stores()

    run_virtual(main, seed=seed)
