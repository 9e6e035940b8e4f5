"""The fused path against the module path, call by call, over the same inputs: hidden rows, weights, experts, logits.

Distances are the largest difference over the largest value of the module path's array; 1e-5 is the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from afore.models.attention import LayerKind, Routed, StepBatch
from afore.models.attention_fused import FusedAttention, FusedState
from afore.models.attention_modules import ModulesState, TransformersAttention
from afore.models.checkpoint import Checkpoint
from afore.models.families import FAMILIES
from afore.models.fused_forms import why_not_fused
from afore.models.fused_weights import take_weights
from afore.models.kv import KVLayout, KVStorage
from afore.models.loading import load_dense_model
from afore.models.local import LocalExperts
from afore.models.random_families import random_family_checkpoint
from tests.models.test_families import FUSED

F32 = npt.NDArray[np.float32]
CLOSE = 1e-5
BLOCK_TOKENS = 4
BLOCKS_EACH = 8


def distance(ours: F32, theirs: F32) -> float:
    """The largest difference in units of the largest value."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@dataclass(slots=True)
class Step:
    """One step in flight on both paths."""

    theirs: ModulesState
    ours: FusedState
    layers: Iterator[LayerKind]


class Pair:
    """Both paths of one model over caches of their own."""

    def __init__(self, path: Path, requests: int) -> None:
        with Checkpoint(path) as checkpoint:
            self.experts = LocalExperts(checkpoint)
            self.spec = checkpoint.spec
            loaded = load_dense_model(checkpoint)
        layout = KVLayout.for_model(self.spec, num_blocks=requests * BLOCKS_EACH, block_tokens=BLOCK_TOKENS)
        self.ours_cache, self.theirs_cache = KVStorage.allocate(layout), KVStorage.allocate(layout)
        # The same modules serve both: joining their matrices must not change what they compute.
        self.ours = FusedAttention(take_weights(loaded), self.ours_cache)
        self.theirs = TransformersAttention(loaded, self.theirs_cache)
        self.rng = np.random.default_rng(11)
        blocks = self.rng.permutation(requests * BLOCKS_EACH)
        self.tables = blocks.reshape(requests, BLOCKS_EACH).astype(np.int32)
        self.positions = np.zeros(requests, dtype=np.int64)
        self.ties = 0

    def begin(self, requests: npt.NDArray[np.int64]) -> Step:
        tokens = self.rng.integers(3, self.spec.vocab_size, len(requests))
        batch = StepBatch(tokens, self.positions[requests], self.tables[requests])
        self.positions[requests] += 1
        return Step(self.theirs.begin(batch), self.ours.begin(batch), iter(self.theirs.layers()))

    def layer(self, step: Step) -> bool:
        """The next layer of a step on both paths, or its logits; true after those."""
        kind = next(step.layers, None)
        if kind is None:
            assert distance(self.ours.logits(step.ours), self.theirs.logits(step.theirs)) < CLOSE
            return True
        if kind.moe_ordinal is None:
            self.theirs.dense(step.theirs, kind.index)
            self.ours.dense(step.ours, kind.index)
            return False
        theirs, ours = self.theirs.attend(step.theirs, kind.moe_ordinal), self.ours.attend(step.ours, kind.moe_ordinal)
        self.compare(ours, theirs)
        self.compare_next(step, kind.moe_ordinal)
        routed = self.experts(kind.moe_ordinal, theirs)
        self.theirs.combine(step.theirs, kind.moe_ordinal, routed)
        self.ours.combine(step.ours, kind.moe_ordinal, routed)
        return False

    def compare_next(self, step: Step, moe_ordinal: int) -> None:
        """What the next gate would choose; asking changes nothing, or the layers after would differ."""
        if moe_ordinal + 1 == self.spec.num_moe_layers:
            return
        ours_TK = self.ours.next_choices(step.ours, moe_ordinal)
        theirs_TK = self.theirs.next_choices(step.theirs, moe_ordinal)
        assert ours_TK.dtype == theirs_TK.dtype == np.int32
        for mine, his in zip(ours_TK.tolist(), theirs_TK.tolist(), strict=True):
            assert len(set(mine)) == len(mine) == len(his)
            self.ties += len(set(mine) - set(his))

    def compare(self, ours: Routed, theirs: Routed) -> None:
        assert distance(ours.hidden_TD, theirs.hidden_TD) < CLOSE
        assert ours.ids_TK.dtype == np.int32
        assert all(array.flags.c_contiguous for array in (ours.hidden_TD, ours.ids_TK, ours.weights_TK))
        for ids, weights, their_ids, their_weights in zip(
            ours.ids_TK, ours.weights_TK, theirs.ids_TK, theirs.weights_TK, strict=True
        ):
            mine = dict(zip(ids.tolist(), weights.tolist(), strict=True))
            his = dict(zip(their_ids.tolist(), their_weights.tolist(), strict=True))
            assert len(mine) == len(his), "distinct experts"
            for expert in mine.keys() & his.keys():
                assert abs(mine[expert] - his[expert]) < CLOSE * max(map(abs, his.values()))
            self.ties += len(mine.keys() - his.keys())


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    def make(model_type: str, requests: int, **config: Any) -> Pair:
        directory = tmp_path_factory.mktemp(model_type)
        return Pair(random_family_checkpoint(directory, model_type, seed=5, **config), requests)

    return make


Maker = Callable[..., Pair]


def test_the_families_that_run_fused_are_those_that_are_tested() -> None:
    assert set(FUSED) <= set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FUSED)
def test_a_family_over_mixed_lengths_and_batch_sizes(pair_of: Maker, model_type: str) -> None:
    """Steps of 1 to 64 rows, and of more, which BLAS multiplies; lengths from 1 to 24, well past the small models' windows."""
    pair = pair_of(model_type, 70)
    for rows in (1, 2, 3, 8, 17, 64, 33, *[12] * 20, 64, 70):
        requests = pair.rng.permutation(12 if rows == 12 else 70)[:rows]
        step = pair.begin(requests)
        while not pair.layer(step):
            pass
    assert pair.positions.max() > 20
    assert pair.ties == 0, "this seed has no ties"
    for ours, theirs in zip(pair.ours_cache.planes, pair.theirs_cache.planes, strict=True):
        for part in range(2):
            torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen2_moe", "phimoe"])
def test_microbatches_interleave_layer_by_layer(pair_of: Maker, model_type: str) -> None:
    """Four microbatches at different layers; one that grows the buffers begins while the others are under way."""
    pair = pair_of(model_type, 60)
    groups = [np.arange(0, 5), np.arange(5, 6), np.arange(6, 14), np.arange(14, 60)]
    for _ in range(4):
        waiting, running = list(groups), [pair.begin(groups[0])]
        waiting.pop(0)
        while running:
            at = int(pair.rng.integers(len(running)))
            if pair.layer(running[at]):
                running.pop(at)
            if waiting and pair.rng.random() < 0.5:
                running.append(pair.begin(waiting.pop(0)))
            if waiting and not running:
                running.append(pair.begin(waiting.pop(0)))
        assert not waiting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
        ("glm4_moe", {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
        ("dots1", {"attention_bias": True, "n_group": 2, "topk_group": 1}),
        ("ernie4_5_moe", {"use_bias": True}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_norm_min": 0.9}),
        ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
        ("qwen2_moe", {"qkv_bias": False, "tie_word_embeddings": True}),
        ("olmoe", {"clip_qkv": None, "attention_bias": True, "num_key_value_heads": 4}),
        ("mixtral", {"sliding_window": None, "num_key_value_heads": 1}),
        ("phimoe", {"attention_bias": False, "lm_head_bias": False}),
        (
            "qwen3_moe",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        ("minimax_m2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_a_configuration_can_turn_on_and_off(pair_of: Maker, model_type: str, config: dict[str, Any]) -> None:
    pair = pair_of(model_type, 3, **config)
    for _ in range(20):
        step = pair.begin(np.arange(3))
        while not pair.layer(step):
            pass
    assert pair.ties == 0, "this seed has no ties"


@pytest.mark.slow
def test_a_step_that_is_given_up_disturbs_nobody(pair_of: Maker) -> None:
    pair = pair_of("dots1", 4)
    for _ in range(6):
        abandoned = pair.ours.begin(StepBatch.of([5, 6], [0, 0], pair.tables[2:].tolist()))
        pair.ours.dense(abandoned, 0)
        step = pair.begin(np.arange(2))
        pair.ours.attend(abandoned, 0)
        while not pair.layer(step):
            pass


@pytest.mark.slow
def test_what_leaves_for_the_experts_stays_until_combine(pair_of: Maker) -> None:
    """Another microbatch's whole layer in between changes nothing, and a read-only sum is taken as well."""
    pair = pair_of("mixtral", 4)
    first = pair.ours.begin(StepBatch.of([5, 6], [0, 0], pair.tables[:2].tolist()))
    second = pair.ours.begin(StepBatch.of([7, 8], [0, 0], pair.tables[2:].tolist()))
    routed = pair.ours.attend(first, 0)
    kept = [array.copy() for array in (routed.hidden_TD, routed.ids_TK, routed.weights_TK)]
    other = pair.ours.attend(second, 0)
    zero = np.zeros_like(other.hidden_TD)
    zero.flags.writeable = False
    pair.ours.combine(second, 0, zero)
    pair.ours.attend(second, 1)
    for before, after in zip(kept, (routed.hidden_TD, routed.ids_TK, routed.weights_TK), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.slow
def test_calls_out_of_turn_and_blocks_that_do_not_exist_are_refused(pair_of: Maker) -> None:
    model = pair_of("mixtral", 1).ours
    for position, blocks in ((0, [BLOCKS_EACH]), (0, [-1]), (BLOCK_TOKENS, [0]), (-1, [0])):
        with pytest.raises(AssertionError, match="positions"):
            model.begin(StepBatch.of([5], [position], [blocks]))
    padded = model.begin(StepBatch.of([5], [0], [[0, -1, 999]]))
    assert padded.next_layer == 0, "blocks behind the last are anything"
    state = model.begin(StepBatch.of([5], [0], [[0]]))
    with pytest.raises(AssertionError, match="layer 0's turn"):
        model.attend(state, 1)
    routed = model.attend(state, 0)
    with pytest.raises(AssertionError, match="combine the previous layer first"):
        model.attend(state, 1)
    model.combine(state, 0, np.zeros_like(routed.hidden_TD))
    with pytest.raises(AssertionError, match="attend this layer first"):
        model.combine(state, 0, np.zeros_like(routed.hidden_TD))
    with pytest.raises(AssertionError, match="layer 1 has not been computed"):
        model.logits(state)


@pytest.mark.slow
def test_joined_matrices_are_held_once(tmp_path: Path) -> None:
    path = random_family_checkpoint(tmp_path, "qwen2_moe", seed=1)
    with Checkpoint(path) as checkpoint:
        assert why_not_fused(checkpoint.family, checkpoint.config) is None
        loaded = load_dense_model(checkpoint)
    names = {name for name, _ in loaded.module.named_parameters()}
    before = {name: tensor.clone() for name, tensor in loaded.module.state_dict().items()}
    weights = take_weights(loaded)
    assert {name for name, _ in loaded.module.named_parameters()} == names
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.module.state_dict().items())
    attention = loaded.module.model.layers[0].self_attn
    joined = weights.layers[0].qkv.torch_XD.untyped_storage().data_ptr()
    assert {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)} == {
        joined
    }
