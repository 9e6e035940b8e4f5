"""The same roles in virtual time, with the emulated model: tokens that depend on every cached key, sums that name a lost pair."""

from __future__ import annotations

from typing import Any

import pytest

from afore.core.clock import LoopClock
from afore.core.config import BatchOptions, RunConfig, TimeOptions
from afore.core.target import Target
from afore.core.topology import Topology
from afore.models.emulated import emulated_spec, emulated_tokens
from afore.testing import run_virtual, virtual_now_ns
from afore.workers.emulated_models import EmulatedModels
from tests.workers.attention_rig import Rig, decode_all
from tests.workers.plain_experts import IdentityExperts

SPEC = emulated_spec(num_experts=24, experts_per_token=3, moe_layers=2)
NEW_TOKENS = 12
PROMPTS = [[(7 * i + 3 * j) % 256 for j in range(3 + 11 * i)] for i in range(7)]
SEATS = [(i % 2, i % 3) for i in range(7)]
CONFIG = RunConfig(
    topology=Topology(attention=2, ffn=4, microbatches=3, redundant_slots=0, prefill=2),
    batch=BatchOptions(max_num_seqs=24, block_tokens=4, kv_blocks=60),
    times=TimeOptions(step_s=20, control_s=20),
)


async def decode_in_virtual_time(latency_us: float) -> tuple[list[list[int]], list[Target], int]:
    rig = Rig(
        CONFIG, IdentityExperts(SPEC), clock=LoopClock(), world=EmulatedModels(SPEC, seed=5), latency_us=latency_us
    )
    async with rig:
        tokens = await decode_all(rig, PROMPTS, SEATS, NEW_TOKENS)
        return tokens, rig.targets, virtual_now_ns()


def run(seed: int | None, latency_us: float) -> Any:
    return run_virtual(lambda: decode_in_virtual_time(latency_us), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "latency_us"), [(None, 0), (None, 3), (1, 0), (2, 3), (3, 40)])
def test_every_order_of_events_gives_the_tokens_that_the_model_prescribes(seed: int | None, latency_us: float) -> None:
    tokens, targets, elapsed_ns = run(seed, latency_us)
    assert tokens == [emulated_tokens(SPEC, prompt, NEW_TOKENS, seed=5) for prompt in PROMPTS]
    assert len(targets) == len(set(targets))
    assert elapsed_ns > 0


@pytest.mark.slow
def test_two_runs_are_the_same_to_the_nanosecond() -> None:
    assert run(None, 3) == run(None, 3)
