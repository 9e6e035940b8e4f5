"""A store without weights, for emulated worlds: it remembers who wrote and read each row when, and convicts what went wrong.

Every write leaves a tag (expert, generation) and the interval it took; every read names the expert it expects and its interval.
``check`` then looks for what must never be: a row read while it is written, read with another expert's content, or written
twice at once. It judges by the device's times, not by the order in which the host happened to run the closures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from afore.core.errors import SlotError
from afore.core.slots import EMPTY, StoreLayout
from afore.workers.device.base import I32
from afore.workers.experts import Progress, Reader, primary_row
from afore.workers.store_shape import StoreShape

LOADED = -1
"""Generation of a primary."""
_BEFORE_ALL = -1
"""When primaries are written, in nanoseconds: no clock has started."""

Interval = Callable[[], tuple[int, int]]
"""(start, end) in nanoseconds of the work that runs just now: ``EmulatedDevice.executing``."""


class _Write(NamedTuple):
    start_ns: int
    order: int
    end_ns: int
    expert: int
    generation: int

    def __str__(self) -> str:
        return f"write of expert {self.expert} (generation {self.generation}) in [{self.start_ns}, {self.end_ns}] ns"


class _Read(NamedTuple):
    start_ns: int
    order: int
    end_ns: int
    expert: int

    def __str__(self) -> str:
        return f"read of expert {self.expert} in [{self.start_ns}, {self.end_ns}] ns"


@dataclass(frozen=True, slots=True)
class TagReport:
    """What ``check`` looked at; a test asserts that it was something."""

    reads: int
    writes: int
    """Copies; the loading of primaries does not count."""
    replica_reads: int
    """Reads of redundant rows."""


class TaggedPeer:
    """A peer's primaries, as a source of copies: there is nothing to map, and primaries never change."""

    def __init__(self, shape: StoreShape, layout: StoreLayout) -> None:
        self.shape = shape
        self.layout = layout

    def close(self) -> None:
        """Nothing to drop."""


class TaggedLayer:
    """Stands where a layer's weights stand, for kernels that only look at tags."""

    def __init__(self, store: TaggedStore, layer: int) -> None:
        self._store = store
        self._layer = layer

    def read(self, expert_S: I32) -> None:
        """The work that runs just now reads every row with an expert in ``expert_S`` [S], and expects that expert there."""
        self._store.read(self._layer, expert_S)


class TaggedStore:
    """The interface of ``ExpertStore`` over tags. ``interval`` tells when the work that runs just now happens.

    ``keep``: without, nothing is noted and ``check`` finds nothing to look at: for long runs of what shorter ones have checked.
    """

    def __init__(self, shape: StoreShape, layout: StoreLayout, interval: Interval, *, keep: bool = True) -> None:
        self.shape = shape
        self.layout = layout
        self._interval = interval
        self._keep = keep
        self._order = 0
        self._writes: list[list[list[_Write]]] = [[[] for _ in range(shape.num_rows)] for _ in range(shape.num_layers)]
        self._reads: list[list[list[_Read]]] = [[[] for _ in range(shape.num_rows)] for _ in range(shape.num_layers)]
        self._layers = [TaggedLayer(self, layer) for layer in range(shape.num_layers)]

    @property
    def gate_up(self) -> Sequence[TaggedLayer]:
        """Of each layer."""
        return self._layers

    @property
    def down(self) -> Sequence[TaggedLayer]:
        """The same objects: an expert's parts move together."""
        return self._layers

    @property
    def biases(self) -> Sequence[TaggedLayer]:
        """The same objects."""
        return self._layers

    def load(self, reader: Reader | None = None, progress: Progress | None = None) -> None:
        """Tags all primaries; nothing is read."""
        total = self.shape.num_layers * self.shape.num_primaries
        for layer in range(self.shape.num_layers):
            for row, expert in enumerate(self.layout.primary_experts):
                self._writes[layer][row].append(_Write(_BEFORE_ALL, 0, _BEFORE_ALL, expert, LOADED))
                if progress is not None:
                    progress(layer * self.shape.num_primaries + row + 1, total)

    def content(self, layer: int, slot: int) -> tuple[int, int]:
        """(expert, generation) of the newest write of a redundant slot; ``EMPTY`` before any."""
        writes = self._writes[layer][self.layout.redundant_row(slot)]
        return (writes[-1].expert, writes[-1].generation) if writes else (EMPTY, EMPTY)

    def copy_closure(
        self, layer: int, expert: int, slot: int, source: TaggedPeer, generation: int = 0
    ) -> tuple[int, Callable[[], None]]:
        """(bytes a real copy would move, what tags the row)."""
        primary_row(source.layout, expert)
        if not self._keep:
            return self.shape.expert_nbytes, _note_nothing
        row = self.layout.redundant_row(slot)
        return self.shape.expert_nbytes, partial(self._write, layer, row, expert, generation)

    def _write(self, layer: int, row: int, expert: int, generation: int) -> None:
        start_ns, end_ns = self._interval()
        self._order += 1
        self._writes[layer][row].append(_Write(start_ns, self._order, end_ns, expert, generation))

    def read(self, layer: int, expert_S: I32) -> None:
        """See ``TaggedLayer.read``."""
        if not self._keep:
            return
        start_ns, end_ns = self._interval()
        reads = self._reads[layer]
        for row, expert in enumerate(expert_S.tolist()):
            if expert >= 0:
                self._order += 1
                reads[row].append(_Read(start_ns, self._order, end_ns, expert))

    def check(self) -> TagReport:
        """Raises ``SlotError`` for the first row that was used in a way that could give wrong tokens."""
        first = self.shape.num_primaries
        for layer in range(self.shape.num_layers):
            for row in range(self.shape.num_rows):
                place = f"primary {row}" if row < first else f"slot {row - first}"
                self._check_row(f"ffn-{self.layout.rank}: layer {layer} {place}", layer, row)
        replica_reads = sum(len(row) for reads in self._reads for row in reads[first:])
        return TagReport(
            reads=sum(len(row) for reads in self._reads for row in reads),
            writes=sum(write.generation != LOADED for writes in self._writes for row in writes for write in row),
            replica_reads=replica_reads,
        )

    def _check_row(self, who: str, layer: int, row: int) -> None:
        writes = sorted(self._writes[layer][row])
        for before, after in pairwise(writes):
            if before.end_ns > after.start_ns:
                raise SlotError(f"{who}: {after} began during {before}")
        for read in self._reads[layer][row]:
            place = bisect_left(writes, (read.start_ns, read.order))
            if place < len(writes) and writes[place].start_ns < read.end_ns:
                raise SlotError(f"{who}: {writes[place]} began during {read}")
            if place == 0:
                raise SlotError(f"{who}: {read} found nothing that was ever written")
            seen = writes[place - 1]
            if seen.end_ns > read.start_ns:
                raise SlotError(f"{who}: {read} began during {seen}")
            if seen.expert != read.expert:
                raise SlotError(f"{who}: {read} found the content of {seen}")

    def close(self) -> None:
        """Nothing to drop: the log stays for ``check``."""


def _note_nothing() -> None:
    """What a copy does to a store that keeps nothing."""
