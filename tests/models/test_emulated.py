from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.demand import DemandVector, count_demand
from afore.models.attention import F32, Routed, StepBatch
from afore.models.emulated import (
    EmulatedAttention,
    EmulatedPrefill,
    RoutingProfile,
    emulated_spec,
    emulated_tokens,
    routed_sum,
)
from afore.models.kv import BlockAllocator, KVLayout, KVStorage

Corrupt = Callable[[F32], None]


def decode(
    prompts: list[list[int]], count: int, *, seed: int = 0, skip_blocks: int = 0, corrupt: Corrupt | None = None
) -> list[list[int]]:
    """A little engine: prefill, then steps of all requests together."""
    spec = emulated_spec()
    layout = KVLayout.for_model(spec, num_blocks=256, block_tokens=4)
    storage = KVStorage.allocate(layout)
    attention, prefill = EmulatedAttention(spec, storage, seed=seed), EmulatedPrefill(spec, seed=seed)
    allocator = BlockAllocator(256)
    outputs, tables = [], []
    for ids in prompts:
        prefilled = prefill.run(ids)
        blocks = allocator.allocate(layout.blocks_for(len(ids) + count))[::-1]
        for offset, data in prefilled.pack(layout, blocks)[skip_blocks:]:
            storage.write(offset, data)
        outputs.append([int(prefilled.logits_V.argmax())])
        tables.append(blocks)
    for _ in range(count - 1):
        positions = [len(ids) + len(out) - 1 for ids, out in zip(prompts, outputs, strict=True)]
        state = attention.begin(StepBatch.of([out[-1] for out in outputs], positions, tables))
        for layer in attention.layers():
            if layer.moe_ordinal is None:
                attention.dense(state, layer.index)
                continue
            out_TD = routed_sum(attention.attend(state, layer.moe_ordinal))
            if corrupt is not None:
                corrupt(out_TD)
            attention.combine(state, layer.moe_ordinal, out_TD)
        for out, logits_V in zip(outputs, attention.logits(state), strict=True):
            out.append(int(logits_V.argmax()))
    return outputs


PROMPTS = [[1, 2, 3], [250], list(range(30))]


def test_tokens_are_what_the_plain_recurrence_says() -> None:
    spec = emulated_spec()
    assert decode(PROMPTS, 12, seed=4) == [emulated_tokens(spec, ids, 12, seed=4) for ids in PROMPTS]
    assert decode(PROMPTS, 12, seed=5) != decode(PROMPTS, 12, seed=4)


def test_a_block_that_was_not_written_changes_the_tokens() -> None:
    assert decode(PROMPTS, 12, skip_blocks=1) != decode(PROMPTS, 12)


def double_a_row(out_TD: F32) -> None:
    out_TD[1] *= 2


def lose_a_share(out_TD: F32) -> None:
    out_TD[2] *= 0.999


def swap_rows(out_TD: F32) -> None:
    out_TD[[0, 1]] = out_TD[[1, 0]]


@pytest.mark.parametrize("corrupt", [double_a_row, lose_a_share, swap_rows])
def test_a_wrong_sum_is_named(corrupt: Corrupt) -> None:
    with pytest.raises(AssertionError, match=r"MoE layer 0: \d of 3 rows are wrong"):
        decode(PROMPTS, 3, corrupt=corrupt)


def test_an_expert_that_computes_with_anothers_weights_is_noticed() -> None:
    """Every pair, wherever it is: the smallest weight times the smallest change must show."""
    spec = emulated_spec()
    storage = KVStorage.allocate(KVLayout.for_model(spec, num_blocks=8))
    attention = EmulatedAttention(spec, storage)
    for k in range(spec.experts_per_token):
        state = attention.begin(StepBatch.of([7], [0], [[0]]))
        routed = attention.attend(state, 0)
        wrong_ids_TK = routed.ids_TK.copy()
        wrong_ids_TK[0, k] = (wrong_ids_TK[0, k] + 32) % 64
        with pytest.raises(AssertionError, match="rows are wrong"):
            attention.combine(state, 0, routed_sum(Routed(routed.hidden_TD, wrong_ids_TK, routed.weights_TK)))


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 3000)), min_size=1, max_size=9), st.integers(0, 2**40))
def test_ids_are_distinct_and_weights_sum_to_one(rows: list[tuple[int, int]], seed: int) -> None:
    spec = emulated_spec()
    storage = KVStorage.allocate(KVLayout.for_model(spec, num_blocks=200))
    attention = EmulatedAttention(spec, storage, seed=seed)
    tokens, positions = map(list, zip(*rows, strict=True))
    routed = attention.attend(attention.begin(StepBatch.of(tokens, positions, [range(200)] * len(rows))), 1)
    assert routed.ids_TK.dtype == np.int32
    assert routed.weights_TK.dtype == routed.hidden_TD.dtype == np.float32
    assert ((routed.ids_TK >= 0) & (routed.ids_TK < spec.num_experts)).all()
    assert all(len(set(ids)) == spec.experts_per_token for ids in routed.ids_TK.tolist())
    np.testing.assert_allclose(routed.weights_TK.sum(axis=1), 1.0, rtol=1e-5)
    assert (routed.weights_TK > 0).all()


def demand(profile: RoutingProfile, position: int, layer: int = 0) -> DemandVector:
    spec = emulated_spec(num_experts=128, experts_per_token=8)
    storage = KVStorage.allocate(KVLayout.for_model(spec, num_blocks=256))
    attention = EmulatedAttention(spec, storage, routing=profile)
    batch = StepBatch.of(list(range(256)), [position] * 256, [range(256)] * 256)
    routed = attention.attend(attention.begin(batch), layer)
    return count_demand(routed.ids_TK, 128)


def test_routing_is_skewed_as_asked_for_and_layers_differ() -> None:
    uniform = demand(RoutingProfile(skew=0.0, drift=0.0), 0)
    skewed = demand(RoutingProfile(skew=1.0, drift=0.0), 0)
    assert uniform.max() / uniform.mean() < 2.0
    assert skewed.max() / skewed.mean() > 3.0
    other = demand(RoutingProfile(skew=1.0, drift=0.0), 0, layer=1)
    assert np.corrcoef(skewed, other)[0, 1] < 0.5


def test_popular_experts_drift_with_the_position() -> None:
    profile = RoutingProfile(skew=0.5, drift=1.5, drift_positions=256.0)
    start, near, far = (demand(profile, position) for position in (0, 8, 128))
    assert np.corrcoef(start, near)[0, 1] > np.corrcoef(start, far)[0, 1] + 0.3


@pytest.mark.slow
def test_nothing_depends_on_the_process() -> None:
    code = (
        "from afore.models.emulated import emulated_spec, emulated_tokens;"
        "print(emulated_tokens(emulated_spec(), [1, 2, 3], 8, seed=11))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, text=True, env={"PYTHONHASHSEED": hash_seed}
        ).stdout
        for hash_seed in ("0", "12345")
    ]
    assert outputs[0] == outputs[1] == f"{emulated_tokens(emulated_spec(), [1, 2, 3], 8, seed=11)}\n"


@pytest.mark.slow
def test_virtual_time_does_not_import_transformers() -> None:
    code = "import sys, afore.models.emulated; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
