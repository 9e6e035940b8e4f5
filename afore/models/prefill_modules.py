"""``PrefillModel`` by ``transformers``' own model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from afore.models.attention_modules import cache_keyword
from afore.models.config import ModelSpec
from afore.models.loading import LoadedModel
from afore.models.prefill import Prefilled


class TransformersPrefill:
    """Runs the prompt exactly as ``generate`` does at batch 1, with the experts kernel that it picks by default."""

    def __init__(self, model: LoadedModel) -> None:
        self._module = model.module
        self._spec = model.spec
        self._cache_keyword = cache_keyword(model.module)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def start(self) -> TransformersRun:
        return TransformersRun(self._module, self._cache_keyword)

    def run(self, token_ids: Sequence[int]) -> Prefilled:
        return self.start().feed(token_ids)


class TransformersRun:
    """``PrefillRun`` over a cache of ``transformers``."""

    def __init__(self, module: Any, cache_keyword: str) -> None:
        self._module = module
        self._cache_keyword = cache_keyword
        # Built without a configuration: with one, layers with a sliding window would keep only their window.
        self._cache = DynamicCache()

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> Prefilled:
        assert len(token_ids) >= 1, "an empty chunk"
        start = self._cache.get_seq_length()
        output = self._module(
            input_ids=torch.tensor([list(token_ids)], dtype=torch.int64),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_keyword: self._cache},
        )
        layers = tuple((layer.keys[0, :, start:], layer.values[0, :, start:]) for layer in self._cache.layers)
        return Prefilled(output.logits[0, -1].to(torch.float32).numpy(), layers, start)
