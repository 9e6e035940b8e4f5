"""Demand of the evaluation: a pure function of its seed, as skewed as it says, and always routable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.slots import contiguous_primaries
from afore.tools.evaluate.demand import STATIC_IMBALANCE, WORKLOADS, DriftingDemand, Workload, prompt_lengths


def source(name: str = "chat", *, seed: int = 0, imbalance: float = STATIC_IMBALANCE, steps: int = 0) -> DriftingDemand:
    return DriftingDemand(
        WORKLOADS[name],
        num_layers=6,
        num_experts=64,
        experts_per_token=4,
        seed=seed,
        imbalance=imbalance,
        crc_steps=steps,
    )


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(1, 40),
    attention=st.integers(0, 7),
    microbatch=st.integers(0, 3),
    step=st.integers(0, 30),
    imbalance=st.sampled_from([1.0, 1.7, 4.0]),
)
def test_each_layer_routes_every_token(
    tokens: int, attention: int, microbatch: int, step: int, imbalance: float
) -> None:
    counts_LE = source(imbalance=imbalance).counts(attention, microbatch, step, tokens)
    assert counts_LE.shape == (6, 64)
    assert counts_LE.sum(axis=1).tolist() == [tokens * 4] * 6
    assert counts_LE.min() >= 0
    assert counts_LE.max() <= tokens


@pytest.mark.slow
def test_answers_do_not_depend_on_what_was_asked_before() -> None:
    asked = [(a, m, s) for a in range(2) for m in range(2) for s in (5, 0, 3, 9)]
    fresh = {one: source().counts(*one, 20) for one in asked}
    one_source = source(steps=20)
    for one in (*asked, *reversed(asked)):
        assert np.array_equal(one_source.counts(*one, 20), fresh[one])
    forth, back = source(steps=20), source(steps=20)
    for one in asked:
        forth.counts(*one, 20)
    for one in reversed(asked):
        back.counts(*one, 20)
    assert forth.crc == back.crc != 0


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_the_static_imbalance_is_the_papers(workload: Workload) -> None:
    primaries_E = np.asarray(contiguous_primaries(128, 8))
    found = []
    # One seed is one model, whose experts may happen to lie well.
    for seed in range(1, 4):
        demand = DriftingDemand(workload, num_layers=45, num_experts=128, experts_per_token=8, seed=seed)
        for step in range(0, 12, 3):
            counts_LE = demand.counts(0, 1, step, 2000)
            loads_LN = np.stack([counts_LE[:, primaries_E == w].sum(axis=1) for w in range(8)], axis=1)
            found.append((loads_LN.max(axis=1) / loads_LN.mean(axis=1)).mean())
    assert np.mean(found) == pytest.approx(STATIC_IMBALANCE, abs=0.12)


def test_uniform_routing_is_uniform() -> None:
    counts_LE = source(imbalance=1.0).counts(0, 0, 0, 4000)
    assert counts_LE.min() > 0.75 * counts_LE.mean()
    assert counts_LE.max() < 1.25 * counts_LE.mean()


def test_seeds_and_workloads_differ() -> None:
    first = source().counts(0, 0, 0, 50)
    assert not np.array_equal(first, source(seed=1).counts(0, 0, 0, 50))
    assert not np.array_equal(first, source("math").counts(0, 0, 0, 50))


def test_prompts_have_the_workloads_median() -> None:
    for workload in WORKLOADS.values():
        lengths = prompt_lengths(workload, 2001, seed=3, most=4096)
        assert lengths == prompt_lengths(workload, 2001, seed=3, most=4096)
        assert all(1 <= length <= 4096 for length in lengths)
        assert np.median(lengths) == pytest.approx(workload.prompt_tokens, rel=0.1)
