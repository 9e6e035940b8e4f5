"""``AttentionModel`` by a few matrix products and compiled kernels a layer, on buffers made once: for decoding on CPUs.

A layer is three products (queries, keys and values; output; gate), two more where there are shared experts, and three to five
kernels; the module path runs 112 small operations. Equal to it within 1e-5, with the same experts but for ties. A family whose
router no kernel computes has its own called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from afore.models.attention import F32, I32, I64, LayerKind, Routed, StepBatch, layer_kinds
from afore.models.config import ModelSpec
from afore.models.fused_buffers import BufferPool, ScratchRows, StepRows, Views
from afore.models.fused_kernels import (
    add_and_norm,
    add_two_and_norm,
    choose_experts,
    compile_fused_kernels,
    norm_rows,
    silu_up,
)
from afore.models.fused_paged import paged_attention, slots_exist
from afore.models.fused_weights import NONE, FusedWeights, Layer, Mlp, Norm
from afore.models.kv import KVStorage


@dataclass(slots=True)
class FusedState:
    """One step in flight."""

    rows: StepRows
    views: Views[StepRows] | None
    """Where ``rows`` came from; ``None`` once the step is over."""
    cos_TR: F32
    sin_TR: F32
    tables_TB: I32
    positions_T: I64
    next_layer: int = 0
    """The layer whose turn it is; its input norm is done."""
    routed: bool = False
    """Its experts are being computed."""


class FusedAttention:
    """Runs a capable model over a paged cache. Not thread-safe: one call at a time, whatever the step."""

    def __init__(self, weights: FusedWeights, storage: KVStorage) -> None:
        layout, spec = storage.layout, weights.model.spec
        assert layout.num_layers == spec.num_layers, "a cache of another model"
        assert layout.parts == spec.kv_parts, "a cache of another model"
        assert layout.dtype == "float32", f"a cache of {layout.dtype}"
        compile_fused_kernels()
        self._weights = weights
        self._spec = spec
        self._family = weights.model.family
        self._kinds = layer_kinds(spec)
        self._layers = weights.layers
        self._next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        self._block_tokens, self._num_blocks = layout.block_tokens, layout.num_blocks
        self._planes = [(keys.numpy(), values.numpy()) for keys, values in storage.planes]
        self._pool = BufferPool(weights)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def layers(self) -> tuple[LayerKind, ...]:
        return self._kinds

    def begin(self, batch: StepBatch) -> FusedState:
        tables_TB = np.ascontiguousarray(batch.block_tables_TB, dtype=np.int32)
        positions_T = np.ascontiguousarray(batch.positions_T, dtype=np.int64)
        assert slots_exist(tables_TB, positions_T, self._block_tokens, self._num_blocks), (
            f"positions {positions_T} with blocks {tables_TB} of {self._num_blocks}"
        )
        views = self._pool.take(batch.num_tokens)
        rows = views.first(batch.num_tokens)
        torch.index_select(self._weights.embedding_VD, 0, torch.from_numpy(batch.token_ids_T), out=rows.x_TD.torch)
        norm = self._layers[0].input_norm
        norm_rows(rows.x_TD.numpy, norm.weight_D, norm.bias_D, norm.eps, rows.normed_TD.numpy)
        with torch.inference_mode():
            cos, sin = self._weights.rotary(rows.x_TD.torch[:, None], torch.from_numpy(positions_T)[:, None])
            return FusedState(rows, views, _table(cos), _table(sin), tables_TB, positions_T)

    def dense(self, state: FusedState, layer_index: int) -> None:
        assert self._kinds[layer_index].moe_ordinal is None, f"layer {layer_index} is sparse"
        layer = self._turn(state, layer_index)
        scratch = self._attention(state, layer, layer_index)
        norm = self._next_norms[layer_index]
        rows = state.rows
        assert layer.mlp is not None, "a dense layer without an MLP"
        added_TD = _mlp_rows(layer.mlp, rows, scratch)
        add_and_norm(rows.x_TD.numpy, added_TD, layer.mlp.down_bias_D, *_of(norm), rows.normed_TD.numpy)
        state.next_layer += 1

    def attend(self, state: FusedState, moe_ordinal: int) -> Routed:
        index = self._spec.moe_layers[moe_ordinal]
        layer = self._turn(state, index)
        scratch = self._attention(state, layer, index)
        rows = state.rows
        self._route(layer, rows, scratch, rows.ids_TK, rows.weights_TK)
        state.routed = True
        return Routed(rows.hidden_TD.numpy, rows.ids_TK, rows.weights_TK)

    def next_choices(self, state: FusedState, moe_ordinal: int) -> I32:
        assert state.routed, "attend this layer first"
        rows = state.rows
        ids_TK, weights_TK = np.empty_like(rows.ids_TK), np.empty_like(rows.weights_TK)
        layer = self._layers[self._spec.moe_layers[moe_ordinal + 1]]
        self._route(layer, rows, self._pool.scratch(len(ids_TK)), ids_TK, weights_TK)
        return ids_TK

    def combine(self, state: FusedState, moe_ordinal: int, expert_out_TD: F32) -> None:
        assert state.routed, "attend this layer first"
        index = self._spec.moe_layers[moe_ordinal]
        assert index == state.next_layer, f"layer {state.next_layer} is being computed, not {index}"
        rows, layer, norm = state.rows, self._layers[index], self._next_norms[index]
        routed_TD = _taken(expert_out_TD, rows.x_TD.numpy)
        x_TD, normed_TD = rows.x_TD.numpy, rows.normed_TD.numpy
        if layer.mlp is not None:
            shared_TD = _mlp_rows(layer.mlp, rows, self._pool.scratch(len(x_TD)))
            if layer.mlp.down_bias_D.size:
                shared_TD += layer.mlp.down_bias_D
            add_two_and_norm(x_TD, routed_TD, shared_TD, rows.hidden_TD.numpy, layer.mlp.gate_D, *_of(norm), normed_TD)
        else:
            add_and_norm(x_TD, routed_TD, NONE, *_of(norm), normed_TD)
        state.routed = False
        state.next_layer += 1

    def logits(self, state: FusedState) -> F32:
        """See ``AttentionModel``. The array is the model's own: valid until the next call of ``logits``."""
        assert state.next_layer == len(self._layers), f"layer {state.next_layer} has not been computed"
        assert state.views is not None, "a step has its logits once"
        rows = state.rows
        logits_TV = self._pool.scratch(len(rows.ids_TK)).logits_TV
        rows.normed_TD.times(self._weights.head, logits_TV)
        if self._weights.head_bias_V.size:
            np.add(logits_TV.numpy, self._weights.head_bias_V, out=logits_TV.numpy)
        self._pool.give_back(state.views)
        state.views = None
        return logits_TV.numpy

    def _turn(self, state: FusedState, index: int) -> Layer:
        assert not state.routed, "combine the previous layer first"
        assert index == state.next_layer, f"it is layer {state.next_layer}'s turn, not {index}'s"
        return self._layers[index]

    def _attention(self, state: FusedState, layer: Layer, index: int) -> ScratchRows:
        """Attention, its residual, and the norm behind it into ``hidden``."""
        rows, weights = state.rows, self._weights
        scratch = self._pool.scratch(len(rows.ids_TK))
        keys_SY, values_SY = self._planes[index]
        rows.normed_TD.times(layer.qkv, scratch.qkv_TX)
        paged_attention(
            scratch.qkv_TX.numpy,
            layer.qkv_bias_X,
            layer.q_norm,
            layer.k_norm,
            layer.qk_eps,
            weights.clip,
            layer.scale,
            state.cos_TR,
            state.sin_TR,
            weights.interleaved,
            keys_SY,
            values_SY,
            state.tables_TB,
            state.positions_T,
            self._block_tokens,
            weights.head_size,
            layer.window,
            scratch.attended_TZ.numpy,
        )
        scratch.attended_TZ.times(layer.out, scratch.added_TD)
        add_and_norm(
            rows.x_TD.numpy, scratch.added_TD.numpy, layer.out_bias_D, *_of(layer.post_norm), rows.hidden_TD.numpy
        )
        return scratch

    def _route(self, layer: Layer, rows: StepRows, scratch: ScratchRows, ids_TK: I32, weights_TK: F32) -> None:
        """The layer's gate on ``hidden``, into ``ids_TK`` and ``weights_TK``."""
        gate = layer.gate
        if gate is None:
            self._route_by_module(layer, rows, ids_TK, weights_TK)
            return
        rows.hidden_TD.times(gate.weight, scratch.logits_TE)
        form = gate.form
        choose_experts(
            scratch.logits_TE.numpy,
            gate.bias_E,
            form.sigmoid,
            form.groups,
            form.kept_groups,
            form.normalised,
            form.least_sum,
            form.scale,
            ids_TK,
            weights_TK,
        )

    @torch.inference_mode()
    def _route_by_module(self, layer: Layer, rows: StepRows, ids_TK: I32, weights_TK: F32) -> None:
        weights, ids = self._family.route(layer.module, rows.hidden_TD.torch)
        ids_TK[:] = ids.numpy()
        weights_TK[:] = weights.numpy()


def _mlp_rows(mlp: Mlp, rows: StepRows, scratch: ScratchRows) -> F32:
    """Rows of a dense MLP or of shared experts, without the bias of ``down``."""
    gate_up_TF = scratch.gate_up_TF[mlp.gate_up.out_size]
    activated_TI = scratch.activated_TI[mlp.down.in_size]
    rows.hidden_TD.times(mlp.gate_up, gate_up_TF)
    silu_up(gate_up_TF.numpy, mlp.gate_up_bias_F, activated_TI.numpy)
    activated_TI.times(mlp.down, scratch.added_TD)
    return scratch.added_TD.numpy


def _of(norm: Norm) -> tuple[F32, F32, np.float32]:
    return norm.weight_D, norm.bias_D, norm.eps


def _table(cos_or_sin: torch.Tensor) -> F32:
    """Rotary rows [T, R] as the kernels take them."""
    table: F32 = cos_or_sin[:, 0].to(torch.float32).contiguous().numpy()
    return table


def _taken(rows_TD: npt.NDArray[Any], like_TD: F32) -> F32:
    """The routed sum as the kernels take it; copied only where it is another kind of array (read-only, strided)."""
    assert rows_TD.shape == like_TD.shape, f"rows {rows_TD.shape} for a step of {like_TD.shape}"
    flags = rows_TD.flags
    if rows_TD.dtype == np.float32 and flags.c_contiguous and flags.writeable:
        return rows_TD
    return np.array(rows_TD, dtype=np.float32, order="C")
