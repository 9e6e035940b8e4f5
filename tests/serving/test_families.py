"""Every family through the whole cluster, in one process, while the planner moves its experts: the tokens of ``generate``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from afore import Cluster, RunConfig, Topology
from afore.core.config import BatchOptions, DeviceOptions
from afore.core.errors import ConfigError
from afore.models.families import FAMILIES
from afore.models.fused_forms import KernelChoice
from afore.models.random_families import random_family_checkpoint
from afore.models.reference import Reference
from tests.serving.exact import MARGIN, differences
from tests.serving.test_token_exact import MOVING, coming_and_going

PROMPTS = [[1, *range(5, 5 + 4 * n + 1)] for n in range(7)]
COUNTS = [14 - n for n in range(7)]
SHAPE = Topology(attention=2, ffn=3, microbatches=2, redundant_slots=2)
BATCH = BatchOptions(max_num_seqs=6, block_tokens=4)


PATHS: dict[str, tuple[KernelChoice, ...]] = {
    **dict.fromkeys(FAMILIES, ("fused",)),
    # These cannot run fused; the module path of two that can is the reference of the others'.
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "gpt_oss"), ("auto",)),
    **dict.fromkeys(("dots1", "qwen2_moe"), ("fused", "modules")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "kernels"), [(model_type, kernels) for model_type in PATHS for kernels in PATHS[model_type]]
)
async def test_a_family_in_a_cluster_that_moves_its_experts(
    tmp_path: Path, model_type: str, kernels: KernelChoice, record_property: Callable[[str, object], None]
) -> None:
    """Prompts and outputs are longer than the small models' windows."""
    model = random_family_checkpoint(tmp_path, model_type, seed=7)
    config = dataclasses.replace(MOVING, batch=BATCH, kernels=kernels)
    async with Cluster.start(SHAPE, inproc=True, config=config, model=model) as cluster:
        ours = await coming_and_going(cluster, PROMPTS, COUNTS)
        stats = await cluster.stats()
    found = differences(Reference(model), PROMPTS, ours, COUNTS)
    record_property("differences", [str(difference) for _, difference in found])
    record_property("copies", stats["migration"]["copies"])
    assert all(difference.margin < MARGIN for _, difference in found)
    assert stats["migration"]["copies"] > 0
    assert stats["counters"]["replica_pairs"] > 0


@pytest.mark.slow
async def test_kernels_that_a_family_cannot_run_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model = random_family_checkpoint(tmp_path, "gpt_oss", seed=7)
    with pytest.raises(ConfigError, match="sinks"):
        async with Cluster.start(SHAPE, inproc=True, config=RunConfig(kernels="fused"), model=model):
            pass


@pytest.mark.slow
@pytest.mark.processes
async def test_experts_with_biases_in_real_processes(tmp_path: Path) -> None:
    """Peers map each other's stores: everything that belongs to an expert lies where its owner put it, byte for byte."""
    model = random_family_checkpoint(tmp_path, "gpt_oss", seed=8)
    config = dataclasses.replace(MOVING, batch=BATCH, device=DeviceOptions(verify_copies=True))
    async with Cluster.start(SHAPE, config=config, model=model) as cluster:
        ours = await coming_and_going(cluster, PROMPTS, COUNTS)
        stats = await cluster.stats()
    assert all(difference.margin < MARGIN for _, difference in differences(Reference(model), PROMPTS, ours, COUNTS))
    assert stats["migration"]["copies"] > 0
    assert stats["counters"]["replica_pairs"] > 0
