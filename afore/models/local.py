"""The whole model in one process through the same seams: attention, plain experts, sampling. The reference for a cluster.

No placement, no replicas, no transport: what differs between this and a cluster's tokens is the cluster's doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import linear, silu

from afore.models.attention import F32, AttentionModel, Routed, StepBatch
from afore.models.attention_fused import FusedAttention
from afore.models.attention_modules import TransformersAttention
from afore.models.checkpoint import Checkpoint, ExpertReader
from afore.models.expert_form import Activation, ExpertForm
from afore.models.fused_forms import KernelChoice, kernel_path
from afore.models.fused_weights import take_weights
from afore.models.kv import BlockAllocator, KVLayout, KVStorage
from afore.models.loading import load_dense_model, load_whole_model
from afore.models.prefill import PrefillModel
from afore.models.prefill_modules import TransformersPrefill


def activated(form: ExpertForm, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The hidden rows of an expert, from its two projections."""
    if form.activation is Activation.CLAMPED:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return gate * torch.sigmoid(form.alpha * gate) * (up + 1)
    return silu(gate) * up


class LocalExperts:
    """All routed experts of a checkpoint, computed one after the other in plain torch."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        reader = ExpertReader(checkpoint)
        spec = checkpoint.spec
        self._form = spec.expert_form
        per_expert = (spec.num_moe_layers, spec.num_experts)
        self._gate_up_bias_LE = torch.zeros((*per_expert, reader.gate_up_shape[0])) if reader.has_biases else None
        self._down_bias_LE = torch.zeros((*per_expert, reader.down_shape[0])) if reader.has_biases else None
        self._gate_up_LE = torch.empty((*per_expert, *reader.gate_up_shape))
        self._down_LE = torch.empty((*per_expert, *reader.down_shape))
        for layer in range(spec.num_moe_layers):
            for expert in range(spec.num_experts):
                gate_up_bias, down_bias = self._biases(layer, expert)
                reader.read_expert(
                    layer,
                    expert,
                    self._gate_up_LE[layer, expert],
                    self._down_LE[layer, expert],
                    gate_up_bias,
                    down_bias,
                )

    def _biases(self, layer: int, expert: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self._gate_up_bias_LE is None or self._down_bias_LE is None:
            return None, None
        return self._gate_up_bias_LE[layer, expert], self._down_bias_LE[layer, expert]

    @torch.inference_mode()
    def __call__(self, moe_ordinal: int, routed: Routed) -> F32:
        """The routed sum [T, D] in float32."""
        hidden_TD, weights_TK = torch.from_numpy(routed.hidden_TD), torch.from_numpy(routed.weights_TK)
        out_TD = torch.zeros_like(hidden_TD)
        for expert in np.unique(routed.ids_TK):
            rows, choices = (torch.from_numpy(index) for index in np.nonzero(routed.ids_TK == expert))
            gate_up_bias, down_bias = self._biases(moe_ordinal, expert)
            gate, up = linear(hidden_TD[rows], self._gate_up_LE[moe_ordinal, expert], gate_up_bias).chunk(2, dim=-1)
            output = linear(activated(self._form, gate, up), self._down_LE[moe_ordinal, expert], down_bias)
            out_TD.index_add_(0, rows, output * weights_TK[rows, choices, None])
        summed: F32 = out_TD.numpy()
        return summed


@dataclass(slots=True)
class Running:
    """One request while it runs."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    blocks: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)


class LocalDecoder:
    """Greedy decoding of many requests that join and leave one running batch."""

    def __init__(
        self,
        attention: AttentionModel,
        prefill: PrefillModel,
        experts: LocalExperts,
        storage: KVStorage,
    ) -> None:
        self._attention, self._prefill, self._experts, self._storage = attention, prefill, experts, storage
        self._allocator = BlockAllocator(storage.layout.num_blocks)
        self._running: list[Running] = []
        self.steps = 0
        """Decode steps run so far."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        num_blocks: int = 256,
        block_tokens: int = 16,
        kernels: KernelChoice = "modules",
    ) -> LocalDecoder:
        """Loads a checkpoint in float32 with a cache in this process's memory. Raises ``ConfigError`` for kernels it cannot run."""
        layout = KVLayout.for_model(checkpoint.spec, num_blocks=num_blocks, block_tokens=block_tokens)
        storage = KVStorage.allocate(layout)
        loaded, attention = load_dense_model(checkpoint), None
        if kernel_path(kernels, checkpoint.family, checkpoint.config) == "fused":
            attention = FusedAttention(take_weights(loaded), storage)
        prefill = TransformersPrefill(load_whole_model(checkpoint))
        return cls(attention or TransformersAttention(loaded, storage), prefill, LocalExperts(checkpoint), storage)

    def join(self, prompt: Sequence[int], max_new_tokens: int) -> Running:
        """Prefills a prompt into blocks of its own and adds it to the batch. Raises ``KVCacheFull``."""
        layout = self._storage.layout
        blocks = self._allocator.allocate(layout.blocks_for(len(prompt) + max_new_tokens))
        prefilled = self._prefill.run(prompt)
        for offset, data in prefilled.pack(layout, blocks):
            self._storage.write(offset, data)
        request = Running(tuple(prompt), max_new_tokens, blocks)
        self._running.append(request)
        self._take(request, prefilled.logits_V)
        return request

    def step(self) -> bool:
        """One token for every running request; false when there is none."""
        if not self._running:
            return False
        running, model = list(self._running), self._attention
        state = model.begin(
            StepBatch.of(
                [request.tokens[-1] for request in running],
                [len(request.prompt) + len(request.tokens) - 1 for request in running],
                [request.blocks for request in running],
            )
        )
        for layer in model.layers():
            if layer.moe_ordinal is None:
                model.dense(state, layer.index)
            else:
                routed = model.attend(state, layer.moe_ordinal)
                model.combine(state, layer.moe_ordinal, self._experts(layer.moe_ordinal, routed))
        for request, logits_V in zip(running, model.logits(state), strict=True):
            self._take(request, logits_V)
        self.steps += 1
        return True

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], *, join_every: int = 1
    ) -> list[list[int]]:
        """Tokens of every prompt; one request joins at every ``join_every``-th step, beside those that run."""
        waiting = list(zip(prompts, max_new_tokens, strict=True))
        requests: list[Running] = []
        steps = 0
        while waiting or self._running:
            if waiting and (steps % join_every == 0 or not self._running):
                requests.append(self.join(*waiting.pop(0)))
            self.step()
            steps += 1
        return [request.tokens for request in requests]

    def _take(self, request: Running, logits_V: F32) -> None:
        token = int(np.argmax(logits_V))
        request.tokens.append(token)
        if token in self._attention.spec.eos_ids or len(request.tokens) == request.max_new_tokens:
            self._running.remove(request)
            self._allocator.free(request.blocks)
