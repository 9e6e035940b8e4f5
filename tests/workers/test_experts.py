"""Expert stores: layout of the shared buffer, loading, checksums, copies from peers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import SlotError
from afore.core.slots import EMPTY, contiguous_primaries
from afore.models.expert_form import SILU_GATED, Activation, ExpertForm
from afore.workers.device.base import F32
from afore.workers.experts import ExpertRow, ExpertStore, PeerStore
from afore.workers.store_shape import ALIGNMENT, StoreShape, store_shapes

LAYERS, HIDDEN, EXPERT = 2, 6, 4
BIASED = ExpertForm(activation=Activation.CLAMPED, biases=True)


def _read(layer: int, expert: int, row: ExpertRow) -> None:
    generator = np.random.default_rng((layer, expert))
    for part in row.parts:
        part[:] = generator.random(part.shape)


class _World:
    """N stores, each in a buffer of its own, all loaded, and every store's view of every peer."""

    def __init__(
        self, num_experts: int, slots_N: list[int], *, verify_copies: bool = False, form: ExpertForm = SILU_GATED
    ) -> None:
        self.primaries_E = contiguous_primaries(num_experts, len(slots_N))
        shapes = store_shapes(
            self.primaries_E, slots_N, num_layers=LAYERS, hidden_size=HIDDEN, expert_size=EXPERT, form=form
        )
        self.buffers = [bytearray(shape.nbytes) for _, shape in shapes]
        self.stores = [
            ExpertStore(buffer, shape, layout, verify_copies=verify_copies)
            for buffer, (layout, shape) in zip(self.buffers, shapes, strict=True)
        ]
        self.peers = [
            PeerStore(memoryview(buffer), shape, layout)
            for buffer, (layout, shape) in zip(self.buffers, shapes, strict=True)
        ]

    def load(self) -> None:
        for store in self.stores:
            store.load(_read)

    def copy(self, layer: int, expert: int, worker: int, slot: int, generation: int = 0) -> int:
        source = self.peers[int(self.primaries_E[expert])]
        nbytes, do = self.stores[worker].copy_closure(layer, expert, slot, source, generation)
        do()
        return nbytes


def _expected(layer: int, expert: int) -> tuple[F32, F32]:
    gate_up_FD = np.empty((2 * EXPERT, HIDDEN), dtype=np.float32)
    down_DI = np.empty((HIDDEN, EXPERT), dtype=np.float32)
    _read(layer, expert, ExpertRow(gate_up_FD, down_DI))
    return gate_up_FD, down_DI


@given(
    st.builds(
        StoreShape,
        num_layers=st.integers(0, 4),
        num_primaries=st.integers(0, 5),
        num_redundant=st.integers(0, 4),
        hidden_size=st.integers(1, 33),
        expert_size=st.integers(1, 17),
        form=st.sampled_from([SILU_GATED, BIASED]),
    )
)
def test_nothing_in_the_buffer_overlaps_and_all_is_aligned(shape: StoreShape) -> None:
    weights = shape.num_rows * shape.hidden_size * shape.expert_size * 4
    pieces = []
    for layer in range(shape.num_layers):
        pieces.append((shape.gate_up_offset(layer), 2 * weights))
        pieces.append((shape.down_offset(layer), weights))
        if shape.form.biases:
            pieces.append((shape.gate_up_bias_offset(layer), shape.num_rows * 2 * shape.expert_size * 4))
            pieces.append((shape.down_bias_offset(layer), shape.num_rows * shape.hidden_size * 4))
    pieces.append((shape.checksums_offset, shape.num_layers * shape.num_primaries * 4))
    assert all(offset % ALIGNMENT == 0 for offset, _ in pieces)
    assert all(offset + nbytes <= following for (offset, nbytes), (following, _) in pairwise(pieces))
    assert sum(pieces[-1]) <= shape.nbytes
    assert shape.nbytes > 0


def test_primaries_are_loaded_and_redundant_rows_stay_zero() -> None:
    world = _World(5, [2, 1])
    seen: list[tuple[int, int]] = []
    store = world.stores[0]
    store.load(_read, lambda done, total: seen.append((done, total)))
    assert store.layout.primary_experts == (0, 1, 2)
    assert seen == [(done, LAYERS * 3) for done in range(1, LAYERS * 3 + 1)]
    for layer in range(LAYERS):
        assert store.gate_up[layer].shape == (5, 2 * EXPERT, HIDDEN)
        assert store.down[layer].shape == (5, HIDDEN, EXPERT)
        assert store.gate_up[layer].flags.c_contiguous
        assert store.down[layer].flags.c_contiguous
        for row, expert in enumerate(store.layout.primary_experts):
            gate_up_FD, down_DI = _expected(layer, expert)
            np.testing.assert_array_equal(store.gate_up[layer][row], gate_up_FD)
            np.testing.assert_array_equal(store.down[layer][row], down_DI)
        assert not store.gate_up[layer][3:].any()
        assert not store.down[layer][3:].any()
    store.verify_primaries()


def test_a_copy_brings_everything_of_the_expert_and_nothing_else() -> None:
    world = _World(5, [2, 2], verify_copies=True)
    world.load()
    before = bytes(world.buffers[0])
    assert world.stores[0].content(1, 1) == (EMPTY, EMPTY)
    nbytes = world.copy(1, 4, worker=0, slot=1, generation=9)
    assert nbytes == 3 * HIDDEN * EXPERT * 4
    gate_up_FD, down_DI = _expected(1, 4)
    row = world.stores[0].layout.redundant_row(1)
    np.testing.assert_array_equal(world.stores[0].gate_up[1][row], gate_up_FD)
    np.testing.assert_array_equal(world.stores[0].down[1][row], down_DI)
    assert world.stores[0].content(1, 1) == (4, 9)
    changed = sum(a != b for a, b in zip(before, world.buffers[0], strict=True))
    assert 0 < changed <= nbytes
    world.stores[0].verify(1, row, world.peers[1].checksum(1, 4))
    world.stores[0].verify_primaries()


def test_biases_move_with_their_expert() -> None:
    world = _World(5, [2, 2], verify_copies=True, form=BIASED)
    world.load()
    assert world.copy(1, 4, worker=0, slot=1) == (3 * HIDDEN * EXPERT + 2 * EXPERT + HIDDEN) * 4
    row = world.stores[0].layout.redundant_row(1)
    owned = world.peers[1].primary(1, 4)
    assert owned.gate_up_bias_F is not None
    assert owned.down_bias_D is not None
    assert owned.gate_up_bias_F.all()
    assert owned.down_bias_D.all()
    gate_up_SF, down_SD = world.stores[0].biases[1]
    np.testing.assert_array_equal(gate_up_SF[row], owned.gate_up_bias_F)
    np.testing.assert_array_equal(down_SD[row], owned.down_bias_D)
    world.stores[0].verify_primaries()
    world.stores[0].biases[1].down_SD[0, HIDDEN - 1] += 1
    with pytest.raises(SlotError, match="ffn-0: layer 1 row 0"):
        world.stores[0].verify_primaries()


def test_one_may_copy_from_oneself() -> None:
    world = _World(2, [1])
    world.load()
    world.copy(0, 1, worker=0, slot=0)
    np.testing.assert_array_equal(world.stores[0].gate_up[0][2], world.stores[0].gate_up[0][1])


def test_more_workers_than_experts() -> None:
    world = _World(2, [1, 1, 0, 1])
    world.load()
    assert [store.shape.num_primaries for store in world.stores] == [1, 0, 1, 0]
    world.copy(0, 1, worker=3, slot=0)
    world.stores[3].verify(0, 0, world.peers[2].checksum(0, 1))


def test_a_copy_that_is_not_the_owners_bytes_is_convicted() -> None:
    world = _World(4, [1, 1], verify_copies=True)
    world.load()
    world.stores[1].gate_up[0][0, 0, 0] += 1
    with pytest.raises(SlotError, match=r"ffn-0: layer 0 row 2 has checksum 0x[0-9a-f]{8}, expected 0x[0-9a-f]{8}"):
        world.copy(0, 2, worker=0, slot=0)
    assert world.stores[0].content(0, 0) == (EMPTY, EMPTY)
    with pytest.raises(SlotError, match="ffn-1: layer 0 row 0"):
        world.stores[1].verify_primaries()


def test_copying_what_was_never_loaded_is_convicted() -> None:
    world = _World(4, [1, 1], verify_copies=True)
    assert world.peers[1].checksum(0, 2) == 0
    with pytest.raises(SlotError, match="its source was not loaded"):
        world.copy(0, 2, worker=0, slot=0)


def test_a_copy_from_someone_who_does_not_own_the_expert_is_refused_at_once() -> None:
    world = _World(4, [1, 1])
    for expert in (2, 4, -1):
        with pytest.raises(SlotError, match=f"ffn-0 does not own expert {expert}"):
            world.stores[1].copy_closure(0, expert, 0, world.peers[0])


def test_a_peers_weights_cannot_be_written() -> None:
    world = _World(4, [1, 1])
    row = world.peers[0].primary(0, 0)
    with pytest.raises(ValueError, match="read-only"):
        row.gate_up_FD[0, 0] = 1


def test_a_buffer_that_is_too_small_and_a_foreign_shape_are_refused() -> None:
    (layout, shape), (_, other) = store_shapes(
        contiguous_primaries(5, 2), [1, 1], num_layers=1, hidden_size=2, expert_size=2
    )
    with pytest.raises(ValueError, match=f"{shape.nbytes} bytes does not fit in a buffer of {shape.nbytes - 1}"):
        ExpertStore(bytearray(shape.nbytes - 1), shape, layout)
    with pytest.raises(ValueError, match="not that of worker 0's layout"):
        ExpertStore(bytearray(other.nbytes), other, layout)
    with pytest.raises(ValueError, match="cannot be negative"):
        StoreShape(num_layers=1, num_primaries=1, num_redundant=-1, hidden_size=2, expert_size=2)
    with pytest.raises(ValueError, match="has no weights"):
        StoreShape(num_layers=1, num_primaries=1, num_redundant=0, hidden_size=0, expert_size=2)


def test_after_close_the_buffer_is_free() -> None:
    world = _World(4, [1])
    parts: list[ExpertStore | PeerStore] = [*world.stores, *world.peers]
    for part in parts:
        part.close()
        part.close()
    world.buffers[0].extend(b"x")  # BufferError while anything looks at it
