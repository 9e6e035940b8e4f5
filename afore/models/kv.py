"""Paged key/value cache: where each block lies in one flat buffer, what a prompt writes into it, and who holds which block.

The buffer belongs to someone else (a registered region), so that a prefill worker can write blocks one-sided: it needs only
``KVLayout`` and the block numbers that the attention worker allocated.

Per layer there are two planes, keys and values (MLA families: latents), each [num_blocks · block_tokens, heads · dim],
token-major: a token's slot is block · block_tokens + position % block_tokens in every plane.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from afore.core.errors import KVCacheFull
from afore.models.config import ModelSpec
from afore.models.families import HeadsAndDim

KEYS, VALUES = 0, 1
_ALIGNMENT = 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Keys [heads, n, dim] and values [heads, n, dim] of one sequence in one layer, as ``Cache.update`` receives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Offsets of every block of every layer in one flat buffer of ``nbytes`` bytes. The same on both sides of a transfer."""

    num_layers: int
    """All layers, dense and sparse."""
    num_blocks: int
    block_tokens: int
    parts: tuple[HeadsAndDim, HeadsAndDim]
    """(heads, dim) per token of keys and of values."""
    dtype: str = "float32"
    """``float32``, ``bfloat16`` or ``float16``."""

    def __post_init__(self) -> None:
        assert self.num_layers > 0, "no layers"
        assert self.num_blocks > 0, "no blocks"
        assert self.block_tokens > 0, "empty blocks"
        assert self.dtype in _DTYPES, f"a cache of {self.dtype}"

    @classmethod
    def for_model(cls, spec: ModelSpec, *, num_blocks: int, block_tokens: int = 16, dtype: str = "float32") -> KVLayout:
        """The layout of a cache for ``spec`` with ``num_blocks`` blocks of ``block_tokens`` tokens in every layer."""
        return cls(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            parts=spec.kv_parts,
            dtype=dtype,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def row_nbytes(self, part: int) -> int:
        """Bytes of one token's keys (part 0) or values (part 1) in one layer."""
        heads, dim = self.parts[part]
        return heads * dim * self.torch_dtype.itemsize

    def block_nbytes(self, part: int) -> int:
        """Bytes of one block of keys (part 0) or values (part 1) in one layer."""
        return self.block_tokens * self.row_nbytes(part)

    def plane_nbytes(self, part: int) -> int:
        """Bytes of all blocks of one part of one layer, rounded up so that every plane is aligned."""
        return -(-self.num_blocks * self.block_nbytes(part) // _ALIGNMENT) * _ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Size of the whole buffer."""
        return self.num_layers * (self.plane_nbytes(KEYS) + self.plane_nbytes(VALUES))

    def block_offset(self, layer: int, block: int, part: int = KEYS) -> int:
        """Byte offset of a block's keys (part 0) or values (part 1); ``layer`` is the model's layer index."""
        assert 0 <= layer < self.num_layers, f"layer {layer}"
        assert 0 <= block < self.num_blocks, f"block {block}"
        plane = layer * (self.plane_nbytes(KEYS) + self.plane_nbytes(VALUES)) + part * self.plane_nbytes(KEYS)
        return plane + block * self.block_nbytes(part)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of ``tokens`` tokens needs."""
        return -(-tokens // self.block_tokens)


class KVStorage:
    """Views of every plane of a cache over a buffer that someone else owns.

    ``buffer`` is anything writable with the buffer protocol, or a uint8 tensor, of at least ``layout.nbytes`` bytes; it must
    outlive the storage (a region that is closed under it leaves the views dangling).
    """

    def __init__(self, layout: KVLayout, buffer: Any) -> None:
        self.layout = layout
        flat = self._flat = buffer if isinstance(buffer, torch.Tensor) else torch.frombuffer(buffer, dtype=torch.uint8)
        assert flat.dtype == torch.uint8, f"a buffer of {flat.dtype}"
        assert flat.numel() >= layout.nbytes, f"{flat.numel()} bytes for a cache of {layout.nbytes}"
        rows = layout.num_blocks * layout.block_tokens
        self.planes: list[LayerKV] = []
        """[layer] → keys and values [slots, heads · dim]."""
        for layer in range(layout.num_layers):
            views = []
            for part in (KEYS, VALUES):
                start = layout.block_offset(layer, 0, part)
                raw = flat[start : start + rows * layout.row_nbytes(part)]
                views.append(raw.view(layout.torch_dtype).view(rows, -1))
            self.planes.append((views[0], views[1]))

    @classmethod
    def allocate(cls, layout: KVLayout) -> KVStorage:
        """A storage in this process's own memory, zeroed."""
        return cls(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))

    def write(self, offset: int, data: memoryview) -> None:
        """What a one-sided write of (offset, bytes) does, in this process."""
        self._flat[offset : offset + len(data)] = torch.frombuffer(data, dtype=torch.uint8)


def pack_blocks(
    layout: KVLayout, layers: Sequence[LayerKV], blocks: Sequence[int], start: int = 0
) -> list[tuple[int, memoryview]]:
    """What to write where, so that keys and values [heads, n, dim] of all layers lie in a sequence's ``blocks``, from ``start`` on.

    Returns (byte offset, bytes) pairs; blocks that lie side by side are written as one. Only the n tokens' bytes are written.
    """
    assert len(layers) == layout.num_layers, f"{len(layers)} layers for a cache of {layout.num_layers}"
    tokens = layers[0][0].shape[1]
    end = start + tokens
    assert len(blocks) >= layout.blocks_for(end), f"{len(blocks)} blocks for {end} tokens"
    first = start // layout.block_tokens
    # Tokens of the first block that lie before ``start``: the bytes there are somebody's already.
    before = start - first * layout.block_tokens
    runs = _adjacent(blocks[first : layout.blocks_for(end)])
    writes: list[tuple[int, memoryview]] = []
    for layer, parts in enumerate(layers):
        for part, tensor in enumerate(parts):
            heads, count, dim = tensor.shape
            assert (heads, dim) == layout.parts[part], f"layer {layer} gives {tuple(tensor.shape)}"
            assert count == tokens, f"layer {layer} holds {count} tokens, layer 0 {tokens}"
            rows = tensor.transpose(0, 1).to(layout.torch_dtype).contiguous().view(tokens, -1)
            data = rows.view(torch.uint8).numpy().data.cast("B")
            skipped = before * layout.row_nbytes(part)
            for index, length, block in runs:
                from_byte = max(index * layout.block_nbytes(part) - skipped, 0)
                to_byte = min((index + length) * layout.block_nbytes(part) - skipped, len(data))
                offset = layout.block_offset(layer, block, part) + (skipped if index == 0 else 0)
                writes.append((offset, data[from_byte:to_byte]))
    return writes


def block_spans(layout: KVLayout, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(byte offset, bytes) of whole blocks in every plane; those that lie side by side are one."""
    runs = _adjacent(blocks)
    return [
        (layout.block_offset(layer, block, part), length * layout.block_nbytes(part))
        for layer in range(layout.num_layers)
        for part in (KEYS, VALUES)
        for _, length, block in runs
    ]


def _adjacent(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of consecutive block numbers: (index of the first, length, block number of the first)."""
    runs: list[tuple[int, int, int]] = []
    for index, block in enumerate(blocks):
        if runs and block == runs[-1][2] + runs[-1][1]:
            first, length, start = runs[-1]
            runs[-1] = (first, length + 1, start)
        else:
            runs.append((index, 1, block))
    return runs


class _State(IntEnum):
    FREE = 0
    HELD = 1
    QUARANTINED = 2


class BlockAllocator:
    """Who holds which block: pure bookkeeping, lowest numbers first, so that a sequence's blocks tend to lie side by side.

    Blocks of an aborted request that a prefill worker may still write are quarantined: not free until it says done.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "no blocks"
        self._free = list(range(num_blocks))
        self._state = np.full(num_blocks, _State.FREE, dtype=np.int8)

    @property
    def num_blocks(self) -> int:
        return int(self._state.size)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return int(np.count_nonzero(self._state == _State.QUARANTINED))

    @property
    def usage(self) -> float:
        """Share of blocks that are not free, 0…1."""
        return 1.0 - self.num_free / self.num_blocks

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes ``count`` free blocks. Raises ``KVCacheFull``, and takes none, when there are fewer."""
        if count > len(self._free):
            raise KVCacheFull(needed=count, free=len(self._free), total=self.num_blocks)
        blocks = tuple(heapq.heappop(self._free) for _ in range(count))
        self._state[list(blocks)] = _State.HELD
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Gives back held blocks."""
        self._move(blocks, _State.HELD, _State.FREE)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Sets held blocks aside: somebody may still write them."""
        self._move(blocks, _State.HELD, _State.QUARANTINED)

    def release(self, blocks: Iterable[int]) -> None:
        """Frees quarantined blocks: their writer is done, or its epoch has ended."""
        self._move(blocks, _State.QUARANTINED, _State.FREE)

    def _move(self, blocks: Iterable[int], before: _State, after: _State) -> None:
        moved = list(blocks)
        assert len(set(moved)) == len(moved), f"blocks named twice: {moved}"
        wrong = [b for b in moved if not 0 <= b < self.num_blocks or self._state[b] != before]
        assert not wrong, f"blocks {wrong} are not {before.name.lower()}"
        self._state[moved] = after
        if after is _State.FREE:
            for block in moved:
                heapq.heappush(self._free, block)
