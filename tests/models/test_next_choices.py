"""The next layer's gate on this layer's rows: what Libra's predictions come from, on every path."""

from __future__ import annotations

import numpy as np
import pytest

from afore.models.attention import AttentionModel, StepBatch
from afore.models.attention_fused import FusedAttention
from afore.models.attention_modules import TransformersAttention
from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint
from afore.models.emulated import EmulatedAttention, RoutingProfile, emulated_spec
from afore.models.fused_weights import take_weights
from afore.models.kv import KVLayout, KVStorage
from afore.models.loading import LoadedModel, load_dense_model

BATCH = StepBatch.of([5, 17, 40], [0, 0, 0], [[0], [1], [2]])


def bundled() -> LoadedModel:
    """Its second MoE layer has the gate of the first, and so on."""
    with Checkpoint(bundled_model_path()) as checkpoint:
        loaded = load_dense_model(checkpoint)
    gates = [loaded.module.model.layers[index].mlp.gate for index in loaded.spec.moe_layers]
    for gate in gates[1:]:
        gate.load_state_dict(gates[0].state_dict())
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("path", ["modules", "fused"])
def test_the_same_gate_chooses_the_same_experts_for_the_same_rows(path: str) -> None:
    loaded = bundled()
    storage = KVStorage.allocate(KVLayout.for_model(loaded.spec, num_blocks=3, block_tokens=4))
    model: AttentionModel = (
        TransformersAttention(loaded, storage) if path == "modules" else FusedAttention(take_weights(loaded), storage)
    )
    state = model.begin(BATCH)
    assert loaded.spec.num_moe_layers > 1
    for layer in model.layers():
        if layer.moe_ordinal is None:
            model.dense(state, layer.index)
            continue
        routed = model.attend(state, layer.moe_ordinal)
        chosen_TK, weights_TK = routed.ids_TK.copy(), routed.weights_TK.copy()
        if layer.moe_ordinal + 1 < loaded.spec.num_moe_layers:
            guess_TK = model.next_choices(state, layer.moe_ordinal)
            assert np.array_equal(np.sort(guess_TK, axis=1), np.sort(chosen_TK, axis=1))
        # What is on its way to the experts stays what it was.
        assert np.array_equal(routed.ids_TK, chosen_TK)
        assert np.array_equal(routed.weights_TK, weights_TK)
        model.combine(state, layer.moe_ordinal, np.zeros_like(routed.hidden_TD))


@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_the_emulated_gate_is_as_accurate_as_it_says(accuracy: float) -> None:
    spec = emulated_spec(num_experts=32, experts_per_token=4, moe_layers=2)
    storage = KVStorage.allocate(KVLayout.for_model(spec, num_blocks=500, block_tokens=1))
    model = EmulatedAttention(spec, storage, routing=RoutingProfile(next_gate_accuracy=accuracy))
    batch = StepBatch.of(list(range(200)) * 2 + list(range(100)), [0] * 500, [[n] for n in range(500)])
    state = model.begin(batch)
    model.dense(state, 0)
    first = model.attend(state, 0)
    guess_TK = model.next_choices(state, 0)
    assert np.array_equal(guess_TK, model.next_choices(state, 0))
    model.combine(state, 0, state.expected_TD)  # type: ignore[arg-type]
    true_TK = model.attend(state, 1).ids_TK
    assert all(len(set(row)) == 4 for row in guess_TK.tolist())
    right = np.mean([len(set(g) & set(t)) / 4 for g, t in zip(guess_TK.tolist(), true_TK.tolist(), strict=True)])
    assert abs(float(right) - accuracy) < 0.05
    assert not np.array_equal(first.ids_TK, true_TK)


def test_with_as_many_choices_as_experts_every_guess_is_right() -> None:
    spec = emulated_spec(num_experts=2, experts_per_token=2, moe_layers=2)
    storage = KVStorage.allocate(KVLayout.for_model(spec, num_blocks=3, block_tokens=4))
    model = EmulatedAttention(spec, storage, routing=RoutingProfile(next_gate_accuracy=0.0))
    state = model.begin(BATCH)
    model.dense(state, 0)
    model.attend(state, 0)
    assert np.array_equal(np.sort(model.next_choices(state, 0), axis=1), [[0, 1]] * 3)
