"""What the redundant slots hold once everything published has landed: (expert, generation) of each (worker, slot), per layer."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Slot = tuple[int, int]
"""(worker, slot)"""
Table = dict[Slot, tuple[int, int]]
"""Slot → (expert, generation): the generation is the sequence of the entry that bound it."""


class Bindings(Protocol):
    """Tables of L layers."""

    def table(self, layer: int) -> Table:
        """The layer's table; the caller's own."""
        ...

    def keep(self, layer: int, table: Table) -> None:
        """This is the layer's table from now on."""
        ...


class DictBindings:
    """For any policy: whatever slots it names."""

    def __init__(self, num_layers: int) -> None:
        self._tables_L: list[Table] = [{} for _ in range(num_layers)]

    def table(self, layer: int) -> Table:
        return dict(self._tables_L[layer])

    def keep(self, layer: int, table: Table) -> None:
        self._tables_L[layer] = table


class CellBindings:
    """Shared with a compiled writer, which knows only slots that exist."""

    def __init__(self, num_layers: int, num_workers: int, slots_per_worker: int) -> None:
        self._R = slots_per_worker
        self._cells = num_workers * slots_per_worker
        self.cells_L: list[NDArray[np.int64]] = []
        """Of each layer: experts [N·R] (-1: none), then generations [N·R]."""
        for _ in range(num_layers):
            self.cells_L.append(np.full(2 * self._cells, -1, np.int64))

    def table(self, layer: int) -> Table:
        cells, S = self.cells_L[layer], self._cells
        held = np.flatnonzero(cells[:S] >= 0).tolist()
        return {divmod(s, self._R): (int(cells[s]), int(cells[S + s])) for s in held}

    def keep(self, layer: int, table: Table) -> None:
        cells, S = self.cells_L[layer], self._cells
        cells[:] = -1
        for (worker, slot), (expert, generation) in table.items():
            s = worker * self._R + slot
            cells[s], cells[S + s] = expert, generation
