"""Attention and prefill models read from a checkpoint: the real ones, computed in the event loop or on a GPU."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from afore.core.config import RunConfig
from afore.models.attention import AttentionModel
from afore.models.attention_choice import attention_way
from afore.models.attention_fused import FusedAttention
from afore.models.attention_modules import TransformersAttention
from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint
from afore.models.config import ModelSpec
from afore.models.fused_forms import describe_path, kernel_path
from afore.models.fused_kernels import compile_fused_kernels
from afore.models.fused_weights import FusedWeights, take_weights
from afore.models.kv import KVLayout, KVStorage
from afore.models.loading import LoadedModel, load_dense_model, load_whole_model
from afore.models.prefill import PrefillModel
from afore.models.prefill_modules import TransformersPrefill
from afore.transport.session import RoleContext
from afore.workers.compute import Compute, InlineCompute
from afore.workers.device.cuda.places import attention_on_gpu
from afore.workers.prefill_experts import use_kernel

if TYPE_CHECKING:
    from afore.workers.attention import AttentionWeights
    from afore.workers.prefill import PrefillWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAttention:
    """Everything but the routed experts, with what it took to read."""

    loaded: LoadedModel
    nbytes: int
    tensors: int
    fused: FusedWeights | None = None
    """What the fused path reads; ``None``: ``transformers``' modules compute."""

    @property
    def spec(self) -> ModelSpec:
        return self.loaded.spec

    def open(self, layout: KVLayout, buffer: memoryview) -> AttentionModel:
        """The model over a KV storage; ``buffer`` must outlive it."""
        storage = KVStorage(layout, buffer)
        return (
            TransformersAttention(self.loaded, storage) if self.fused is None else FusedAttention(self.fused, storage)
        )


@dataclass(frozen=True, slots=True)
class AttentionForGpu:
    """Everything but the routed experts, read and not yet on a GPU."""

    loaded: LoadedModel
    nbytes: int
    tensors: int

    @property
    def spec(self) -> ModelSpec:
        return self.loaded.spec

    def open(self, layout: KVLayout, buffer: memoryview) -> AttentionModel:
        raise AssertionError("place it first")

    def place(self, ctx: RoleContext, stack: AsyncExitStack) -> AttentionWeights:
        """On this machine's GPU. Raises ``HostError``."""
        # Only here: CUDA costs everybody else its import.
        from afore.workers.attention_gpu import GpuAttentionWeights
        from afore.workers.gpu_place import GpuPlace

        place = GpuPlace.on_gpu(ctx)
        stack.callback(place.close)
        library, why = attention_way(ctx.config.dtype, place.capability)
        # No library computes what the runtime does (float32): where one will, its kernels go behind this choice.
        assert library == "sdpa", library
        _log.info("attention runs modules on GPU %d, with %s: %s", place.ordinal, library, why)
        return GpuAttentionWeights(self.loaded, place, self.nbytes, self.tensors)


@dataclass(frozen=True, slots=True)
class PrefillForGpu:
    """The whole model, read and not yet on a GPU."""

    loaded: LoadedModel
    nbytes: int
    tensors: int

    @property
    def model(self) -> PrefillModel:
        raise AssertionError("place it first")

    def place(self, ctx: RoleContext, stack: AsyncExitStack) -> PrefillWeights:
        """On this machine's GPU. Raises ``HostError``."""
        from afore.workers.gpu_place import GpuPlace
        from afore.workers.prefill_gpu import GpuPrefillWeights

        place = GpuPlace.on_gpu(ctx)
        stack.callback(place.close)
        return GpuPrefillWeights(self.loaded, place, self.nbytes, self.tensors)


@dataclass(frozen=True, slots=True)
class LoadedPrefill:
    """The whole model, with what it took to read."""

    model: PrefillModel
    nbytes: int
    tensors: int


class CheckpointModels:
    """Loads what the attention and prefill roles need from ``config.model``, or from the bundled checkpoint."""

    def load_attention(self, config: RunConfig, rank: int) -> LoadedAttention | AttentionForGpu:
        """Raises ``CheckpointError``; ``ConfigError`` for kernels that this model cannot run. Compiles what it will need."""
        if attention_on_gpu(config):
            with _open(config) as checkpoint:
                loaded = load_dense_model(checkpoint, getattr(torch, config.dtype))
                return AttentionForGpu(loaded, weights_nbytes(loaded.module), checkpoint.tensors_read)
        with _open(config) as checkpoint:
            path = kernel_path(config.kernels, checkpoint.family, checkpoint.config, config.dtype)
            phrase = describe_path(config.kernels, checkpoint.family, checkpoint.config, config.dtype)
            _log.info("attention runs %s", phrase)
            loaded = load_dense_model(checkpoint, getattr(torch, config.dtype))
            nbytes, fused = weights_nbytes(loaded.module), None
            if path == "fused":
                compile_fused_kernels()
                fused = take_weights(loaded)
            return LoadedAttention(loaded, nbytes, checkpoint.tensors_read, fused)

    def load_prefill(self, config: RunConfig) -> LoadedPrefill | PrefillForGpu:
        """Raises ``CheckpointError``."""
        with _open(config) as checkpoint:
            loaded = load_whole_model(checkpoint, getattr(torch, config.dtype))
            if attention_on_gpu(config):
                return PrefillForGpu(loaded, weights_nbytes(loaded.module), checkpoint.tensors_read)
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
