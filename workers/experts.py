"""Expert weights of one FFN worker, in one buffer that its peers can map and copy from.

Per MoE layer the buffer holds one contiguous pair over S rows (primaries in rising expert order, then redundant slots):
``gate_up`` [S, 2I, D] (rows 0…I-1 gate, I…2I-1 up) and ``down`` [S, D, I], float32; experts of a form with biases have them behind:
``gate_up_bias`` [S, 2I] and ``down_bias`` [S, D]. Behind all layers lies a table of the primaries'
checksums [L, primaries], written when they are loaded. Where everything lies follows from the shape alone, so a peer that
knows primaries, R, L, D, I and the form finds any expert in a mapped buffer. Primaries never move and are never written again.

Whatever is coupled to an expert is part of ``ExpertRow`` and moves together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from afore.core.errors import SlotError
from afore.core.slots import EMPTY, StoreLayout
from afore.transport.api import Buffer
from afore.workers.device.base import F32
from afore.workers.store_shape import ALIGNMENT, StoreShape

Progress = Callable[[int, int], None]
"""(experts read, experts in all)."""


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """Views of everything that belongs to one expert in one row of a store."""

    gate_up_FD: F32
    down_DI: F32
    gate_up_bias_F: F32 | None = None
    """With ``down_bias_D``, where the form has biases."""
    down_bias_D: F32 | None = None

    @property
    def parts(self) -> Iterator[F32]:
        """All of it."""
        yield self.gate_up_FD
        yield self.down_DI
        if self.gate_up_bias_F is not None:
            assert self.down_bias_D is not None, "one bias without the other"
            yield self.gate_up_bias_F
            yield self.down_bias_D

    def copy_from(self, source: ExpertRow) -> None:
        """A memory copy a part; the GIL is released for large ones."""
        for mine, theirs in zip(self.parts, source.parts, strict=True):
            np.copyto(mine, theirs)

    def checksum(self) -> int:
        """CRC-32 over all of it, never 0, so that an empty table entry is not a checksum."""
        crc = 0
        for part in self.parts:
            crc = zlib.crc32(part.data, crc)
        return crc or 1


Reader = Callable[[int, int, ExpertRow], None]
"""(layer, expert, row to fill): reads one expert from a checkpoint."""


class Biases(NamedTuple):
    """Of one layer; without rows where the form has none."""

    gate_up_SF: F32
    """[S, 2I], or [0, 2I]."""
    down_SD: F32
    """[S, D], or [0, D]."""


class _Weights:
    """Typed views of a store's buffer, own or mapped."""

    def __init__(self, buffer: Buffer, shape: StoreShape) -> None:
        nbytes = memoryview(buffer).nbytes
        if nbytes < shape.nbytes:
            raise ValueError(f"an expert store of {shape.nbytes} bytes does not fit in a buffer of {nbytes}")
        rows, hidden, expert = shape.num_rows, shape.hidden_size, shape.expert_size
        self._biased = shape.form.biases
        self.gate_up: list[F32] = []
        self.down: list[F32] = []
        self.biases: list[Biases] = []
        biased = shape.bias_rows
        for layer in range(shape.num_layers):
            self.gate_up.append(_view(buffer, shape.gate_up_offset(layer), (rows, 2 * expert, hidden), np.float32))
            self.down.append(_view(buffer, shape.down_offset(layer), (rows, hidden, expert), np.float32))
            self.biases.append(
                Biases(
                    _view(buffer, shape.gate_up_bias_offset(layer), (biased, 2 * expert), np.float32),
                    _view(buffer, shape.down_bias_offset(layer), (biased, hidden), np.float32),
                )
            )
        table_shape = (shape.num_layers, shape.num_primaries)
        self.checksums_LP: npt.NDArray[np.uint32] = _view(buffer, shape.checksums_offset, table_shape, np.uint32)

    def row(self, layer: int, row: int) -> ExpertRow:
        weights = self.gate_up[layer][row], self.down[layer][row]
        biases = self.biases[layer]
        return ExpertRow(*weights, biases.gate_up_SF[row], biases.down_SD[row]) if self._biased else ExpertRow(*weights)


class PeerStore:
    """A peer's primaries, read-only, in its mapped buffer (or in one's own)."""

    def __init__(self, buffer: Buffer, shape: StoreShape, layout: StoreLayout) -> None:
        self.shape = shape
        self.layout = layout
        self._weights = _Weights(memoryview(buffer).toreadonly(), shape)

    def primary(self, layer: int, expert: int) -> ExpertRow:
        """Views of a primary. Raises ``SlotError`` when this worker does not own it."""
        return self._weights.row(layer, primary_row(self.layout, expert))

    def checksum(self, layer: int, expert: int) -> int:
        """The checksum that the owner took when it loaded the primary; 0 before that."""
        return int(self._weights.checksums_LP[layer, primary_row(self.layout, expert)])

    def close(self) -> None:
        """Drops the views, so that the mapping can be closed. Idempotent."""
        self._weights = _Weights(bytes(ALIGNMENT), _NOTHING)


class Store(Protocol):
    """What a worker does with its experts, real (``ExpertStore``) or emulated (``TaggedStore``)."""

    @property
    def shape(self) -> StoreShape: ...

    @property
    def layout(self) -> StoreLayout: ...

    @property
    def gate_up(self) -> Sequence[Any]:
        """Of each layer: what ``Kernels.grouped_mlp`` takes."""
        ...

    @property
    def down(self) -> Sequence[Any]: ...

    @property
    def biases(self) -> Sequence[Any]: ...

    def load(self, reader: Reader, progress: Progress | None = None) -> None:
        """Fills all primaries."""
        ...

    def content(self, layer: int, slot: int) -> tuple[int, int]:
        """(expert, generation) of the newest copy into a redundant slot."""
        ...

    def copy_closure(
        self, layer: int, expert: int, slot: int, source: Any, generation: int = 0
    ) -> tuple[int, Callable[[], None]]:
        """(bytes, what copies them). ``source`` is the owner's ``PeerStore`` or ``TaggedPeer``, as this store is."""
        ...

    def close(self) -> None: ...


class ExpertStore:
    """This worker's experts in ``buffer`` (a region's memory, zero at first, at least ``shape.nbytes`` long)."""

    def __init__(self, buffer: Buffer, shape: StoreShape, layout: StoreLayout, *, verify_copies: bool = False) -> None:
        if (shape.num_primaries, shape.num_redundant) != (len(layout.primary_experts), layout.num_redundant):
            raise ValueError(f"shape {shape} is not that of worker {layout.rank}'s layout; use StoreShape.of(layout)")
        self.shape = shape
        self.layout = layout
        self._verify_copies = verify_copies
        self._weights = _Weights(buffer, shape)
        self._content = [[(EMPTY, EMPTY)] * shape.num_redundant for _ in range(shape.num_layers)]

    @property
    def gate_up(self) -> Sequence[F32]:
        """Of each layer, [S, 2I, D]."""
        return self._weights.gate_up

    @property
    def down(self) -> Sequence[F32]:
        """Of each layer, [S, D, I]."""
        return self._weights.down

    @property
    def biases(self) -> Sequence[Biases]:
        """Of each layer; empty ones where the form has none."""
        return self._weights.biases

    def load(self, reader: Reader, progress: Progress | None = None) -> None:
        """Fills all primaries and takes their checksums; redundant rows stay as they are."""
        for _ in self.load_each(reader, progress):
            pass

    def load_each(self, reader: Reader, progress: Progress | None = None) -> Iterator[tuple[int, int]]:
        """``load``, one expert at a time: yields (experts read, experts in all) after each, for a loop with other things to do."""
        primaries = self.layout.primary_experts
        total = self.shape.num_layers * len(primaries)
        for layer in range(self.shape.num_layers):
            for row, expert in enumerate(primaries):
                weights = self._weights.row(layer, row)
                reader(layer, expert, weights)
                self._weights.checksums_LP[layer, row] = weights.checksum()
                done = layer * len(primaries) + row + 1
                if progress is not None:
                    progress(done, total)
                yield done, total

    def checksum(self, layer: int, row: int) -> int:
        """CRC-32 of a row as it is now. A row that is being written has no meaningful one."""
        return self._weights.row(layer, row).checksum()

    def verify(self, layer: int, row: int, expected: int) -> None:
        """Raises ``SlotError`` when a row's bytes are not those that ``expected`` was taken of."""
        found = self.checksum(layer, row)
        if found != expected:
            raise SlotError(
                f"ffn-{self.layout.rank}: layer {layer} row {row} has checksum {found:#010x}, expected {expected:#010x}: "
                "its expert was not copied whole, or its source was not loaded"
            )

    def verify_primaries(self) -> None:
        """Raises ``SlotError`` when a primary's bytes are not those that were loaded."""
        for layer in range(self.shape.num_layers):
            for row in range(self.shape.num_primaries):
                self.verify(layer, row, int(self._weights.checksums_LP[layer, row]))

    def content(self, layer: int, slot: int) -> tuple[int, int]:
        """(expert, generation) whose copy into a redundant slot was the last to finish; ``EMPTY`` before any."""
        return self._content[layer][slot]

    def copy_closure(
        self, layer: int, expert: int, slot: int, source: PeerStore, generation: int = 0
    ) -> tuple[int, Callable[[], None]]:
        """(bytes, what copies them): fills redundant ``slot`` with ``expert`` from its primary in ``source``.

        The closure raises ``SlotError`` where copies are verified and the bytes are not the owner's.
        """
        row = self.layout.redundant_row(slot)
        source.primary(layer, expert)  # refuses now what would fail on a stream
        return self.shape.expert_nbytes, partial(self._copy, layer, expert, slot, row, source, generation)

    def _copy(self, layer: int, expert: int, slot: int, row: int, source: PeerStore, generation: int) -> None:
        self._weights.row(layer, row).copy_from(source.primary(layer, expert))
        if self._verify_copies:
            self.verify(layer, row, source.checksum(layer, expert))
        self._content[layer][slot] = (expert, generation)

    def close(self) -> None:
        """Drops all views, so that the region can be closed; kernels must not run any more. Idempotent."""
        self._weights = _Weights(bytes(ALIGNMENT), _NOTHING)


def primary_row(layout: StoreLayout, expert: int) -> int:
    """Row of an expert's primary. Raises ``SlotError`` when that worker does not own it."""
    row = int(layout.row_E[expert]) if 0 <= expert < layout.row_E.shape[0] else -1
    if row < 0:
        raise SlotError(f"ffn-{layout.rank} does not own expert {expert}: copies come from the fixed primary")
    return row


_NOTHING = StoreShape(num_layers=0, num_primaries=0, num_redundant=0, hidden_size=1, expert_size=1)


def _view(buffer: Buffer, offset: int, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
    count = math.prod(shape)
    return np.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(shape)
