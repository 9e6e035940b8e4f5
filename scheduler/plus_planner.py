"""``afore-plus`` for one layer: the same planner, state and plan as ``Planner``, around another compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.scheduler.costs import Costs
from afore.scheduler.plan import Plan, PlannerConfig
from afore.scheduler.planner import Planner
from afore.scheduler.plus_core import compile_plus, plan_plus_core
from afore.scheduler.plus_layout import scratch_words


class PlusPlanner(Planner):
    """As ``Planner``; its plans have no more tiles on the most loaded worker than Algorithm 1's from the same state."""

    def __init__(self, config: PlannerConfig, primaries: NDArray[np.integer[Any]] | Sequence[int]) -> None:
        compile_plus()
        super().__init__(config, primaries)
        E, N, R = self._shape
        self.scratch = np.zeros(scratch_words(E, N, R, self._most_copies), np.int32)
        """Working memory of the search, for compiled callers; nothing in it is carried."""

    def plan(
        self,
        demand_E: NDArray[np.integer[Any]] | Sequence[int],
        protected: NDArray[np.bool_] | None = None,
        costs: Costs | None = None,
    ) -> Plan:
        """As ``Planner.plan``. Its ``within_max_tiles`` is the least maximum over existing replicas (exact flow)."""
        if costs is None:
            raise ConfigError("costs", "missing", "pass costs=Costs(tile_us=…, copy_us=…, window_us=…)")
        given_E = demand_E if isinstance(demand_E, np.ndarray) else np.asarray(demand_E)
        if given_E.shape != (self._shape[0],) or given_E.dtype.kind not in "iu":
            raise ValueError(
                f"demand_E: {given_E.dtype} of shape {given_E.shape}; give {self._shape[0]} counts of an integer type"
            )
        self._demand_E[:] = given_E
        flags_S = self._nothing_S if protected is None else self._flags(protected)
        gain_us: float = plan_plus_core(
            self.buffer, self.scratch, self._demand_E, flags_S, costs.tile_us, costs.copy_us, costs.window_us
        )
        if gain_us < 0:
            raise ValueError(self._refused())
        return self._snapshot(gain_us, costs)
