"""The promise that matters most: tokens equal transformers' greedy decoding *while the planner moves experts*."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from afore import Cluster, RunConfig, Topology
from afore.cluster import complete_all
from afore.core.config import BatchOptions, CostOptions, DeviceOptions, PlannerOptions
from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.reference import Reference, random_checkpoint
from afore.models.tokenizer import Tokenizer
from tests.serving.exact import MARGIN, differences

MOVING = RunConfig(
    planner=PlannerOptions(tile_tokens=1),
    costs=CostOptions(tile_us=100.0, copy_us=1.0, window_us=10_000.0, adapt=False),
    device=DeviceOptions(threads=False),
)
"""Small tiles, dear compute, cheap copies: the planner moves experts for nearly every target."""


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(bundled_model_path())


def prompts_of(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """``count`` prompts: the bundled ones, then their second halves."""
    whole = [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()]
    halves = [ids[len(ids) // 2 :] for ids in whole]
    return (whole + halves)[:count]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["afore", "static"])
async def test_64_prompts_of_the_bundled_model_in_one_process(policy: str, reference: Reference) -> None:
    prompts = prompts_of(Tokenizer(bundled_model_path()), 64)
    config = dataclasses.replace(MOVING, policy=policy)
    async with Cluster.start(Topology(), inproc=True, config=config) as cluster:
        outputs = await complete_all(cluster, prompts, max_new_tokens=16)
        stats = await cluster.stats()
    ours = [[token.id for token in tokens] for tokens in outputs]
    assert differences(reference, prompts, ours, [16] * 64) == []
    if policy == "static":
        assert stats["migration"]["copies"] == 0
        assert stats["counters"].get("replica_pairs", 0) == 0
    else:
        assert stats["migration"]["copies"] > 0
        assert stats["counters"]["replica_pairs"] > 0
        assert stats["imbalance"]["tile"]["after"] < stats["imbalance"]["tile"]["before"]


@pytest.mark.slow
@pytest.mark.processes
async def test_64_prompts_of_the_bundled_model_in_real_processes(reference: Reference) -> None:
    prompts = prompts_of(Tokenizer(bundled_model_path()), 64)
    async with Cluster.start(Topology(), config=dataclasses.replace(MOVING, device=DeviceOptions())) as cluster:
        outputs = await complete_all(cluster, prompts, max_new_tokens=24)
        stats = await cluster.stats()
    ours = [[token.id for token in tokens] for tokens in outputs]
    assert differences(reference, prompts, ours, [24] * 64) == []
    assert stats["migration"]["copies"] > 0
    assert stats["counters"]["replica_pairs"] > 0


AXES = {
    "attention": (1, 2, 3),
    "ffn": (1, 2, 3, 5, 7),
    "microbatches": (1, 2, 3),
    "redundant_slots": (0, 1, 3),
    "experts": (4, 10, 16),
}


def pairwise(axes: dict[str, tuple[int, ...]]) -> list[dict[str, int]]:
    """Few combinations that hold every pair of values of every two axes: greedy, deterministic."""
    names = list(axes)
    combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]

    def pairs(one: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, one[a], b, one[b]) for a, b in itertools.combinations(names, 2)}

    open_pairs = set().union(*(pairs(one) for one in combinations))
    chosen = []
    while open_pairs:
        best = max(combinations, key=lambda one: len(pairs(one) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One random checkpoint for each number of experts."""
    return {
        experts: random_checkpoint(
            tmp_path_factory.mktemp(f"random-{experts}"),
            seed=experts,
            n_routed_experts=experts,
            num_experts_per_tok=3,
            num_hidden_layers=3,
        )
        for experts in AXES["experts"]
    }


PROMPTS = [[1, *range(5, 5 + 3 * n + 1)] for n in range(7)]
COUNTS = [2 + 3 * n for n in range(7)]


async def coming_and_going(cluster: Cluster, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """The outputs, while requests join and leave in mid-stream: every second one starts when the last but one is half done, and
    each is accompanied by a request that is given up after two tokens. Steps in which workers have no tokens are many.
    """
    ours: list[list[int]] = [[] for _ in prompts]
    halfway = [asyncio.Event() for _ in prompts]

    async def one(index: int) -> None:
        if index % 2 == 0 and index >= 2:
            await halfway[index - 2].wait()
        async for token in cluster.generate(prompts[index], max_new_tokens=counts[index]):
            ours[index].append(token.id)
            if 2 * len(ours[index]) >= counts[index]:
                halfway[index].set()
        halfway[index].set()

    async def given_up(index: int) -> None:
        async for token in cluster.generate(prompts[index][:3], max_new_tokens=50, ignore_eos=True):
            if token.index == 1:
                break

    await asyncio.gather(*(f(index) for index in range(len(prompts)) for f in (one, given_up)))
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(AXES), ids=lambda case: "-".join(map(str, case.values())))
async def test_random_models_over_pairwise_shapes(
    case: dict[str, int], random_models: dict[int, Path], record_property: Callable[[str, object], None]
) -> None:
    topology = Topology(
        attention=case["attention"],
        ffn=case["ffn"],
        microbatches=case["microbatches"],
        redundant_slots=case["redundant_slots"],
    )
    model = random_models[case["experts"]]
    prompts, counts = PROMPTS, COUNTS
    config = dataclasses.replace(MOVING, batch=BatchOptions(max_num_seqs=6, block_tokens=4))
    async with Cluster.start(topology, inproc=True, config=config, model=model) as cluster:
        ours = await coming_and_going(cluster, prompts, counts)
        stats = await cluster.stats()
    found = differences(Reference(model), prompts, ours, counts)
    record_property("differences", [str(difference) for _, difference in found])
    record_property("copies", stats["migration"]["copies"])
    assert all(difference.margin < MARGIN for _, difference in found)
    assert stats["counters"]["targets"] > 0


PROCESS_CASES = (
    Topology(attention=2, ffn=3, microbatches=2, redundant_slots=2),
    Topology(attention=3, ffn=5, prefill=2, microbatches=3, redundant_slots_per_worker=(2, 0, 1, 1, 3)),
    Topology(attention=1, ffn=1, microbatches=1, redundant_slots=0),
)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("topology", "experts"), list(zip(PROCESS_CASES, (10, 4, 16), strict=True)))
async def test_random_models_in_real_processes(
    topology: Topology, experts: int, random_models: dict[int, Path], record_property: Callable[[str, object], None]
) -> None:
    model = random_models[experts]
    config = dataclasses.replace(MOVING, batch=BatchOptions(max_num_seqs=6, block_tokens=4), device=DeviceOptions())
    async with Cluster.start(topology, config=config, model=model) as cluster:
        ours = await coming_and_going(cluster, PROMPTS, COUNTS)
        stats = await cluster.stats()
    found = differences(Reference(model), PROMPTS, ours, COUNTS)
    record_property("differences", [str(difference) for _, difference in found])
    assert all(difference.margin < MARGIN for _, difference in found)
    if topology.ffn > 1:
        assert stats["migration"]["copies"] > 0
        assert stats["counters"]["replica_pairs"] > 0
