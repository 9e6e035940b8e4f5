"""Whether the answers of a policy keep every rule that the runtime relies on; ``validate`` is for planners' plans.

Letters: E experts, N workers, R redundant slots of the worker that has most, M microbatches in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import PlanError
from afore.core.slots import NO_SUCH_SLOT
from afore.core.target import Target
from afore.scheduler.plan import Copy, PlannerConfig
from afore.scheduler.policies.base import Action, Assign, Copies


class ActionChecker:
    """Follows one policy's answers in their order, and knows what every slot holds.

    It does not ask whether an answer is a good one.
    """

    def __init__(
        self, config: PlannerConfig, primaries: NDArray[np.integer[Any]], *, num_layers: int, num_microbatches: int
    ) -> None:
        self._config = config
        self._primaries_E = config.check_primaries(primaries)
        self._tables_L = [config.empty_slots() for _ in range(num_layers)]
        self._recent_L: list[deque[set[tuple[int, int]]]] = [
            deque(maxlen=num_microbatches - 1) for _ in range(num_layers)
        ]
        """Slots with work in, or newly bound by, the last M - 1 plans of the layer."""
        self._bound_L: list[set[tuple[int, int]]] = [set() for _ in range(num_layers)]
        """Slots bound since the layer's last plan."""

    def slots_NR(self, layer: int) -> NDArray[np.int32]:
        """What the layer's slots hold now: expert, -1 empty, -2 no such slot. A copy."""
        return self._tables_L[layer].copy()

    def reset_layer(self, layer: int) -> None:
        """A plan of the layer was refused."""
        self._tables_L[layer] = self._config.empty_slots()

    def ahead(self, actions: Sequence[Action]) -> list[Copy]:
        """Takes an answer that may not assign (``on_prediction``, ``on_step_end``); returns its copies. Raises ``PlanError``."""
        copies: list[Copy] = []
        for action in actions:
            _require(isinstance(action, Copies), f"{type(action).__name__} where only copies may be answered")
            assert isinstance(action, Copies)
            self._copies(action)
            copies.extend(action.copies)
        return copies

    def assigned(
        self, target: Target, demand_E: NDArray[np.integer[Any]], actions: Sequence[Action]
    ) -> NDArray[np.int64]:
        """Takes the answer that assigns ``target``; returns pairs of each expert and worker [E, N]. Raises ``PlanError``."""
        assigns = [action for action in actions if isinstance(action, Assign)]
        _require(len(assigns) == 1 and actions[-1] is assigns[0], f"{target} is not assigned once, in the end")
        (assign,) = assigns
        _require(assign.target == target, f"{assign.target} is assigned, not {target}")
        for action in actions[:-1]:
            assert isinstance(action, Copies)
            self._copies(action)
        assign_EN = self._shares(assign, demand_E)
        layer = target.layer
        self._recent_L[layer].append({(w, r) for _e, w, r, _count in assign.shares} | self._bound_L[layer])
        self._bound_L[layer] = set()
        return assign_EN

    def _copies(self, action: Copies) -> None:
        _require(0 <= action.layer < len(self._tables_L), f"layer {action.layer} does not exist")
        _require(action.start in ("now", "arrival"), f"copies start {action.start!r}")
        table_NR, bound = self._tables_L[action.layer], self._bound_L[action.layer]
        N, R = table_NR.shape
        for e, w, r in action.copies:
            _require(0 <= e < self._config.num_experts, f"expert {e} does not exist")
            exists = 0 <= w < N and 0 <= r < R and table_NR[w, r] != NO_SUCH_SLOT
            _require(exists, f"a copy goes to slot {r} of worker {w}, which does not exist")
            _require(self._primaries_E[e] != w, f"expert {e} is copied to worker {w}, which has its primary")
            in_use = (w, r) in bound or any((w, r) in used for used in self._recent_L[action.layer])
            _require(not in_use, f"a copy goes to slot {r} of worker {w}, which targets in flight may use")
            table_NR[w, r] = e
            bound.add((w, r))

    def _shares(self, assign: Assign, demand_E: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        E, N = self._config.num_experts, self._config.num_workers
        table_NR = self._tables_L[assign.target.layer]
        assign_EN = np.zeros((E, N), np.int64)
        assign_EN[np.arange(E), self._primaries_E] = demand_E
        before = (-1, -1)
        for e, w, r, count in assign.shares:
            _require((e, w) > before, "shares do not come by expert, then worker, each once")
            before = (e, w)
            _require(0 <= e < E and 0 <= w < N, f"a share is expert {e}'s on worker {w}")
            _require(count > 0, f"a share of expert {e} has {count} pairs")
            _require(self._primaries_E[e] != w, f"a share of expert {e} is on its primary's worker {w}")
            _require(
                0 <= r < table_NR.shape[1] and table_NR[w, r] == e, f"slot {r} of worker {w} does not hold expert {e}"
            )
            assign_EN[e, w] = count
            assign_EN[e, self._primaries_E[e]] -= count
        _require(bool((assign_EN >= 0).all()), "shares of an expert exceed its demand")
        return assign_EN


def _require(holds: bool | np.bool_, rule: str) -> None:
    if not holds:
        raise PlanError(f"answer: {rule}")
