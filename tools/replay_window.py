"""What copies cost in a replay: a stated model of the pipeline, the same for every policy.

Moving takes M(Δ) = copy_us × the most copies at any one port. A target takes tile_us × the tiles of its most loaded worker, and
what of its copies shows.
- Copies that start *now* with their target hide under the window W, the compute of the targets in flight before it.
- Copies that went *ahead* of a target hide under W and all that executes until the first target that uses one of them; those that
  no target uses show nowhere.
- Copies that start on *arrival* with their target hide only behind the work that the workers that receive them can do without
  them: the least of it over these workers.
- Copies on arrival without a target (all layers at once) show as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.scheduler.costs import Costs, migration_us
from afore.scheduler.plan import Copy


@dataclass(slots=True)
class _Ahead:
    raw_us: float
    issued_us: float
    open: bool = True


class Pipeline:
    """One replay's clock."""

    def __init__(self, costs: Costs, primaries_E: NDArray[np.integer[Any]]) -> None:
        self._costs = costs
        self._primaries_E = primaries_E
        self.now_us = 0.0
        """Of the FFN workers: executed targets one after another."""
        self.raw_us = 0.0
        """Copy time in all."""
        self.exposed_us = 0.0
        """What of it showed."""
        self.copies = 0
        self._ahead: dict[tuple[int, int, int], _Ahead] = {}
        """(layer, worker, slot) → the copies that fill it."""

    def ahead(self, layer: int, copies: Sequence[Copy], start: str) -> None:
        """Copies without a target of their own."""
        if not copies:
            return
        raw_us = self._raw(copies)
        if start == "arrival":
            self._show(raw_us)
            return
        group = _Ahead(raw_us, self.now_us)
        for _e, w, r in copies:
            self._ahead[layer, w, r] = group

    def target(
        self,
        layer: int,
        copies: Sequence[Copy],
        start: str,
        shares: Iterable[tuple[int, int, int, int]],
        tiles_EN: NDArray[np.int64],
        max_tiles: int,
    ) -> None:
        """A target with its own copies executes; ``tiles_EN`` are its tiles, ``max_tiles`` those of its most loaded worker."""
        used = [(w, r) for _e, w, r, _count in shares]
        for w, r in used:
            group = self._ahead.pop((layer, w, r), None)
            if group is not None and group.open:
                group.open = False
                self._show(max(0.0, group.raw_us - self._costs.window_us - (self.now_us - group.issued_us)))
        if copies:
            raw_us = self._raw(copies)
            hidden_us = self._costs.window_us if start == "now" else self._resident_us(copies, tiles_EN)
            self._show(max(0.0, raw_us - hidden_us))
        self.now_us += self._costs.tile_us * max_tiles

    def everything_moved(self, moved: Sequence[Copy], start: str) -> None:
        """A whole new layout (``eplb-full``), from any holder; *now* layouts are spread over as many steps as they need."""
        if moved:
            received = Counter(w for _e, w, _r in moved)
            self.copies += len(moved)
            raw_us = self._costs.copy_us * max(received.values())
            self.raw_us += raw_us
            if start == "arrival":
                self._show(raw_us)

    def _raw(self, copies: Sequence[Copy]) -> float:
        raw_us = migration_us(copies, self._primaries_E, self._costs)
        self.raw_us += raw_us
        self.copies += len(copies)
        return raw_us

    def _show(self, exposed_us: float) -> None:
        self.exposed_us += exposed_us
        self.now_us += exposed_us

    def _resident_us(self, copies: Sequence[Copy], tiles_EN: NDArray[np.int64]) -> float:
        waits: dict[int, int] = {}
        for e, w, _r in copies:
            waits[w] = waits.get(w, 0) + int(tiles_EN[e, w])
        tiles_N = tiles_EN.sum(axis=0)
        return self._costs.tile_us * min(int(tiles_N[w]) - waiting for w, waiting in waits.items())
