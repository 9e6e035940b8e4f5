"""Roles that die in virtual time, at any moment: requests end with an error that names the role, and nothing hangs."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from afore.core.errors import AforeError, RoleLost
from afore.core.topology import member_name
from afore.serving.virtual import Ask, running_virtual
from afore.testing import run_virtual
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from tests.serving.faulty_fabric import FaultyFabric, Stalls
from tests.serving.virtual_cases import QUIET, SMALL, asks, prescribed, whatever_comes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole_us() -> float:
    """How long ``asks(8, 6)`` take where nobody dies."""

    async def main() -> float:
        async with running_virtual(SMALL, QUIET) as cluster:
            began_ns = cluster.network.clock.now_ns()
            await cluster.ask_all(asks(8, 6))
            return (cluster.network.clock.now_ns() - began_ns) / 1e3

    return run_virtual(main)


@pytest.mark.parametrize("member", [member_name(*member) for member in SMALL.topology.members()])
def test_a_role_that_dies_at_any_moment_is_named_and_nothing_hangs(member: str, whole_us: float) -> None:
    requests = asks(8, 6)
    expected = prescribed(requests)
    cut_short = 0
    for seed in range(4):
        moment_us = random.Random(f"{member}/{seed}").random() * whole_us

        async def main(moment_us: float = moment_us) -> int:
            async with running_virtual(SMALL, QUIET) as cluster:
                asking = asyncio.create_task(whatever_comes(cluster, requests))
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


def test_a_role_that_stands_still_is_lost_for_everybody_and_stays_the_one_named() -> None:
    """Its channel stands, so only the engine's deadline tells: health, clients and later requests must hear of it too."""

    async def main() -> None:
        weather = Stalls({(1, 6): 1e12})
        async with running_virtual(SMALL, QUIET, make_fabric=partial(FaultyFabric, weather=weather)) as cluster:
            results = await whatever_comes(cluster, asks(8, 6))
            lost = [result for result in results if isinstance(result, BaseException)]
            assert lost
            (named,) = {error.role for error in lost if isinstance(error, RoleLost)}
            words = cluster.client.status.lost
            # Both are late: one waits for the other's share of the step. So both are named.
            assert words.startswith(f"{named}: step ")
            assert "attention-1" in words
            # Whoever waits for that share must not be taken for another cause when its own patience ends.
            await asyncio.sleep(3 * SMALL.times.step_s)
            assert cluster.client.status.lost == words
            assert not cluster.client.status.serving
            with pytest.raises(RoleLost) as refused:
                await cluster.ask(Ask(prompt=(1,), max_new_tokens=1))
            assert refused.value.role == named

    run_virtual(main)


@pytest.mark.parametrize("member", ["ffn-1", "attention-0", "scheduler-0", "prefill-0", "door-0"])
def test_a_role_that_dies_while_the_cluster_comes_up_ends_the_start(member: str) -> None:
    named = 0
    for moment_us in range(1, 60, 7):

        async def main(moment_us: int = moment_us) -> bool:
            networks: list[LoopbackNetwork] = []

            def make_fabric(network: LoopbackNetwork, address: str) -> LoopbackFabric:
                networks.append(network)
                return LoopbackFabric(network, address)

            async def serve_for_ever() -> None:
                async with running_virtual(SMALL, QUIET, make_fabric=make_fabric):
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
