"""Expert weights of one FFN worker in its GPU's memory: one allocation for each layer, laid out as ``StoreShape`` says.

The worker's region in host memory holds no weights but the table of handles (``device/cuda/ipc.py``) with which others open those
allocations. A copy is a few spans of device memory that the driver moves; where one GPU cannot reach another, they go through
pinned host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from afore.core.errors import HostError, WireError
from afore.core.slots import EMPTY, StoreLayout
from afore.core.topology import FFN, member_name
from afore.workers.device.cuda.copies import SpanCopy
from afore.workers.device.cuda.driver import Driver, Span
from afore.workers.device.cuda.errors import CudaError
from afore.workers.device.cuda.ipc import HandleTable, OpenedMemory
from afore.workers.device.cuda.memory import DeviceMemory, address_of
from afore.workers.device.cuda.pinned import PinnedRegions
from afore.workers.experts import ExpertRow, Progress, Reader, primary_row
from afore.workers.store_shape import StoreShape

_log = logging.getLogger(__name__)

SHARED_NBYTES = 2 << 20
"""Smaller allocations share a block of the driver's, and a handle opens the whole block."""
LayerBiases = tuple[torch.Tensor, torch.Tensor] | None
"""gate_up [S, 2I] and down [S, D]."""


def region_nbytes(shape: StoreShape, *, readable: bool = False) -> int:
    """Bytes of the region in host memory. ``readable``: workers of other machines read primaries out of it."""
    return HandleTable.nbytes(shape.num_layers) + (shape.nbytes if readable else 0)


def handles(buffer: memoryview, shape: StoreShape) -> memoryview:
    """The table in a region, which stands behind the weights where there are any."""
    return buffer[buffer.nbytes - region_nbytes(shape) :]


class FarPeer:
    """Primaries of a worker of another machine, in host memory of this one, where they are before a copy names them."""

    staged = False

    def __init__(
        self, buffer: memoryview, shape: StoreShape, layout: StoreLayout, driver: Driver, drain: Callable[[], None]
    ) -> None:
        """``buffer``: memory laid out as the peer's region. Raises ``WireError`` for one without weights."""
        name = member_name(FFN, layout.rank)
        if buffer.nbytes < region_nbytes(shape, readable=True):
            raise WireError(
                name,
                "its experts cannot be read from other machines",
                "name the machines in topology.nodes on every one of them",
            )
        self.shape = shape
        self.layout = layout
        self._drain = drain
        self._pinned = PinnedRegions(driver)
        self._at = int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
        if not self._pinned.add(buffer):
            _log.warning("experts of %s come from memory that cannot be pinned: %s", name, self._pinned.reason)

    def spans(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """(address, bytes) of a primary. Raises ``SlotError`` when that worker does not own it."""
        *parts, _checksum = self.shape.primary_spans(layer, primary_row(self.layout, expert))
        return [(self._at + offset, nbytes) for offset, nbytes in parts]

    def close(self) -> None:
        """Once no copy reads it any more. Idempotent."""
        self._drain()
        self._pinned.close()


class CudaPeer:
    """A peer's primaries, opened in this process."""

    def __init__(
        self,
        buffer: memoryview,
        shape: StoreShape,
        layout: StoreLayout,
        driver: Driver,
        *,
        ordinal: int,
        context: int,
        drain: Callable[[], None],
        process: int | None = None,
    ) -> None:
        """``ordinal``, ``context``: this worker's GPU, which ``drain`` awaits.

        Raises ``WireError``, ``CudaError``; ``HostError`` for a GPU that is hidden.
        """
        self.shape = shape
        self.layout = layout
        self._drain = drain
        self._name = member_name(FFN, layout.rank)
        if buffer.nbytes < region_nbytes(shape):
            raise WireError(
                self._name,
                "it has published no GPU memory",
                "start every FFN worker with --device cuda, on one machine",
            )
        table = HandleTable.read(handles(buffer, shape), self._name, shape.num_layers)
        self._driver = driver
        self._borrowed = -1
        """GPU whose context was opened here only to reach its memory."""
        self.staged = False
        """Whether copies out of it go through host memory."""
        source = self._find(table.gpu) if table.gpu != driver.device_uuid(ordinal) else ordinal
        reaches = source in (ordinal, -1) or driver.can_reach(ordinal, source)
        if source not in (ordinal, -1) and reaches:
            _log.info("%s is on GPU %d, which GPU %d reaches directly", self._name, source, ordinal)
        if not reaches:
            self.staged = True
            self._borrowed = source
            _log.warning(
                "GPU %d cannot reach GPU %d: copies from %s go through host memory; what they take is measured, and plans "
                "count with it",
                ordinal,
                source,
                self._name,
            )
            driver.retain_context(source)
        try:
            self._memory = OpenedMemory(driver, table, self._name, process)
        except CudaError as error:
            if source < 0:
                raise HostError(
                    "GPU",
                    f"{self._name}'s GPU cannot be seen here, and its memory cannot be opened: {error}",
                    "let every FFN worker of this machine see all of its GPUs (CUDA_VISIBLE_DEVICES), and give device.gpus",
                ) from error
            raise
        finally:
            if self.staged:
                driver.make_current(context)

    def spans(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """(address, bytes) of a primary. Raises ``SlotError`` when this worker does not own it."""
        row = primary_row(self.layout, expert)
        return row_spans(self.shape, self._memory.addresses[layer], layer, row)

    def close(self) -> None:
        """Closes what was opened, once no copy reads it any more. Idempotent."""
        self._drain()
        self._memory.close()
        if self._borrowed >= 0:
            self._driver.release_context(self._borrowed)
            self._borrowed = -1

    def _find(self, gpu: bytes) -> int:
        """The ordinal under which this process sees a GPU, -1 where it does not."""
        for ordinal in range(self._driver.device_count()):
            if self._driver.device_uuid(ordinal) == gpu:
                return ordinal
        return -1


class CudaStore:
    """This worker's experts on its GPU. ``buffer``: its region, ``region_nbytes`` long. ``stream``: where loading is enqueued.

    Where the region has room for weights, primaries stand there too, for workers of other machines.
    """

    def __init__(
        self,
        buffer: memoryview,
        shape: StoreShape,
        layout: StoreLayout,
        driver: Driver,
        memory: DeviceMemory,
        gpu: bytes,
        stream: int,
        process: int | None = None,
    ) -> None:
        """Raises ``CudaError`` where the GPU's memory does not suffice."""
        self.shape = shape
        self.layout = layout
        self._driver = driver
        self._memory = memory
        self._stream = stream
        room = -(-max(1, shape.layer_nbytes) // SHARED_NBYTES) * SHARED_NBYTES
        self._bases = [memory.allocate(room) for _ in range(shape.num_layers)]
        rows, hidden, expert = shape.num_rows, shape.hidden_size, shape.expert_size
        self.gate_up: Sequence[torch.Tensor] = self._views(shape.gate_up_offset, (rows, 2 * expert, hidden))
        self.down: Sequence[torch.Tensor] = self._views(shape.down_offset, (rows, hidden, expert))
        self.biases: Sequence[LayerBiases] = [None] * shape.num_layers
        if shape.form.biases:
            gate_up = self._views(shape.gate_up_bias_offset, (rows, 2 * expert))
            self.biases = list(zip(gate_up, self._views(shape.down_bias_offset, (rows, hidden)), strict=True))
        self._staging = 0
        self._content = [[(EMPTY, EMPTY)] * shape.num_redundant for _ in range(shape.num_layers)]
        allocations = [(base, room) for base in self._bases]
        self._readable = None
        if buffer.nbytes >= region_nbytes(shape, readable=True):
            self._readable = np.frombuffer(buffer, dtype=np.uint8)
        HandleTable.export(driver, gpu, allocations, process).write(handles(buffer, shape))

    def load(self, reader: Reader, progress: Progress | None = None) -> None:
        """Fills all primaries."""
        for done, total in self.load_each(reader):
            if progress is not None:
                progress(done, total)

    def load_each(self, reader: Reader) -> Iterator[tuple[int, int]]:
        """``load``, one expert at a time: yields (experts read, experts in all) after each."""
        primaries = self.layout.primary_experts
        total = self.shape.num_layers * len(primaries)
        row, spans = self._pinned_row()
        event = self._driver.create_event()
        try:
            for layer in range(self.shape.num_layers):
                for index, expert in enumerate(primaries):
                    reader(layer, expert, row)
                    self._keep_readable(layer, index, row)
                    targets = row_spans(self.shape, self._bases[layer], layer, index)
                    self._driver.copy(
                        [Span(to, at, nbytes) for (to, nbytes), (at, _) in zip(targets, spans, strict=True)],
                        self._stream,
                    )
                    self._driver.record(event, self._stream)
                    self._driver.synchronise(event)  # loading: the one pinned row is filled anew
                    yield layer * len(primaries) + index + 1, total
        finally:
            self._driver.destroy_event(event)

    def _keep_readable(self, layer: int, index: int, row: ExpertRow) -> None:
        if self._readable is not None:
            *offsets, _checksum = self.shape.primary_spans(layer, index)
            for part, (offset, nbytes) in zip(row.parts, offsets, strict=True):
                self._readable[offset : offset + nbytes] = part.reshape(-1).view(np.uint8)

    def content(self, layer: int, slot: int) -> tuple[int, int]:
        """(expert, generation) of the last copy that was enqueued into a redundant slot; ``EMPTY`` before any."""
        return self._content[layer][slot]

    def copy_closure(
        self, layer: int, expert: int, slot: int, source: CudaPeer | FarPeer, generation: int = 0
    ) -> tuple[int, Callable[[], None]]:
        """(bytes, what copies them): see ``Store``. The closure is a ``SpanCopy`` for the device's stream."""
        row = self.layout.redundant_row(slot)
        targets = row_spans(self.shape, self._bases[layer], layer, row)
        spans = tuple(
            Span(to, at, nbytes) for (to, nbytes), (at, _) in zip(targets, source.spans(layer, expert), strict=True)
        )
        if source.staged and not self._staging:
            self._staging = address_of(self._memory.pinned((self.shape.expert_nbytes,), np.uint8))
        issued = partial(self._issued, layer, slot, expert, generation)
        return self.shape.expert_nbytes, SpanCopy(spans, self._staging if source.staged else 0, issued)

    def close(self) -> None:
        """Drops all views; the memory is freed with the worker's. Idempotent."""
        self.gate_up = self.down = self.biases = ()
        self._readable = None

    def _issued(self, layer: int, slot: int, expert: int, generation: int) -> None:
        self._content[layer][slot] = (expert, generation)

    def _views(self, offset: Callable[[int], int], shape: tuple[int, ...]) -> list[torch.Tensor]:
        within = [offset(layer) - layer * self.shape.layer_nbytes for layer in range(self.shape.num_layers)]
        return [
            self._memory.view(base + at, shape, torch.float32) for base, at in zip(self._bases, within, strict=True)
        ]

    def _pinned_row(self) -> tuple[ExpertRow, list[tuple[int, int]]]:
        """A row in pinned memory that readers fill, and (address, bytes) of its parts."""
        hidden, expert = self.shape.hidden_size, self.shape.expert_size
        shapes: list[tuple[int, ...]] = [(2 * expert, hidden), (hidden, expert)]
        if self.shape.form.biases:
            shapes += [(2 * expert,), (hidden,)]
        parts: list[Any] = [self._memory.pinned(shape, np.float32) for shape in shapes]
        return ExpertRow(*parts), [(address_of(part), part.nbytes) for part in parts]


def row_spans(shape: StoreShape, base: int, layer: int, row: int) -> list[tuple[int, int]]:
    """(address, bytes) of everything that belongs to an expert in ``row`` of a layer whose allocation begins at ``base``."""
    first = layer * shape.layer_nbytes
    *parts, _checksum = shape.primary_spans(layer, row)
    return [(base + offset - first, nbytes) for offset, nbytes in parts]
