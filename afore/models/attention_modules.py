"""``AttentionModel`` by ``transformers``' own modules, called layer by layer: the reference for every family."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from afore.models.attention import F32, I32, LayerKind, Routed, StepBatch, layer_kinds
from afore.models.config import ModelSpec
from afore.models.kv import KVStorage
from afore.models.loading import LoadedModel
from afore.models.paged import PagedCache, step_slots

_CACHE_KEYWORDS = ("cache", "past_key_values", "past_key_value")
"""What releases of transformers call the cache, newest first."""


@dataclass(slots=True)
class ModulesState:
    """One step in flight: x is [T, 1, D] throughout."""

    x: torch.Tensor
    """The residual stream."""
    rotary: Any
    """Whatever the family's rotary module returns, passed on unopened."""
    masks: dict[int | None, torch.Tensor | None]
    """By window; each as the model's attention takes it."""
    cache: PagedCache
    hidden: torch.Tensor | None = None
    """What ``attend`` sent to the experts, for the shared ones; ``None`` outside a MoE layer."""
    microbatch: int = 0


class TransformersAttention:
    """Runs a model loaded without its routed experts over a paged cache. Not thread-safe: one call at a time.

    ``device``: where modules and cache lie. What crosses to the host does so in ``_sent``, ``_received`` and ``_logits``.
    """

    def __init__(self, model: LoadedModel, storage: KVStorage, *, device: torch.device | None = None) -> None:
        assert storage.layout.num_layers == model.spec.num_layers, "a cache of another model"
        assert storage.layout.parts == model.spec.kv_parts, "a cache of another model"
        self._spec = model.spec
        self._family = model.family
        self._body = model.module.model
        self._head = model.module.lm_head
        self._dtype = model.module.lm_head.weight.dtype
        self._masks_are_added = model.module.config._attn_implementation == "eager"
        self._storage = storage
        self._device = torch.device("cpu") if device is None else device
        self._kinds = layer_kinds(model.spec)
        windows = model.family.windows(model.module.config)
        self._windows = frozenset(windows)
        self._layers = [
            _LayerModules(
                input_norm=layer.get_submodule(model.family.input_norm),
                attention=layer.get_submodule(model.family.attention),
                post_norm=layer.get_submodule(model.family.post_norm),
                mlp=layer.get_submodule(model.family.mlp),
                window=window,
            )
            for layer, window in zip(self._body.layers, windows, strict=True)
        ]
        self._cache_keyword = cache_keyword(self._layers[0].attention)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def layers(self) -> tuple[LayerKind, ...]:
        return self._kinds

    @torch.inference_mode()
    def begin(self, batch: StepBatch) -> ModulesState:
        slots = step_slots(self._storage.layout.block_tokens, batch.block_tables_TB, batch.positions_T)
        x = self._body.embed_tokens(torch.from_numpy(batch.token_ids_T)[:, None].to(self._device, non_blocking=True))
        rotary = self._body.rotary_emb(
            x, torch.from_numpy(batch.positions_T)[:, None].to(self._device, non_blocking=True)
        )
        masks = {window: self._as_taken(slots.mask(window)) for window in self._windows}
        slots = slots.on(self._device)
        return ModulesState(x=x, rotary=rotary, masks=masks, cache=PagedCache(self._storage, slots))

    @torch.inference_mode()
    def dense(self, state: ModulesState, layer_index: int) -> None:
        layer = self._layers[layer_index]
        assert self._kinds[layer_index].moe_ordinal is None, f"layer {layer_index} is sparse"
        hidden = self._attention_block(state, layer)
        state.x = state.x + layer.mlp(hidden)

    @torch.inference_mode()
    def attend(self, state: ModulesState, moe_ordinal: int) -> Routed:
        assert state.hidden is None, "combine the previous layer first"
        layer = self._layers[self._spec.moe_layers[moe_ordinal]]
        hidden = self._attention_block(state, layer)
        weights_TK, ids_TK = self._family.route(layer.mlp, hidden.view(-1, self._spec.hidden_size))
        state.hidden = hidden
        return self._sent(state, hidden.view(-1, self._spec.hidden_size), ids_TK, weights_TK)

    @torch.inference_mode()
    def next_choices(self, state: ModulesState, moe_ordinal: int) -> I32:
        assert state.hidden is not None, "attend this layer first"
        layer = self._layers[self._spec.moe_layers[moe_ordinal + 1]]
        _, ids_TK = self._family.route(layer.mlp, state.hidden.view(-1, self._spec.hidden_size))
        ids: I32 = ids_TK.to(torch.int32).cpu().contiguous().numpy()
        return ids

    @torch.inference_mode()
    def combine(self, state: ModulesState, moe_ordinal: int, expert_out_TD: F32) -> None:
        assert state.hidden is not None, "attend this layer first"
        layer = self._layers[self._spec.moe_layers[moe_ordinal]]
        out = self._received(expert_out_TD).to(self._dtype).view(state.x.shape)
        shared = self._family.shared(layer.mlp, state.hidden)
        # The order of the two sums is the module's own: another one would differ in the last bit.
        state.x = state.x + (out if shared is None else out + shared)
        state.hidden = None

    @torch.inference_mode()
    def logits(self, state: ModulesState) -> F32:
        return self._logits(state, self._head(self._body.norm(state.x))[:, 0])

    def _sent(self, state: ModulesState, hidden_TD: Any, ids_TK: Any, weights_TK: Any) -> Routed:
        """What leaves for the experts."""
        return Routed(
            hidden_TD=hidden_TD.to(torch.float32).contiguous().numpy(),
            ids_TK=ids_TK.to(torch.int32).contiguous().numpy(),
            weights_TK=weights_TK.to(torch.float32).contiguous().numpy(),
        )

    def _received(self, expert_out_TD: Any) -> torch.Tensor:
        """The routed sum, where the modules are."""
        return torch.from_numpy(expert_out_TD)

    def _logits(self, state: ModulesState, rows_TV: torch.Tensor) -> F32:
        """Logits on the host."""
        logits_TV: F32 = rows_TV.to(torch.float32).contiguous().numpy()
        return logits_TV

    def _as_taken(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Fused attention takes true and false; eager attention, which attention sinks need, adds a mask to its scores."""
        if mask is not None:
            mask = mask.to(self._device, non_blocking=True)
        if mask is None or not self._masks_are_added:
            return mask
        return torch.zeros(mask.shape, dtype=self._dtype, device=self._device).masked_fill_(
            ~mask, torch.finfo(self._dtype).min
        )

    def _attention_block(self, state: ModulesState, layer: _LayerModules) -> torch.Tensor:
        """Attention and its residual; returns the rows after the post-attention norm."""
        attended, *_ = layer.attention(
            hidden_states=layer.input_norm(state.x),
            position_embeddings=state.rotary,
            attention_mask=state.masks[layer.window],
            **{self._cache_keyword: state.cache},
        )
        state.x = state.x + attended
        hidden: torch.Tensor = layer.post_norm(state.x)
        return hidden


@dataclass(frozen=True, slots=True)
class _LayerModules:
    input_norm: Any
    attention: Any
    post_norm: Any
    mlp: Any
    window: int | None


def cache_keyword(attention: Any) -> str:
    """How this release's attention modules call the cache."""
    parameters = inspect.signature(attention.forward).parameters
    for keyword in _CACHE_KEYWORDS:
        if keyword in parameters:
            return keyword
    raise AssertionError(f"{type(attention).__name__}.forward takes no cache: {list(parameters)}")
