"""The seam between a prefill worker and the model: the whole model, routed experts included, on one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from afore.models.attention import F32
from afore.models.config import ModelSpec
from afore.models.kv import KVLayout, LayerKV, pack_blocks


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prompt leaves behind."""

    logits_V: F32
    """Logits of the first new token."""
    layers: tuple[LayerKV, ...]
    """Keys and values [heads, n, dim] of every layer."""

    def pack(self, layout: KVLayout, blocks: Sequence[int]) -> list[tuple[int, memoryview]]:
        """(byte offset, bytes) pairs to write one-sided into the attention worker's cache; see ``pack_blocks``."""
        return pack_blocks(layout, self.layers, blocks)


class PrefillModel(Protocol):
    """The whole model on one prompt."""

    @property
    def spec(self) -> ModelSpec: ...

    def run(self, token_ids: Sequence[int]) -> Prefilled:
        """Runs a prompt of n ≥ 1 tokens."""
        ...
