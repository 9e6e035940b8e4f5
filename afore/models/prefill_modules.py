"""``PrefillModel`` by ``transformers``' own model."""

from __future__ import annotations

from collections.abc import Sequence

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

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int]) -> Prefilled:
        assert len(token_ids) >= 1, "an empty prompt"
        # Built without a configuration: with one, layers with a sliding window would keep only their window.
        cache = DynamicCache()
        output = self._module(
            input_ids=torch.tensor([list(token_ids)], dtype=torch.int64),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_keyword: cache},
        )
        layers = tuple((layer.keys[0], layer.values[0]) for layer in cache.layers)
        return Prefilled(output.logits[0, -1].to(torch.float32).numpy(), layers)
