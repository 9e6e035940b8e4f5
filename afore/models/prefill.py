"""The seam between a prefill worker and the model: the whole model, routed experts included, on one prompt, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from afore.models.attention import F32
from afore.models.config import ModelSpec
from afore.models.kv import KVLayout, LayerKV, pack_blocks


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a chunk of a prompt leaves behind."""

    logits_V: F32
    """Logits of the token after its last one."""
    layers: tuple[LayerKV, ...]
    """Keys and values [heads, n, dim] of its n tokens in every layer."""
    start: int = 0
    """Position of its first token."""

    def pack(self, layout: KVLayout, blocks: Sequence[int]) -> list[tuple[int, memoryview]]:
        """(byte offset, bytes) pairs to write one-sided into the attention worker's cache; see ``pack_blocks``."""
        return pack_blocks(layout, self.layers, blocks, self.start)


class PrefillRun(Protocol):
    """One prompt on its way through the model; holds the keys and values of its tokens so far."""

    def feed(self, token_ids: Sequence[int]) -> Prefilled:
        """Runs the next n ≥ 1 tokens. However a prompt is cut, its last chunk's logits choose the same token."""
        ...


class PrefillModel(Protocol):
    """The whole model on prompts."""

    @property
    def spec(self) -> ModelSpec: ...

    def start(self) -> PrefillRun:
        """A new prompt. Several may be under way, whose chunks come in any order."""
        ...

    def run(self, token_ids: Sequence[int]) -> Prefilled:
        """A whole prompt of n ≥ 1 tokens at once."""
        ...
