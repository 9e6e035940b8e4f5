"""Clusters whose members are on several nodes, where no memory is shared: the same tokens, and refusals by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

import pytest

from afore import Cluster, RunConfig, Topology
from afore.cluster import complete_all
from afore.core.clock import WallClock
from afore.core.config import CostOptions, DeviceOptions, PlannerOptions
from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.fused_kernels import compile_fused_kernels
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from afore.scheduler.policies.registry import policy_kernels
from afore.serving.inproc import running_members
from afore.serving.roles import RealWorld
from afore.transport.api import Fabric
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.workers.kernels import compile_kernels
from tests.serving.exact import differences

MOVING = RunConfig(
    planner=PlannerOptions(tile_tokens=1),
    costs=CostOptions(tile_us=100.0, copy_us=1.0, window_us=10_000.0, adapt=False),
    device=DeviceOptions(threads=False),
)
PLACES: dict[str, Callable[[str], str]] = {
    "experts apart": lambda member: "b" if member.startswith(("ffn", "scheduler")) else "a",
    "one attention worker beside the experts": lambda member: (
        "b" if member.startswith(("ffn", "scheduler")) or member == "attention-1" else "a"
    ),
    "experts on two nodes": lambda member: "c" if member in ("ffn-1", "attention-1") else "b",
    "everybody alone": lambda member: member,
    "scheduler apart": lambda member: "b" if member.startswith("ffn") else "a",
    "scheduler by itself": lambda member: "s" if member.startswith("scheduler") else "b",
    "every attention worker by itself": lambda member: "b" if member.startswith(("ffn", "scheduler")) else member,
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compiled before anybody joins: on a machine that never did, a role would stand still longer than others wait for it."""
    for compile_group in (*policy_kernels("afore"), compile_kernels, compile_fused_kernels):
        compile_group()


@contextlib.asynccontextmanager
async def on_nodes(config: RunConfig, place: Callable[[str], str]) -> AsyncIterator[Cluster]:
    """A cluster in this process whose members cannot map memory of other nodes."""

    def make(network: LoopbackNetwork, address: str) -> Fabric:
        return LoopbackFabric(network, address, node=place(address))

    clock = WallClock()
    members = running_members(config, clock, LoopbackNetwork(clock), RealWorld(), make_fabric=make)
    async with members as (client, _):
        yield Cluster(client, config, clock)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
async def test_tokens_are_the_same_where_attention_and_experts_share_no_memory(place: Callable[[str], str]) -> None:
    tokenizer = Tokenizer(bundled_model_path())
    prompts = [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()][:12]
    async with on_nodes(dataclasses.replace(MOVING, topology=Topology(attention=2, ffn=3)), place) as cluster:
        outputs = await complete_all(cluster, prompts, max_new_tokens=12)
        stats = await cluster.stats()
    ours = [[token.id for token in tokens] for tokens in outputs]
    assert differences(Reference(bundled_model_path()), prompts, ours, [12] * len(prompts)) == []
    assert stats["migration"]["copies"] > 0
    assert stats["counters"]["replica_pairs"] > 0
