"""Algorithm 1 (paper §5.2) for one layer: carried state around the compiled core.

planner = Planner(PlannerConfig(num_experts=E, num_workers=N), primaries)
plan = planner.plan(demand_E, protected=window.protected(), costs=Costs(tile_us=20, copy_us=100, window_us=2000))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.slots import NO_SUCH_SLOT
from afore.scheduler import core_layout as layout
from afore.scheduler.core_numba import adopt_core, compile_planner, plan_core
from afore.scheduler.core_within import MAX_TOKENS
from afore.scheduler.costs import Costs
from afore.scheduler.plan import Plan, PlannerConfig, ProtectedWindow, why_no_copies
from afore.scheduler.plus_layout import scratch_words

__all__ = ["Plan", "Planner", "PlannerConfig", "ProtectedWindow", "compile_planner"]


class Planner:
    """Plans the targets of one layer in order; carries the projected slot table, A_{t-1} and the slots' ages between them.

    ``primaries`` [E] are the fixed workers' ranks. Raises ``ConfigError``.
    """

    searches: ClassVar[bool] = False
    """Whether the search of ``afore-plus`` follows Algorithm 1."""

    def __init__(self, config: PlannerConfig, primaries: NDArray[np.integer[Any]] | Sequence[int]) -> None:
        compile_planner(search=self.searches)
        self.config = config
        self.primaries_E = config.check_primaries(primaries)
        E, N, R = config.num_experts, config.num_workers, int(config.slots_N.max())
        C = min(config.budget, N * R)
        self.buffer = np.zeros(layout.buffer_words(E, N, R, C), np.int32)
        """The packed buffer (``core_layout``), for compiled callers: slot table, carried state, and the last plan."""
        self.scratch = np.zeros(scratch_words(E, N, R, C), np.int32) if self.searches else None
        """Working memory of the search, for compiled callers; nothing in it is carried."""
        header = self.buffer[: layout.HEADER]
        header[layout.H_EXPERTS], header[layout.H_WORKERS], header[layout.H_SLOTS] = E, N, R
        header[layout.H_COPY_CAP] = C
        header[layout.H_TILE_TOKENS], header[layout.H_COMPACTNESS] = config.tile_tokens, config.compactness
        header[layout.H_COMPACTNESS_SHARE] = config.share_1024
        costs_N = config.costs_N
        header[layout.H_LEAST_COST], header[layout.H_MOST_COST] = min(costs_N), max(costs_N)
        parts: layout.Parts = layout.parts_of.py_func(self.buffer)
        parts.cost[:] = costs_N
        parts.primary[:] = self.primaries_E
        parts.homed[:] = np.argsort(self.primaries_E, kind="stable")
        parts.homed_from[:] = np.searchsorted(np.sort(self.primaries_E), np.arange(N + 1))
        parts.owner[:] = np.repeat(np.arange(N), R)
        parts.slots[:] = config.empty_slots().reshape(-1)
        self._slots_S = parts.slots
        self._shape = (E, N, R)
        self._most_copies = C
        self._load_unit, self._most_tokens = min(costs_N), MAX_TOKENS // max(costs_N)
        self._plan_words = self.buffer[: layout.plan_words(E, N, R, C)]
        self._home_cells_E = np.arange(E) * N + self.primaries_E
        self._demand_E = np.zeros(E, np.int64)
        self._nothing_S = np.zeros(N * R, np.bool_)
        self.reset()

    @property
    def slots_NR(self) -> NDArray[np.int32]:
        """The projected slot table now (a copy): expert, -1 empty, -2 no such slot."""
        return self._slots_S.reshape(self._shape[1:]).copy()

    def plan(
        self,
        demand_E: NDArray[np.integer[Any]] | Sequence[int],
        protected: NDArray[np.bool_] | None = None,
        costs: Costs | None = None,
    ) -> Plan:
        """The next target's plan, from its demand [E] in pairs; ``protected`` [N, R] are slots that may not be rebound.

        Raises ``ValueError`` for a demand or mask that cannot be, with nothing changed; ``ConfigError`` without costs.
        """
        if costs is None:
            raise ConfigError("costs", "missing", "pass costs=Costs(tile_us=…, copy_us=…, window_us=…)")
        given_E = demand_E if isinstance(demand_E, np.ndarray) else np.asarray(demand_E)
        if given_E.shape != (self._shape[0],) or given_E.dtype.kind not in "iu":
            raise ValueError(
                f"demand_E: {given_E.dtype} of shape {given_E.shape}; give {self._shape[0]} counts of an integer type"
            )
        self._demand_E[:] = given_E
        flags_S = self._nothing_S if protected is None else self._flags(protected)
        gain_us: float = plan_core(
            self.buffer, self.scratch, self._demand_E, flags_S, costs.tile_us, costs.copy_us, costs.window_us
        )
        if gain_us < 0:
            raise ValueError(self._refused(given_E.tolist()))
        return self._snapshot(gain_us, costs)

    def reset(self) -> None:
        """Forgets every redundant replica and A_{t-1}: what follows is planned as by a new planner."""
        adopt_core(self.buffer, np.full_like(self._slots_S, -1))

    def adopt(self, slots_NR: NDArray[np.integer[Any]]) -> None:
        """Takes the slot table [N, R] from what workers report, and forgets A_{t-1} and the slots' ages.

        A replica on a worker that already has its expert counts as an empty slot: it could serve nothing more.
        Raises ``ValueError`` for another shape, an unknown expert, or slots that exist on one side only.
        """
        E, N, R = self._shape
        slots_NR = np.asarray(slots_NR)
        if slots_NR.shape != (N, R) or slots_NR.dtype.kind not in "iu":
            raise ValueError(f"slots_NR: {slots_NR.dtype} of shape {slots_NR.shape}; give integers of shape {(N, R)}")
        given_S = slots_NR.reshape(-1)
        wrong = (given_S < NO_SUCH_SLOT) | (given_S >= E)
        wrong |= (given_S == NO_SUCH_SLOT) != (self._slots_S == NO_SUCH_SLOT)
        if wrong.any():
            worker, slot = divmod(int(np.flatnonzero(wrong)[0]), R)
            raise ValueError(f"slots_NR: {slots_NR[worker, slot]} in slot {slot} of worker {worker} cannot be")
        adopt_core(self.buffer, np.ascontiguousarray(given_S, np.int32))

    def _flags(self, protected: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if not isinstance(protected, np.ndarray) or protected.shape != self._shape[1:] or protected.dtype != np.bool_:
            raise ValueError(f"protected: give bool of shape {self._shape[1:]}, or None")
        return np.ascontiguousarray(protected).reshape(-1)

    def _refused(self, demand: list[int]) -> str:
        for e, pairs in enumerate(demand):
            if pairs < 0:
                return f"demand_E: {pairs} pairs for expert {e}"
        return f"demand_E: {sum(demand)} pairs in all; a target has at most {self._most_tokens:,}"

    def _snapshot(self, gain_us: float, costs: Costs) -> Plan:
        E, N, R = self._shape
        S, C = N * R, self._most_copies
        words = self._plan_words.copy()
        header = words[: layout.HEADER].tolist()
        slots_at = layout.HEADER + E + S
        copies_at = slots_at + 2 * S
        shares_at = copies_at + 3 * C
        shares_X4 = words[shares_at : shares_at + 4 * header[layout.H_SHARES]].reshape(-1, 4)
        assign = np.zeros(E * N, np.int32)
        assign[self._home_cells_E] = words[layout.HEADER : layout.HEADER + E]
        assign[shares_X4[:, 0] * N + shares_X4[:, 1]] = shares_X4[:, 3]
        made = header[layout.H_COPIES]
        copies = words[copies_at : copies_at + 3 * made].tolist()
        bound = header[layout.H_BOUND_TILES]
        within_max = header[layout.H_WITHIN_MAX_TILES]
        skipped = ""
        if made == 0:
            skipped = why_no_copies(
                within_max=within_max,
                bound=bound,
                most_copies=C,
                tile_us=costs.tile_us,
                tried=header[layout.H_TRIED],
            )
        return Plan(
            assign_EN=assign.reshape(E, N),
            slots_NR=words[slots_at : slots_at + S].reshape(N, R),
            used_NR=words[slots_at + S : copies_at].astype(np.bool_).reshape(N, R),
            shares_X4=shares_X4,
            copies=list(zip(copies[::3], copies[1::3], copies[2::3], strict=True)),
            gain_us=gain_us,
            max_tiles=header[layout.H_MAX_TILES],
            bound_tiles=bound,
            base_max_tiles=header[layout.H_BASE_MAX_TILES],
            within_max_tiles=within_max,
            load_unit=self._load_unit,
            skipped=skipped,
            costs=costs,
        )
