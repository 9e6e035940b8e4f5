"""The baselines in the running system: same tokens, placement of their own, and predictions only where somebody asked for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from afore import Cluster, RunConfig, Topology
from afore.cluster import complete_all
from afore.core.config import CostOptions, DeviceOptions, PlannerOptions
from afore.core.policy_options import EplbOptions, HarmoenyOptions, LibraOptions, LinaOptions, PolicyOptions
from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from afore.scheduler.policies.base import Action, Assign, Demand
from afore.scheduler.policies.static import Static
from afore.serving.virtual import EmulatedRun, run_emulated
from tests.serving.exact import differences
from tests.serving.virtual_cases import QUIET, SMOKE, asks, prescribed

OFTEN = PolicyOptions(
    eplb=EplbOptions(window_steps=4, interval_steps=6),
    harmoeny=HarmoenyOptions(min_tokens=1),
)
"""Rebalancing every few steps, and moves however small: test runs are short and their microbatches too."""
CASES = {
    "eplb": OFTEN,
    "eplb stop": dataclasses.replace(OFTEN, eplb=dataclasses.replace(OFTEN.eplb, mode="stop")),
    "eplb-redistribute": OFTEN,
    "harmoeny": OFTEN,
    "harmoeny kept": dataclasses.replace(OFTEN, harmoeny=HarmoenyOptions(min_tokens=1, reuse=True, start="now")),
    "lina": OFTEN,
    "lina replan": dataclasses.replace(OFTEN, lina=LinaOptions(replan=True)),
    "libra": OFTEN,
    "libra kept": dataclasses.replace(OFTEN, libra=LibraOptions(reuse=True)),
}
"""By policy and what is special about its options."""
CONFIG = RunConfig(
    planner=PlannerOptions(tile_tokens=1),
    costs=CostOptions(tile_us=100.0, copy_us=1.0, window_us=10_000.0, adapt=False),
    device=DeviceOptions(threads=False, verify_copies=True),
)


def configured(case: str, base: RunConfig) -> RunConfig:
    return dataclasses.replace(base, policy=case.split()[0], policy_options=CASES[case])


@pytest.fixture(scope="module")
def expected() -> tuple[Reference, list[list[int]]]:
    tokenizer = Tokenizer(bundled_model_path())
    return Reference(bundled_model_path()), [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()][:10]


async def check_tokens(config: RunConfig, expected: tuple[Reference, list[list[int]]], **where: Any) -> None:
    """Token-exact, with pairs on replicas and no answer of the policy refused."""
    reference, prompts = expected
    async with Cluster.start(Topology(), config=config, **where) as cluster:
        outputs = await complete_all(cluster, prompts, max_new_tokens=16)
        stats = await cluster.stats()
    ours = [[token.id for token in tokens] for tokens in outputs]
    assert differences(reference, prompts, ours, [16] * len(prompts)) == []
    counters = stats["counters"]
    assert counters["replica_pairs"] > 0
    assert stats["migration"]["copies"] > 0
    assert not counters.keys() & {"policy_errors", "plan_errors"}
    assert counters["refusals"] == 0
    assert ("predictions" in counters) == (config.policy in ("lina", "libra"))


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
async def test_the_bundled_model_is_token_exact_in_one_process(
    case: str, expected: tuple[Reference, list[list[int]]]
) -> None:
    await check_tokens(configured(case, CONFIG), expected, inproc=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("case", ["eplb", "eplb-redistribute", "harmoeny", "lina", "libra"])
async def test_and_in_real_processes(case: str, expected: tuple[Reference, list[list[int]]]) -> None:
    await check_tokens(configured(case, dataclasses.replace(CONFIG, device=DeviceOptions())), expected)


# Virtual time: 8 FFN workers, 3 MoE layers, M = 3, any order of simultaneous events, every read of a slot checked


def emulated(case: str, seed: int | None = None) -> EmulatedRun:
    return run_emulated(configured(case, SMOKE), asks(new_tokens=8), QUIET, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_virtual_time_gives_the_prescribed_tokens(case: str) -> None:
    run = emulated(case, seed=sorted(CASES).index(case))
    assert run.tokens == prescribed(asks(new_tokens=8))
    counters = run.stats["counters"]
    assert counters["replica_pairs"] > 0
    assert not counters.keys() & {"policy_errors", "plan_errors"}
    assert counters["refusals"] == 0
    tile = run.stats["imbalance"]["tile"]
    assert tile["after"] < tile["before"]


@pytest.mark.slow
def test_every_target_but_the_first_layers_is_predicted() -> None:
    counters = emulated("libra").stats["counters"]
    assert counters["predictions"] == counters["targets"] // 3 * 2
    assert counters["no_copies: libra: nothing was predicted for it"] == counters["targets"] // 3


class AnswersTooMuch(Static):
    """Assigns on a prediction."""

    name = "answers-too-much"
    wants_predictions = "transitions"

    def on_prediction(self, target: Any, predicted_E: Demand, now_us: float) -> list[Action]:
        return [Assign(target, ())]


@pytest.mark.slow
def test_an_assignment_on_a_prediction_is_a_mistake_and_costs_no_answer() -> None:
    config = dataclasses.replace(SMOKE, policy=f"{__name__}:{AnswersTooMuch.__name__}")
    run = run_emulated(config, asks(), QUIET)
    assert run.tokens == prescribed(asks())
    counters = run.stats["counters"]
    assert counters["policy_errors"] == counters["predictions"] > 0
