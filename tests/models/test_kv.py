from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from afore.core.errors import KVCacheFull
from afore.models.checkpoint import Checkpoint
from afore.models.kv import KEYS, VALUES, BlockAllocator, KVLayout, KVStorage, pack_blocks
from afore.models.paged import PagedCache, step_slots

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5))
layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 3),
    num_blocks=st.integers(1, 7),
    block_tokens=st.integers(1, 5),
    parts=st.tuples(shapes, shapes),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@given(layouts)
def test_blocks_of_a_layout_do_not_overlap_and_fill_no_more_than_the_buffer(layout: KVLayout) -> None:
    spans = sorted(
        (layout.block_offset(layer, block, part), layout.block_nbytes(part))
        for layer in range(layout.num_layers)
        for part in (KEYS, VALUES)
        for block in range(layout.num_blocks)
    )
    for (offset, length), (following, _) in pairwise(spans):
        assert offset + length <= following
    assert spans[-1][0] + spans[-1][1] <= layout.nbytes


@given(layouts, st.data())
def test_packed_blocks_are_where_the_cache_reads_them(layout: KVLayout, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, layout.num_blocks * layout.block_tokens))
    blocks = data.draw(st.permutations(range(layout.num_blocks)))
    generator = torch.Generator().manual_seed(tokens)
    layers = [
        tuple(torch.randn(heads, tokens, dim, generator=generator) for heads, dim in layout.parts)
        for _ in range(layout.num_layers)
    ]
    storage = KVStorage.allocate(layout)
    written = 0
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=3))})
    for start, end in pairwise(cuts):
        chunk = [(keys[:, start:end], values[:, start:end]) for keys, values in layers]
        for offset, piece in pack_blocks(layout, chunk, blocks, start):
            storage.write(offset, piece)
            written += len(piece)
    assert written == layout.num_layers * tokens * (layout.row_nbytes(KEYS) + layout.row_nbytes(VALUES))
    slots = [blocks[p // layout.block_tokens] * layout.block_tokens + p % layout.block_tokens for p in range(tokens)]
    for layer, parts in enumerate(layers):
        for part, tensor in enumerate(parts):
            rows = storage.planes[layer][part][slots]
            assert torch.equal(rows, tensor.transpose(0, 1).reshape(tokens, -1).to(layout.torch_dtype))


def test_blocks_that_lie_side_by_side_are_written_as_one() -> None:
    layout = KVLayout(num_layers=1, num_blocks=8, block_tokens=2, parts=((1, 4), (1, 4)))
    layers = [(torch.ones(1, 7, 4), torch.ones(1, 7, 4))]
    writes = pack_blocks(layout, layers, (2, 3, 4, 6))
    assert [(offset, len(data)) for offset, data in writes[:2]] == [(2 * 32, 3 * 32), (6 * 32, 16)]
    assert len(writes) == 4


def test_a_storage_over_someone_elses_buffer_writes_through() -> None:
    layout = KVLayout(num_layers=1, num_blocks=2, block_tokens=2, parts=((1, 1), (1, 1)))
    region = bytearray(layout.nbytes + 10)
    storage = KVStorage(layout, memoryview(region))
    storage.planes[0][VALUES][3, 0] = 1.5
    offset = layout.block_offset(0, 1, VALUES) + layout.row_nbytes(VALUES)
    assert np.frombuffer(region, np.float32, 1, offset)[0] == 1.5


def test_a_layout_follows_the_models_shapes(bundled: Checkpoint) -> None:
    layout = KVLayout.for_model(bundled.spec, num_blocks=4, block_tokens=16)
    assert layout.nbytes == 4 * 2 * (4 * 16) * (2 * 32) * 4
    assert [layout.blocks_for(n) for n in (1, 16, 17)] == [1, 1, 2]


steps = st.lists(st.integers(0, 30), min_size=1, max_size=6)


@given(steps, st.integers(1, 6))
def test_step_slots_equal_a_plain_count(positions: list[int], block_tokens: int) -> None:
    rng = np.random.default_rng(len(positions) * 31 + block_tokens)
    width = max(positions) // block_tokens + 1 + int(rng.integers(0, 3))
    tables_TB = rng.permutation(len(positions) * width).astype(np.int32).reshape(len(positions), width)
    slots = step_slots(block_tokens, tables_TB, np.asarray(positions, dtype=np.int64))

    def slot(row: int, position: int) -> int:
        return int(tables_TB[row, position // block_tokens]) * block_tokens + position % block_tokens

    longest = max(positions) + 1
    assert slots.longest == longest
    assert slots.write_T.tolist() == [slot(row, position) for row, position in enumerate(positions)]
    visible = [[p <= position for p in range(longest)] for position in positions]
    for window in (None, 1, 3, 100):
        mask = slots.mask(window)
        seen = [
            [see and (window is None or p > position - window) for p, see in enumerate(row)]
            for row, position in zip(visible, positions, strict=True)
        ]
        assert (mask is None) == all(map(all, seen))
        assert mask is None or mask[:, 0, 0].tolist() == seen
    expected = [slot(row, p if p <= position else 0) for row, position in enumerate(positions) for p in range(longest)]
    assert slots.read_X.tolist() == expected


@pytest.mark.slow
@given(steps, st.sampled_from(["float32", "bfloat16"]))
def test_the_cache_returns_every_rows_own_history(positions: list[int], dtype: str) -> None:
    """Rows decode from position 0 on, each at its own pace; what update returns is what a growing list would hold."""
    blocks_each = 31 // 4 + 1
    layout = KVLayout(
        num_layers=2, num_blocks=blocks_each * len(positions), block_tokens=4, parts=((2, 3), (1, 2)), dtype=dtype
    )
    storage = KVStorage.allocate(layout)
    storage.planes[1][KEYS].fill_(float("nan"))
    storage.planes[1][VALUES].fill_(float("nan"))
    order = np.random.default_rng(len(positions)).permutation(layout.num_blocks).astype(np.int32)
    tables_TB = order.reshape(len(positions), blocks_each)
    history: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in positions]
    for position in range(max(positions) + 1):
        rows = [row for row, last in enumerate(positions) if position <= last]
        at = np.full(len(rows), position, dtype=np.int64)
        cache = PagedCache(storage, step_slots(4, tables_TB[rows], at))
        keys = torch.randn(len(rows), 2, 1, 3).to(layout.torch_dtype).float()
        values = torch.randn(len(rows), 1, 1, 2).to(layout.torch_dtype).float()
        for index, row in enumerate(rows):
            history[row].append((keys[index, :, 0], values[index, :, 0]))
        all_keys, all_values = cache.update(keys, values, 1)
        for index, row in enumerate(rows):
            assert torch.equal(all_keys[index], torch.stack([k for k, _ in history[row]], dim=1))
            assert torch.equal(all_values[index], torch.stack([v for _, v in history[row]], dim=1))


class Allocations(RuleBasedStateMachine):
    """Any order of allocations, frees and quarantines: no block has two holders, none is lost."""

    held = Bundle("held")
    set_aside = Bundle("set_aside")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(12)
        self.holders: dict[int, str] = {}

    @rule(target=held, count=st.integers(0, 8))
    def allocate(self, count: int) -> tuple[int, ...]:
        free = 12 - len(self.holders)
        if count > free:
            with pytest.raises(KVCacheFull, match=f"{count} blocks needed, {free} of 12 free"):
                self.allocator.allocate(count)
            return ()
        blocks = self.allocator.allocate(count)
        assert len(blocks) == count
        assert not self.holders.keys() & set(blocks), "somebody has it"
        self.holders.update(dict.fromkeys(blocks, "held"))
        return blocks

    @rule(blocks=consumes(held))
    def free(self, blocks: tuple[int, ...]) -> None:
        self.allocator.free(blocks)
        self._drop(blocks)

    @rule(target=set_aside, blocks=consumes(held))
    def quarantine(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        self.allocator.quarantine(blocks)
        self.holders.update(dict.fromkeys(blocks, "quarantined"))
        return blocks

    @rule(blocks=consumes(set_aside))
    def release(self, blocks: tuple[int, ...]) -> None:
        self.allocator.release(blocks)
        self._drop(blocks)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.allocator.num_free == 12 - len(self.holders)
        assert self.allocator.num_quarantined == list(self.holders.values()).count("quarantined")
        assert self.allocator.usage == pytest.approx(len(self.holders) / 12)

    def _drop(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            del self.holders[block]


TestAllocations = pytest.mark.slow(Allocations.TestCase)


def test_a_block_is_not_freed_twice_nor_while_quarantined() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.quarantine(blocks[:1])
    with pytest.raises(AssertionError, match="not held"):
        allocator.free(blocks)
    allocator.free(blocks[1:])
    with pytest.raises(AssertionError, match="not held"):
        allocator.free(blocks[1:])
    with pytest.raises(AssertionError, match="not quarantined"):
        allocator.release(blocks[1:])
    assert allocator.allocate(3) == (1, 2, 3)
