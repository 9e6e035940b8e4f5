"""Layer by layer over a paged cache, in a batch that requests join and leave: the tokens of ``generate`` at batch 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from afore.models.attention import F32, StepBatch
from afore.models.attention_modules import TransformersAttention, cache_keyword
from afore.models.checkpoint import Checkpoint
from afore.models.families import Family, every_layer
from afore.models.kv import KVLayout, KVStorage
from afore.models.loading import load_dense_model, load_whole_model, verify_checkpoint
from afore.models.local import LocalDecoder, LocalExperts
from afore.models.prefill_modules import TransformersPrefill
from afore.models.reference import Reference, random_checkpoint

EXACT = 1e-4
"""Below this margin the reference itself hangs on the order of float32 sums."""


def mixed_prompts(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, size=int(rng.integers(1, 70))).tolist() for _ in range(count)]


def assert_tokens_equal(
    reference: Reference, decoder: LocalDecoder, prompts: Sequence[Sequence[int]], counts: Sequence[int]
) -> int:
    """Compares; past a difference within the reference's own doubt it goes on teacher-forced. Returns tokens compared."""
    pending = [(list(ids), count) for ids, count in zip(prompts, counts, strict=True)]
    compared = 0
    while pending:
        outputs = decoder.generate([ids for ids, _ in pending], [n for _, n in pending], join_every=2)
        resumed = []
        for (ids, count), ours in zip(pending, outputs, strict=True):
            expected = reference.generate(ids, count)
            difference = reference.first_difference(ids, ours, expected)
            compared += len(expected) if difference is None else difference.position
            if difference is None:
                continue
            assert difference.margin < EXACT, f"prompt of {len(ids)}: {difference}"
            left = count - difference.position - 1
            if left and difference.position + 1 < len(expected):
                resumed.append((list(difference.resume_ids), left))
        pending = resumed
    return compared


@pytest.mark.slow
def test_the_bundled_model_writes_what_generate_writes(
    bundled: Checkpoint, bundled_reference: Reference, prompts_ids: list[list[int]]
) -> None:
    decoder = LocalDecoder.load(bundled)
    prompts = prompts_ids[::2]
    counts = [24 + 3 * (i % 5) for i in range(len(prompts))]
    outputs = decoder.generate(prompts, counts, join_every=2)
    for ids, count, ours in zip(prompts, counts, outputs, strict=True):
        assert ours == bundled_reference.generate(ids, count)
    assert decoder.steps < sum(counts) / 3, "requests ran beside each other"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "config"),
    [
        (0, {}),
        (1, {"n_routed_experts": 15, "num_experts_per_tok": 3, "first_k_dense_replace": 2}),
        (2, {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}),
        (3, {"attention_bias": True, "use_qk_norm": False, "tie_word_embeddings": True, "norm_topk_prob": False}),
        (4, {"first_k_dense_replace": 0, "num_key_value_heads": 1, "num_experts_per_tok": 1}),
    ],
)
def test_random_models_write_what_generate_writes(tmp_path: Path, seed: int, config: dict[str, Any]) -> None:
    path = random_checkpoint(tmp_path, seed=seed, **config)
    with Checkpoint(path) as checkpoint:
        verify_checkpoint(checkpoint)
        decoder = LocalDecoder.load(checkpoint, block_tokens=5)
        prompts = mixed_prompts(8, checkpoint.spec.vocab_size, seed)
    compared = assert_tokens_equal(Reference(path), decoder, prompts, [16] * len(prompts))
    assert compared > 100


@pytest.mark.slow
def test_a_family_of_ones_own_is_a_few_lines(tmp_path: Path) -> None:
    """Without shared experts, softmax routing, another configuration: nothing but an entry in a table."""
    family = Family(model_type="qwen3_moe", title="Mine", moe_layers=every_layer, num_experts="num_experts")
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(str(tmp_path))
    with Checkpoint(tmp_path, families={"qwen3_moe": family}) as checkpoint:
        verify_checkpoint(checkpoint)
        assert not checkpoint.spec.has_shared_experts
        decoder = LocalDecoder.load(checkpoint)
    prompts = mixed_prompts(6, 256, seed=5)
    assert_tokens_equal(Reference(tmp_path), decoder, prompts, [16] * len(prompts))


@pytest.mark.slow
def test_prefill_of_the_bundled_model_equals_transformers_bit_for_bit(
    bundled: Checkpoint, bundled_reference: Reference, prompts_ids: list[list[int]]
) -> None:
    prefill = TransformersPrefill(load_whole_model(bundled))
    for ids in prompts_ids[::8]:
        assert torch.equal(torch.from_numpy(prefill.run(ids).logits_V), bundled_reference.logits(ids))


@pytest.mark.slow
def test_prefill_gives_the_references_logits_and_a_row_does_not_depend_on_its_neighbours(random_model: Path) -> None:
    prompts = mixed_prompts(3, 512, seed=9)
    with Checkpoint(random_model) as checkpoint:
        prefill = TransformersPrefill(load_whole_model(checkpoint))
        layout = KVLayout.for_model(checkpoint.spec, num_blocks=32, block_tokens=8)
        storage = KVStorage.allocate(layout)
        attention = TransformersAttention(load_dense_model(checkpoint), storage)
        experts = LocalExperts(checkpoint)
    reference = Reference(random_model)
    tables = [range(index * 10, index * 10 + 10) for index in range(3)]
    rows = []
    for ids, table in zip(prompts, tables, strict=True):
        prefilled = prefill.run(ids)
        np.testing.assert_allclose(prefilled.logits_V, reference.logits(ids).numpy(), atol=1e-5)
        for offset, data in prefilled.pack(layout, table):
            storage.write(offset, data)
        rows.append((int(prefilled.logits_V.argmax()), len(ids), table))

    def step(chosen: list[tuple[int, int, range]]) -> F32:
        state = attention.begin(StepBatch.of(*map(list, zip(*chosen, strict=True))))
        for layer in attention.layers():
            if layer.moe_ordinal is None:
                attention.dense(state, layer.index)
            else:
                routed = attention.attend(state, layer.moe_ordinal)
                assert routed.ids_TK.dtype == np.int32
                assert routed.hidden_TD.flags.c_contiguous
                assert all(len(set(ids)) == len(ids) for ids in routed.ids_TK.tolist())
                attention.combine(state, layer.moe_ordinal, experts(layer.moe_ordinal, routed))
        return attention.logits(state)

    together = step(rows)
    for index, row in enumerate(rows):
        alone = step([row])[0]
        np.testing.assert_allclose(together[index], alone, atol=1e-4)
        expected = reference.logits([*prompts[index], row[0]])
        np.testing.assert_allclose(alone, expected.numpy(), atol=1e-4)


def test_steps_out_of_order_are_refused(random_model: Path) -> None:
    with Checkpoint(random_model) as checkpoint:
        storage = KVStorage.allocate(KVLayout.for_model(checkpoint.spec, num_blocks=1))
        attention = TransformersAttention(load_dense_model(checkpoint), storage)
    state = attention.begin(StepBatch.of([5], [0], [[0]]))
    with pytest.raises(AssertionError, match="attend this layer first"):
        attention.combine(state, 0, np.zeros((1, 64), dtype=np.float32))
    with pytest.raises(AssertionError, match="layer 1 is sparse"):
        attention.dense(state, 1)
    attention.attend(state, 0)
    with pytest.raises(AssertionError, match="combine the previous layer first"):
        attention.attend(state, 1)


class AsOfToday:
    def forward(self, hidden_states: object, cache: object = None, **kwargs: object) -> None: ...


class AsOfLastYear:
    def forward(self, hidden_states: object, past_key_values: object = None, cache_position: object = None) -> None: ...


class WithoutCache:
    def forward(self, hidden_states: object) -> None: ...


def test_the_caches_keyword_follows_the_installed_release() -> None:
    assert cache_keyword(AsOfToday()) == "cache"
    assert cache_keyword(AsOfLastYear()) == "past_key_values"
    with pytest.raises(AssertionError, match="takes no cache"):
        cache_keyword(WithoutCache())
