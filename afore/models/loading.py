"""Building a model's modules without reading more than they need.

The module is built on the meta device (no memory), then every tensor is read by name into it. Equal, bit for bit, to what
``transformers`` loads; the routed experts are left out for attention workers and read in for prefill workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from afore.core.errors import CheckpointError
from afore.models.checkpoint import COPY_AGAIN, Checkpoint, ExpertReader
from afore.models.config import ModelSpec
from afore.models.families import Family


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A ``transformers`` causal language model with what AFORE knows about it."""

    module: Any
    """``…ForCausalLM`` in eval mode, without gradients."""
    spec: ModelSpec
    family: Family


def dense_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes by name on disk of everything but the routed experts; tied weights appear once."""
    module = _build_without_experts(checkpoint)
    return {checkpoint.family.disk_name(n): tuple(t.shape) for n, t in _own_tensors(module).items()}


def verify_checkpoint(checkpoint: Checkpoint) -> None:
    """Refuses, with one line, a checkpoint that could not be loaded or would answer wrongly. Reads headers only.

    Raises ``CheckpointError``.
    """
    checkpoint.verify(dense_shapes(checkpoint), optional=_tied_names(checkpoint))


def load_dense_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Loads everything but the routed experts: what an attention worker needs. Raises ``CheckpointError``.

    The router and its correction bias stay float32 in every ``dtype``.
    """
    module = _build_without_experts(checkpoint)
    _fill(module, checkpoint, dtype)
    return LoadedModel(module, checkpoint.spec, checkpoint.family)


def load_whole_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Loads the model with all routed experts: what a prefill worker needs. Raises ``CheckpointError``."""
    module = _build_without_experts(checkpoint)
    _fill(module, checkpoint, dtype)
    family = checkpoint.family
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(checkpoint.config)
    for ordinal, layer_index in enumerate(checkpoint.spec.moe_layers):
        experts = whole.model.layers[layer_index].get_submodule(family.experts)
        if family.expert_files.fused:
            prefix = f"model.layers.{layer_index}.{family.experts}."
            read = {name: checkpoint.read(family.disk_name(prefix + name)) for name in experts.state_dict()}
        else:
            read = _fused_experts(checkpoint, ordinal, dtype)
        for name, tensor in read.items():
            assert getattr(experts, name).shape == tensor.shape, "this family fuses its experts in another way"
            setattr(experts, name, nn.Parameter(tensor.to(dtype, copy=family.expert_files.fused), requires_grad=False))
        experts.eval()
        module.model.layers[layer_index].set_submodule(family.experts, experts)
    _assert_loaded(module)
    return LoadedModel(module, checkpoint.spec, checkpoint.family)


def _fused_experts(checkpoint: Checkpoint, ordinal: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A MoE layer's experts as the module holds them: gate_up_proj [E, 2I, D] and down_proj [E, D, I]."""
    reader, num_experts = ExpertReader(checkpoint), checkpoint.spec.num_experts
    gate_up_EFD = torch.empty((num_experts, *reader.gate_up_shape), dtype=dtype)
    down_EDI = torch.empty((num_experts, *reader.down_shape), dtype=dtype)
    for expert in range(num_experts):
        reader.read_expert(ordinal, expert, gate_up_EFD[expert], down_EDI[expert])
    return {"gate_up_proj": gate_up_EFD, "down_proj": down_EDI}


def _build_without_experts(checkpoint: Checkpoint) -> Any:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(checkpoint.config)
    for layer_index in checkpoint.spec.moe_layers:
        module.model.layers[layer_index].set_submodule(checkpoint.family.experts, nn.Module())
    return module


def _tied_names(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of the output matrix that a checkpoint with tied embeddings need not hold."""
    return frozenset({"lm_head.weight"}) if checkpoint.config.tie_word_embeddings else frozenset()


def _own_tensors(module: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, without what is tied to another of them."""
    tied = {"lm_head.weight"} if module.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def _fill(module: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    family = checkpoint.family
    read: dict[str, torch.Tensor] = {}
    for name, wanted in _own_tensors(module).items():
        tensor = checkpoint.read(family.disk_name(name))
        if tensor.shape != wanted.shape:
            raise CheckpointError(
                str(checkpoint.path), f"{name} has shape {tuple(tensor.shape)}, not {tuple(wanted.shape)}", COPY_AGAIN
            )
        # clone: what safetensors returns in the file's own dtype would stay a view of the mapped file
        read[name] = tensor.to(torch.float32 if name.endswith(family.keep_float32) else dtype, copy=True)
    result = module.load_state_dict(read, strict=False, assign=True)
    assert not result.unexpected_keys, result.unexpected_keys
    # Its tables are not in the state dictionary, so they would stay on the meta device.
    module.model.rotary_emb = type(module.model.rotary_emb)(config=checkpoint.config)
    module.tie_weights()
    module.eval()
    module.requires_grad_(False)
    _assert_loaded(module)


def _assert_loaded(module: Any) -> None:
    left = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    assert not left, f"left on the meta device: {left[:5]}"
