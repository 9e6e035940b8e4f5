"""Clusters on several nodes in virtual time, with the real roles: bad weather over what is mirrored, and no token changes."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable

import pytest

from afore.core.config import BatchOptions
from afore.core.errors import RoleLost
from afore.core.target import Target
from afore.core.topology import Topology
from afore.scheduler.policies.base import Action, Assign, Demand, PolicyContext, Quiet
from afore.serving.virtual import Ask, running_virtual
from afore.testing import run_virtual
from afore.transport.api import Fabric, Lane
from afore.transport.loopback import LoopbackFaults, LoopbackNetwork
from afore.workers.device.ports import Jitter
from tests.serving.faulty_fabric import FaultyFabric, Stalls, Weather
from tests.serving.test_virtual_storms import check, given_up
from tests.serving.virtual_cases import QUIET, SMALL, asks, prescribed, whatever_comes

pytestmark = pytest.mark.slow

TARGET_US = SMALL.times.target_s * 1e6
Place = Callable[[str], str]
PLACES: dict[str, Place] = {
    "experts apart": lambda member: "b" if member.startswith(("ffn", "scheduler")) else "a",
    "scheduler apart": lambda member: "b" if member.startswith("ffn") else "a",
    "scheduler by itself": lambda member: "s" if member.startswith("scheduler") else "b",
    "one attention worker beside the experts": lambda member: (
        "b" if member.startswith("ffn") or member == "attention-1" else "a"
    ),
    "experts on two nodes": lambda member: "c" if member.startswith("ffn") and int(member[4:]) % 2 else "b",
    "everybody by itself": lambda member: member,
}


class Spread:
    """A ``make_fabric``: members on nodes, links under weather."""

    def __init__(self, place: Place, weather: Weather) -> None:
        self._place = place
        self._weather = weather

    def __call__(self, network: LoopbackNetwork, address: str) -> Fabric:
        return FaultyFabric(network, address, self._weather, node=self._place(address))


async def fair(source: str, target: str, lane: Lane, immediate: int | None) -> bool:
    """No weather at all."""
    return True


class Patient(Quiet):
    """Says nothing on demand; on inputs, primaries."""

    name = "patient"
    wants_inputs = True

    def __init__(self, context: PolicyContext) -> None:
        self._demanded: set[Target] = set()

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        self._demanded.add(target)
        return []

    def on_inputs(self, target: Target, now_us: float) -> list[Action]:
        self._demanded.remove(target)
        return [Assign(target, (), skipped="patience")]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once_over_mirrors_changes_no_token(place: Place, seed: int) -> None:
    """Random shapes and policies; stalls that abort targets, lost order, jitter, torn writes, requests that come and go."""
    numbers = random.Random(seed)
    topology = Topology(
        attention=numbers.randint(1, 3),
        ffn=numbers.randint(1, 5),
        microbatches=numbers.choice([1, 2, 3, 8]),
        redundant_slots=numbers.randint(0, 3),
    )
    config = dataclasses.replace(
        SMALL,
        topology=topology,
        policy=numbers.choice(["afore", "afore-plus", "afore-no-overlap", "afore-reactive", "afore-no-prefetch"]),
        batch=BatchOptions(max_num_seqs=numbers.randint(2, 12), block_tokens=4, kv_blocks=numbers.randint(30, 60)),
    )
    emulation = dataclasses.replace(
        QUIET,
        weather=seed,
        latency_us=numbers.choice([0.0, 2.0, 30.0]),
        faults=LoopbackFaults(jitter_us=20.0, overtake=0.3, overtake_us=400.0, torn=0.3, torn_us=50.0),
        jitter=Jitter(compute_us=60.0, copy_us=200.0),
        collectives=numbers.choice([True, False]),
    )
    weather = Stalls(
        {
            (a, n): numbers.choice([numbers.uniform(0.3, 2.5) * TARGET_US, TARGET_US + numbers.uniform(-10, 30)])
            for a in range(topology.attention)
            for n in numbers.sample(range(40), 3)
        }
    )
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
        async with (
            running_virtual(config, emulation, make_fabric=Spread(place, weather)) as cluster,
            asyncio.TaskGroup() as group,
        ):
            for ask in requests[:4]:
                group.create_task(given_up(cluster, ask, numbers.uniform(0, numbers.choice([1_000, 150_000]))))
            for ask in requests[4:]:
                group.create_task(check(cluster, ask))
        cluster.check_stores()

    run_virtual(main, seed=seed)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_policy_hears_of_mirrored_inputs(place: Place) -> None:
    config = dataclasses.replace(SMALL, policy=f"{__name__}:Patient")
    requests = asks(6, 4)

    async def main() -> dict[str, int]:
        async with running_virtual(config, QUIET, make_fabric=Spread(place, fair)) as cluster:
            assert await cluster.ask_all(requests) == prescribed(requests)
            counters: dict[str, int] = (await cluster.client.stats())["counters"]
            return counters

    counters = run_virtual(main)
    assert counters["no_copies: patience"] == counters["targets"] > 0


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("member", ["ffn-0", "ffn-2", "scheduler-0", "attention-1", "prefill-0", "door-0"])
def test_a_role_that_dies_on_any_node_is_named(place: Place, member: str) -> None:
    requests = asks(6, 6)

    async def main() -> None:
        async with running_virtual(SMALL, QUIET, make_fabric=Spread(place, fair)) as cluster:
            asking = asyncio.create_task(whatever_comes(cluster, requests))
            await asyncio.sleep(random.Random(member).uniform(200, 2_000) * 1e-6)
            cluster.kill(member)
            lost = [result for result in await asking if isinstance(result, BaseException)]
            assert lost
            for error in lost:
                assert isinstance(error, RoleLost), error
                assert error.role == member

    run_virtual(main)


def test_the_topology_says_who_is_where_in_one_process_too() -> None:
    nodes = {"a": "door,attention,prefill", "b": "scheduler,ffn"}
    config = dataclasses.replace(SMALL, topology=dataclasses.replace(SMALL.topology, nodes=nodes))

    async def main() -> None:
        async with running_virtual(config, QUIET) as cluster:
            network = cluster.network
            assert {network.nodes[name] for name in ("door-0", "attention-1", "prefill-0")} == {"a"}
            assert {network.nodes[name] for name in ("scheduler-0", "ffn-0", "ffn-2")} == {"b"}
            assert await cluster.ask_all(asks(3, 3)) == prescribed(asks(3, 3))

    run_virtual(main)
