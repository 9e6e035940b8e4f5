"""Prefill on a GPU: ``transformers``' own model there; keys, values and logits come down into pinned memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from afore.models.attention_modules import cache_keyword
from afore.models.config import ModelSpec
from afore.models.loading import LoadedModel
from afore.models.prefill import Prefilled, PrefillModel
from afore.transport.session import RoleContext
from afore.workers.compute import Compute
from afore.workers.gpu_place import GpuPlace

_log = logging.getLogger(__name__)

WARM_TOKENS = (1, 2)
"""A prompt that nobody reads, run at the start."""


class GpuPrefill:
    """``PrefillModel`` over a model whose modules lie on ``device``; call it with the stream current that it shall run on."""

    def __init__(self, model: LoadedModel, device: torch.device) -> None:
        self._module = model.module
        self._spec = model.spec
        self._device = device
        self._cache_keyword = cache_keyword(model.module)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def start(self) -> GpuRun:
        return GpuRun(self._module, self._cache_keyword, self._device)

    def run(self, token_ids: Sequence[int]) -> Prefilled:
        """See ``PrefillModel``; what it returns is there once the stream is past it."""
        return self.start().feed(token_ids)


class GpuRun:
    """``PrefillRun`` over a cache of ``transformers`` on a GPU."""

    def __init__(self, module: Any, keyword: str, device: torch.device) -> None:
        self._module = module
        self._keyword = keyword
        self._device = device
        # Built without a configuration: with one, layers with a sliding window would keep only their window.
        self._cache = DynamicCache()

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> Prefilled:
        """See ``PrefillRun``. Enqueues copies to the host: they are there once the stream is past this."""
        assert len(token_ids) >= 1, "an empty chunk"
        start = self._cache.get_seq_length()
        output = self._module(
            input_ids=torch.tensor([list(token_ids)], dtype=torch.int64).to(self._device, non_blocking=True),
            use_cache=True,
            logits_to_keep=1,
            **{self._keyword: self._cache},
        )
        layers = tuple(
            (self._down(layer.keys[0, :, start:]), self._down(layer.values[0, :, start:]))
            for layer in self._cache.layers
        )
        return Prefilled(self._down(output.logits[0, -1].to(torch.float32)).numpy(), layers, start)

    def _down(self, tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        return room.copy_(tensor, non_blocking=True)


class GpuPrefillWeights:
    """What a prefill worker has loaded, on its GPU."""

    def __init__(self, loaded: LoadedModel, place: GpuPlace, nbytes: int, tensors: int) -> None:
        self._place = place
        self.nbytes = nbytes
        self.tensors = tensors
        with place.device.current_model_stream():
            loaded.module.to(place.torch_device)
            self.model: PrefillModel = GpuPrefill(loaded, place.torch_device)
            self._warm(loaded)
        place.device.drain()

    def compute(self, ctx: RoleContext) -> Compute:
        """Where the model's pieces run."""
        return self._place.compute(ctx.config, ctx.clock, ctx.tracer)

    def _warm(self, loaded: LoadedModel) -> None:
        """Runs once: kernels are loaded, and experts that this GPU's torch cannot compute in one call go one by one."""
        try:
            self.model.run(WARM_TOKENS)
        except RuntimeError as error:
            if not hasattr(loaded.module, "set_experts_implementation"):
                raise
            first_line = (str(error).splitlines() or [""])[0]
            _log.warning("experts of prompts are computed one by one: %s", first_line)
            loaded.module.set_experts_implementation("eager")
            self.model.run(WARM_TOKENS)
