from __future__ import annotations

import pytest
import torch

from afore.models.budget import memory_budget
from afore.models.checkpoint import Checkpoint
from afore.models.kv import KVLayout
from afore.models.loading import load_dense_model, load_whole_model


def nbytes(module: torch.nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in module.state_dict(keep_vars=True).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_budget_is_what_loading_takes(random_model: object, dtype: torch.dtype) -> None:
    with Checkpoint(str(random_model)) as checkpoint:
        layout = KVLayout.for_model(checkpoint.spec, num_blocks=10)
        budget = memory_budget(
            checkpoint,
            primaries_per_worker=(6, 5, 5),
            slots_per_worker=(2, 0, 1),
            kv_layout=layout,
            dense_dtype=dtype,
            expert_dtype=dtype,
        )
        assert checkpoint.tensors_read == 0, "said before anything is loaded"
        assert budget.attention_weights == nbytes(load_dense_model(checkpoint, dtype).module)
        assert budget.prefill_weights == nbytes(load_whole_model(checkpoint, dtype).module)
    expert = 3 * 32 * 64 * dtype.itemsize
    assert budget.ffn_weights_N == (8 * 3 * expert, 5 * 3 * expert, 6 * 3 * expert)
    assert budget.attention == budget.attention_weights + layout.nbytes


def test_tied_embeddings_count_once(bundled: Checkpoint) -> None:
    layout = KVLayout.for_model(bundled.spec, num_blocks=1)
    budget = memory_budget(bundled, primaries_per_worker=(128,), slots_per_worker=(0,), kv_layout=layout)
    parameters = load_whole_model(bundled).module.parameters()
    gates = 3 * 128 * 4
    assert budget.prefill_weights == sum(p.numel() * 4 for p in parameters) + gates
