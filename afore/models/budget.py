"""How much memory each role will take, said before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from afore.models.checkpoint import Checkpoint
from afore.models.kv import KVLayout
from afore.models.loading import dense_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of weights and caches; a process adds what Python and the libraries take (about 35 MiB when forked)."""

    attention_weights: int
    """Of each attention worker: everything but the routed experts."""
    attention_kv: int
    """Of each attention worker: its key/value cache."""
    prefill_weights: int
    """Of each prefill worker: the whole model."""
    ffn_weights_N: tuple[int, ...]
    """Of each FFN worker: its primaries and its redundant slots, over all MoE layers."""

    @property
    def attention(self) -> int:
        """One attention worker."""
        return self.attention_weights + self.attention_kv


def memory_budget(
    checkpoint: Checkpoint,
    *,
    primaries_per_worker: Sequence[int],
    slots_per_worker: Sequence[int],
    kv_layout: KVLayout,
    dense_dtype: torch.dtype = torch.float32,
    expert_dtype: torch.dtype = torch.float32,
) -> MemoryBudget:
    """Bytes of each role, from the configuration alone: no weights are read.

    ``primaries_per_worker`` and ``slots_per_worker`` are per MoE layer, one entry for each FFN worker.
    """
    spec = checkpoint.spec
    dense = sum(
        prod(shape) * (4 if name.endswith(checkpoint.family.keep_float32) else dense_dtype.itemsize)
        for name, shape in dense_shapes(checkpoint).items()
    )
    expert = spec.expert_elements * spec.num_moe_layers
    return MemoryBudget(
        attention_weights=dense,
        attention_kv=kv_layout.nbytes,
        prefill_weights=dense + spec.num_experts * expert * dense_dtype.itemsize,
        ffn_weights_N=tuple(
            (primaries + slots) * expert * expert_dtype.itemsize
            for primaries, slots in zip(primaries_per_worker, slots_per_worker, strict=True)
        ),
    )
