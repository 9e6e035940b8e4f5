"""``afore-no-prefetch``: ``afore``, but planned on the demand of the same layer and microbatch position in the previous step."""

from __future__ import annotations

from afore.core.target import Target
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.base import Demand, PolicyContext


class AforeNoPrefetch(Afore):
    """By position: after requests have joined or left, as recorded. The first step of a position runs on primaries."""

    name: str = "afore-no-prefetch"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._seen: dict[tuple[int, int], tuple[int, Demand]] = {}
        """(layer, microbatch) → the step seen last, and its demand."""
        self._before: dict[tuple[int, int], Demand] = {}
        """(layer, microbatch) → the demand of the step before that."""

    def planned_demand(self, target: Target, demand_E: Demand) -> Demand | None:
        position = (target.layer, target.microbatch)
        seen = self._seen.get(position)
        if seen is not None and seen[0] != target.step:
            self._before[position] = seen[1]
        # The same step again (a target announced anew) replaces what was seen, and is still planned on the step before.
        self._seen[position] = (target.step, demand_E.copy())
        return self._before.get(position)
