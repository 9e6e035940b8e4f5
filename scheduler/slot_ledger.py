"""One layer's redundant slots, for policies without a planner: what they hold once everything answered has landed, and which of
them may be rebound. Letters: N workers, R redundant slots of the worker that has most.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.scheduler.plan import Copy, PlannerConfig, ProtectedWindow

Place = tuple[int, int]
"""(worker, slot)"""


class SlotLedger:
    """A slot is *safe* while no target in flight can use it: none of the last M - 1 plans of the layer has work in it or newly
    bound it (``ProtectedWindow``), no copy since the last plan fills it, and it is reserved for no target that is still to come.
    """

    def __init__(self, config: PlannerConfig, num_microbatches: int) -> None:
        self._none_NR = config.empty_slots()
        self.table_NR = self._none_NR.copy()
        """Expert in each slot, -1 empty, -2 no such slot."""
        self._window = ProtectedWindow(num_microbatches - 1)
        self._fresh_NR = np.zeros(self.table_NR.shape, np.bool_)
        self._reserved_M: list[list[Place]] = [[] for _ in range(num_microbatches)]
        self._used_at_NR = np.zeros(self.table_NR.shape, np.int64)
        self._plans = 0

    def safe_NR(self) -> NDArray[np.bool_]:
        """Slots that may be rebound now."""
        safe_NR: NDArray[np.bool_] = (self.table_NR != NO_SUCH_SLOT) & ~self._fresh_NR
        protected_NR = self._window.protected()
        if protected_NR is not None:
            safe_NR &= ~protected_NR
        for places in self._reserved_M:
            for place in places:
                safe_NR[place] = False
        return safe_NR

    def choose(self, worker: int, open_NR: NDArray[np.bool_]) -> int:
        """Of the worker's slots in ``open_NR`` the empty one, else the least recently used, the first on ties; -1: it has none."""
        among = np.flatnonzero(open_NR[worker])
        if not among.size:
            return -1
        age = np.where(self.table_NR[worker, among] == EMPTY, -1, self._used_at_NR[worker, among])
        return int(among[age.argmin()])

    def find(self, expert: int, worker: int) -> int:
        """The slot of the worker that holds the expert; -1: none does."""
        found = np.flatnonzero(self.table_NR[worker] == expert)
        return int(found[0]) if found.size else -1

    def bind(self, copies: Iterable[Copy]) -> None:
        """These copies are answered: the slots hold their experts."""
        for expert, worker, slot in copies:
            self.table_NR[worker, slot] = expert
            self._fresh_NR[worker, slot] = True
            self._used_at_NR[worker, slot] = self._plans

    def reserve(self, microbatch: int, places: Iterable[Place]) -> None:
        """The microbatch's next target of this layer will use these slots; what was reserved for it before is let go."""
        self._reserved_M[microbatch] = list(places)

    def planned(self, microbatch: int, places: Iterable[Place]) -> None:
        """A target of the microbatch is assigned, and uses these slots."""
        self._plans += 1
        used_NR = self._fresh_NR.copy()
        for place in places:
            used_NR[place] = True
        self._used_at_NR[used_NR] = self._plans
        self._window.push(used_NR)
        self._fresh_NR[:] = False
        self._reserved_M[microbatch] = []

    def reset(self) -> None:
        """No replica can be relied on any more. Protection stays: targets that were accepted still use their slots."""
        self.table_NR[:] = self._none_NR
        for places in self._reserved_M:
            places.clear()
