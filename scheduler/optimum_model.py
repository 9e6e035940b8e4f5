"""The constraint model behind ``optimum``: which replicas exist, how many tiles each gets, and the least maximum.

A replica that exists in a slot that may be rebound can be dropped; a new one takes such a slot, or an empty one, and one copy.
Only numbers of slots matter on a worker, not which: the caller binds them afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import HostError


def require_solver() -> Any:
    """OR-tools' CP-SAT module. Raises ``HostError`` where it is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise HostError(
            "ortools", "it is not installed", "pip install 'afore[optimum]'; only the certified optimum needs it"
        ) from error
    return cp_model


@dataclass(slots=True, kw_only=True)
class Search:
    """One target's instance."""

    tiles_E: NDArray[np.int64]
    primaries_E: NDArray[np.int32]
    slots_NR: NDArray[np.int32]
    safe_NR: NDArray[np.bool_]
    budget: int
    compactness: int
    costs_N: Sequence[int]
    """What a tile costs on each worker."""
    start_tiles_EN: NDArray[np.int64] | None = field(default=None)
    start_held_EN: NDArray[np.bool_] | None = field(default=None)

    def start_from(self, tiles_EN: NDArray[np.int64], slots_NR: NDArray[np.int32]) -> None:
        """A known answer: the search only looks for better ones."""
        held_EN = np.zeros(tiles_EN.shape, np.bool_)
        workers, slots = np.nonzero(slots_NR >= 0)
        held_EN[slots_NR[workers, slots], workers] = True
        self.start_tiles_EN, self.start_held_EN = tiles_EN, held_EN

    def solve(self, bound: int, time_limit_s: float) -> tuple[bool, int, NDArray[np.int64], NDArray[np.bool_], float]:
        """(proven, lower bound, tiles [E, N], replicas wanted [E, N], seconds). ``bound``: none can be below."""
        E, N = self.tiles_E.size, len(self.costs_N)
        home_EN = np.zeros((E, N), np.bool_)
        home_EN[np.arange(E), self.primaries_E] = True
        if self.start_tiles_EN is None or self.start_held_EN is None:
            self.start_tiles_EN = home_EN * self.tiles_E[:, None]
            self.start_held_EN = np.zeros((E, N), np.bool_)
        tiles_EN, wanted_EN = self.start_tiles_EN, self.start_tiles_EN > 0
        best = int((tiles_EN.sum(axis=0) * self.costs_N).max())
        if best == bound:
            return True, bound, tiles_EN, wanted_EN, 0.0
        cp_model = require_solver()
        begin = time.perf_counter()
        model, most, gets = self._model(cp_model, bound, best)
        model.minimize(most)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.random_seed = 1
        status = solver.solve(model)
        took_s = time.perf_counter() - begin
        lower = max(bound, round(solver.best_objective_bound)) if status != cp_model.UNKNOWN else bound
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            tiles_EN = np.zeros((E, N), np.int64)
            for (e, w), variable in gets.items():
                tiles_EN[e, w] = solver.value(variable)
            rest_E = self.tiles_E - tiles_EN.sum(axis=1)
            tiles_EN[home_EN] += rest_E
            wanted_EN = tiles_EN > 0
        return status == cp_model.OPTIMAL, min(lower, best), tiles_EN, wanted_EN, took_s

    def _model(self, cp_model: Any, bound: int, best: int) -> tuple[Any, Any, dict[Any, Any]]:
        assert self.start_tiles_EN is not None
        model = cp_model.CpModel()
        N = len(self.costs_N)
        most = model.new_int_var(bound, best, "most")
        movable = [e for e in range(self.tiles_E.size) if self.tiles_E[e] > self.compactness]
        gets: dict[tuple[int, int], Any] = {}
        has: dict[tuple[int, int], Any] = {}
        new: list[Any] = []
        for w in range(N):
            slot_of = {int(e): r for r, e in enumerate(self.slots_NR[w]) if e >= 0}
            taken: list[Any] = []
            for e in movable:
                if self.primaries_E[e] == w:
                    continue
                k = min(int(self.tiles_E[e]), best // self.costs_N[w])
                gets[e, w] = model.new_int_var(0, k, f"x{e},{w}")
                model.add_hint(gets[e, w], int(self.start_tiles_EN[e, w]))
                if e in slot_of and not self.safe_NR[w, slot_of[e]]:
                    continue
                has[e, w] = model.new_bool_var(f"y{e},{w}")
                model.add_hint(has[e, w], int(self.start_tiles_EN[e, w]) > 0)
                model.add(gets[e, w] <= k * has[e, w])
                taken.append(has[e, w])
                if e not in slot_of:
                    new.append(has[e, w])
            model.add(sum(taken) <= int(self.safe_NR[w].sum()))
        model.add(sum(new) <= self.budget)
        for e in movable:
            away = [gets[e, w] for w in range(N) if (e, w) in gets]
            model.add(sum(away) <= int(self.tiles_E[e]))
        for w in range(N):
            homed = np.flatnonzero(self.primaries_E == w)
            stay = int(self.tiles_E[homed].sum())
            incoming = [gets[e, w] for e in movable if (e, w) in gets]
            leaving = [gets[e, c] for e in homed.tolist() for c in range(N) if (e, c) in gets]
            model.add(self.costs_N[w] * (stay + sum(incoming) - sum(leaving)) <= most)
        model.add_hint(most, best)
        return model, most, gets
