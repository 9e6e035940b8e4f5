"""The matrices of a loaded model, as the fused path multiplies with them: side by side where they share an input.

Nothing is held twice: the modules' own parameters become views of the joined matrices, so that they still compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from afore.models.families import Family, gated_shared_expert, no_shared_experts, summed_shared_experts
from afore.models.fused_forms import GateForm, fused_form, why_not_fused
from afore.models.fused_paged import NO_WINDOW
from afore.models.fused_product import Matrix
from afore.models.loading import LoadedModel

F32 = npt.NDArray[np.float32]
NONE: F32 = np.zeros(0, dtype=np.float32)
"""Stands for a bias, norm or gate that a layer does not have."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm where it has a bias."""

    weight_D: F32
    bias_D: F32
    eps: np.float32


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate x) * up x), with gate and up side by side."""

    gate_up: Matrix
    gate_up_bias_F: F32
    down: Matrix
    down_bias_D: F32
    gate_D: F32
    """Multiplies the result with sigmoid(gate · x); empty where nothing does."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A router that the gate kernel computes."""

    weight: Matrix
    bias_E: F32
    """Added to the scores for the choice alone; empty where there is none."""
    form: GateForm


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    input_norm: Norm
    qkv: Matrix
    qkv_bias_X: F32
    q_norm: F32
    k_norm: F32
    qk_eps: np.float32
    scale: np.float32
    out: Matrix
    out_bias_D: F32
    window: int
    post_norm: Norm
    mlp: Mlp | None
    """The dense MLP of a dense layer, the shared experts of a MoE layer that has some."""
    gate: Gate | None
    """``None`` for dense layers, and where the family's own router is called."""
    module: Any
    """The layer's mlp module, for that router."""


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """Everything of a model that the fused path reads."""

    model: LoadedModel
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Matrix
    head_bias_V: F32
    embedding_VD: torch.Tensor
    rotary: Any
    """The model's own module: every way of scaling is right by construction."""
    head_size: int
    clip: np.float32
    """0: none."""
    interleaved: bool


def take_weights(model: LoadedModel) -> FusedWeights:
    """Joins a float32 model's matrices; its modules keep working. The family must be capable (``why_not_fused``)."""
    config, family = model.module.config, model.family
    assert why_not_fused(family, config) is None, why_not_fused(family, config)
    form, body, lm_head = fused_form(family, config), model.module.model, model.module.lm_head
    moe = frozenset(model.spec.moe_layers)
    windows = family.windows(config)
    with torch.no_grad():
        layers = tuple(
            _layer(family, layer, windows[index], form.gate if index in moe else None, sparse=index in moe)
            for index, layer in enumerate(body.layers)
        )
        return FusedWeights(
            model=model,
            layers=layers,
            final_norm=_norm(body.norm),
            head=Matrix.of(lm_head.weight),
            head_bias_V=_vector(lm_head.bias),
            embedding_VD=body.embed_tokens.weight.detach(),
            rotary=body.rotary_emb,
            head_size=layers[0].qkv.out_size // (config.num_attention_heads + 2 * config.num_key_value_heads),
            clip=np.float32(form.clip_qkv or 0.0),
            interleaved=form.interleaved_rotary,
        )


def _layer(family: Family, layer: Any, window: int | None, gate: GateForm | None, *, sparse: bool) -> Layer:
    attention, mlp = layer.get_submodule(family.attention), layer.get_submodule(family.mlp)
    assert not hasattr(attention, "sinks"), "attention sinks"
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        input_norm=_norm(layer.get_submodule(family.input_norm)),
        qkv=Matrix.of(_joined(projections)),
        qkv_bias_X=_joined_bias(projections),
        q_norm=NONE if q_norm is None else _vector(q_norm.weight),
        k_norm=NONE if k_norm is None else _vector(k_norm.weight),
        qk_eps=np.float32(0.0 if q_norm is None else q_norm.variance_epsilon),
        scale=np.float32(attention.scaling),
        out=Matrix.of(attention.o_proj.weight),
        out_bias_D=_vector(attention.o_proj.bias),
        window=NO_WINDOW if window is None else int(window),
        post_norm=_norm(layer.get_submodule(family.post_norm)),
        mlp=_mlp_of(family, mlp, sparse=sparse),
        gate=None if gate is None else _gate(mlp, gate),
        module=mlp,
    )


def _mlp_of(family: Family, mlp: Any, *, sparse: bool) -> Mlp | None:
    """What a layer computes beside the routed experts."""
    if not sparse:
        return _mlp(mlp)
    if family.shared is summed_shared_experts:
        return None if mlp.shared_experts is None else _mlp(mlp.shared_experts)
    if family.shared is gated_shared_expert:
        return _mlp(mlp.shared_expert, mlp.shared_expert_gate.weight[0])
    assert family.shared is no_shared_experts, "shared experts of another kind"
    return None


def _mlp(module: Any, gate_D: torch.Tensor | None = None) -> Mlp:
    joined = (module.gate_proj, module.up_proj)
    return Mlp(
        gate_up=Matrix.of(_joined(joined)),
        gate_up_bias_F=_joined_bias(joined),
        down=Matrix.of(module.down_proj.weight),
        down_bias_D=_vector(module.down_proj.bias),
        gate_D=_vector(gate_D),
    )


def _gate(mlp: Any, form: GateForm) -> Gate:
    bias = getattr(mlp.gate, "e_score_correction_bias", None)
    if bias is None:
        bias = getattr(mlp, "e_score_correction_bias", None)
    if bias is None and hasattr(mlp.gate, "moe_statics"):
        bias = mlp.gate.moe_statics.e_score_correction_bias
    return Gate(Matrix.of(mlp.gate.weight), _vector(None if bias is None else bias.reshape(-1)), form)


def _norm(module: Any) -> Norm:
    if isinstance(module, nn.LayerNorm):
        return Norm(_vector(module.weight), _vector(module.bias), np.float32(module.eps))
    return Norm(_vector(module.weight), NONE, np.float32(module.variance_epsilon))


def _vector(tensor: torch.Tensor | None) -> F32:
    """A vector as the kernels take it; it shares the parameter's memory."""
    if tensor is None:
        return NONE
    assert tensor.dtype == torch.float32, f"a vector of {tensor.dtype}"
    array: F32 = tensor.detach().contiguous().numpy()
    return array


def _joined(modules: Sequence[Any]) -> torch.Tensor:
    """The linear modules' weights below one another [out, in]; their parameters become views of it."""
    joined = torch.cat([module.weight for module in modules])
    first = 0
    for module in modules:
        rows = module.weight.shape[0]
        module.weight = nn.Parameter(joined[first : first + rows], requires_grad=False)
        first += rows
    return joined


def _joined_bias(modules: Sequence[Any]) -> F32:
    biases = [module.bias for module in modules if module.bias is not None]
    assert len(biases) in (0, len(modules)), "some of the joined projections have a bias and some have none"
    return _vector(torch.cat(biases)) if biases else NONE
