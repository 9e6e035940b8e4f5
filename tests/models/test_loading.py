from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from afore.models.checkpoint import Checkpoint
from afore.models.loading import LoadedModel, dense_shapes, load_dense_model, load_whole_model
from afore.models.reference import random_checkpoint


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def same(ours: LoadedModel, theirs: dict[str, torch.Tensor]) -> None:
    mine = ours.module.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


@pytest.fixture
def quiet_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports the multi-token-prediction layer that it leaves out."""
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_tensors_equal_transformers_bit_for_bit(
    bundled: Checkpoint, random_model: Path, dtype: torch.dtype, quiet_transformers: None
) -> None:
    for path in (bundled.path, random_model):
        theirs = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True)
        with Checkpoint(path) as checkpoint:
            whole, dense = load_whole_model(checkpoint, dtype), load_dense_model(checkpoint, dtype)
        same(whole, theirs.state_dict())
        same(dense, {name: tensor for name, tensor in theirs.state_dict().items() if not is_expert(name)})
        rotary = theirs.model.rotary_emb.inv_freq
        assert torch.equal(dense.module.model.rotary_emb.inv_freq, rotary)
        assert torch.equal(whole.module.model.rotary_emb.inv_freq, rotary)


def test_each_role_reads_only_its_tensors(random_model: Path) -> None:
    with Checkpoint(random_model) as checkpoint:
        dense = {name for name in checkpoint.names if not is_expert(name) and not name.startswith("model.layers.4.")}
        load_dense_model(checkpoint)
        assert checkpoint.tensors_read == len(dense) == len(dense_shapes(checkpoint))
        checkpoint.tensors_read = 0
        load_whole_model(checkpoint)
        assert checkpoint.tensors_read == len(dense) + 3 * 16 * 3, "and every routed expert once"


def test_router_and_correction_bias_stay_float32(tmp_path: Path) -> None:
    with Checkpoint(random_checkpoint(tmp_path, dtype=torch.bfloat16)) as checkpoint:
        module = load_dense_model(checkpoint, torch.bfloat16).module
    gate = module.model.layers[1].mlp.gate
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    assert not torch.equal(gate.weight, gate.weight.to(torch.bfloat16).float()), "not rounded on the way either"
    assert module.model.layers[1].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_tied_embeddings_share_memory_and_untied_ones_do_not(bundled: Checkpoint, random_model: Path) -> None:
    tied = load_dense_model(bundled).module
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    with Checkpoint(random_model) as checkpoint:
        untied = load_dense_model(checkpoint).module
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_nothing_of_a_loaded_model_points_into_the_files(tmp_path: Path) -> None:
    """A checkpoint that is replaced while it is served must not change the model under it."""
    path = random_checkpoint(tmp_path)
    with Checkpoint(path) as checkpoint:
        module = load_dense_model(checkpoint).module
    before = module.model.embed_tokens.weight.clone()
    file = path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(bytes(file.stat().st_size // 2))
        handle.seek(4096)
        handle.write(bytes(file.stat().st_size // 2 - 4096))
    assert torch.equal(module.model.embed_tokens.weight, before)
    assert before.abs().sum() > 0
