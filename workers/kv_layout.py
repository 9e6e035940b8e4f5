"""The KV cache of an attention worker, as configuration and model make it: the same on it and on every prefill worker."""

from __future__ import annotations

from afore.core.config import RunConfig
from afore.models.config import ModelSpec
from afore.models.kv import KVLayout

DEFAULT_TOKENS = 1024
"""Tokens of a request that the default cache has room for, for every request of the worker's share."""


def kv_layout(config: RunConfig, spec: ModelSpec) -> KVLayout:
    """Layout of one attention worker's KV storage."""
    batch = config.batch
    blocks = batch.kv_blocks
    if blocks is None:
        requests = -(-batch.max_num_seqs // config.topology.attention)
        blocks = requests * -(-min(DEFAULT_TOKENS, spec.max_positions) // batch.block_tokens)
    return KVLayout.for_model(spec, num_blocks=blocks, block_tokens=batch.block_tokens, dtype=config.dtype)
