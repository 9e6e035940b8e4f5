"""Attention and prefill models read from a checkpoint: the real ones, computed in the event loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from afore.core.config import RunConfig
from afore.models.attention import AttentionModel
from afore.models.attention_modules import TransformersAttention
from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint
from afore.models.config import ModelSpec
from afore.models.kv import KVLayout, KVStorage
from afore.models.loading import LoadedModel, load_dense_model, load_whole_model
from afore.models.prefill import PrefillModel
from afore.models.prefill_modules import TransformersPrefill
from afore.transport.session import RoleContext
from afore.workers.compute import Compute, InlineCompute
from afore.workers.prefill_experts import use_kernel


@dataclass(frozen=True, slots=True)
class LoadedAttention:
    """Everything but the routed experts, with what it took to read."""

    loaded: LoadedModel
    nbytes: int
    tensors: int

    @property
    def spec(self) -> ModelSpec:
        return self.loaded.spec

    def open(self, layout: KVLayout, buffer: memoryview) -> AttentionModel:
        """The model over a KV storage; ``buffer`` must outlive it."""
        return TransformersAttention(self.loaded, KVStorage(layout, buffer))


@dataclass(frozen=True, slots=True)
class LoadedPrefill:
    """The whole model, with what it took to read."""

    model: PrefillModel
    nbytes: int
    tensors: int


class CheckpointModels:
    """Loads what the attention and prefill roles need from ``config.model``, or from the bundled checkpoint."""

    def load_attention(self, config: RunConfig) -> LoadedAttention:
        """Raises ``CheckpointError``."""
        with _open(config) as checkpoint:
            loaded = load_dense_model(checkpoint, getattr(torch, config.dtype))
            return LoadedAttention(loaded, weights_nbytes(loaded.module), checkpoint.tensors_read)

    def load_prefill(self, config: RunConfig) -> LoadedPrefill:
        """Raises ``CheckpointError``."""
        with _open(config) as checkpoint:
            loaded = load_whole_model(checkpoint, getattr(torch, config.dtype))
            use_kernel(loaded)
            return LoadedPrefill(TransformersPrefill(loaded), weights_nbytes(loaded.module), checkpoint.tensors_read)

    def compute(self, ctx: RoleContext) -> Compute:
        """In the event loop."""
        return InlineCompute(ctx.clock, ctx.tracer)


def weights_nbytes(module: Any) -> int:
    """Bytes of a module's weights; tied ones count once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def _open(config: RunConfig) -> Checkpoint:
    return Checkpoint(config.model if config.model is not None else bundled_model_path())
