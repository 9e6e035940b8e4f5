"""``afore-plus``: ``afore``, and where Algorithm 1 stays above the bound, a search by exact flow and copies across its cut."""

from __future__ import annotations

from afore.scheduler.plus_planner import PlusPlanner
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.base import PolicyContext


class AforePlus(Afore):
    """As ``Afore``, with planners whose plans are never worse than Algorithm 1's from the same state."""

    name: str = "afore-plus"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._planners = [PlusPlanner(context.planner, context.primaries_E) for _ in range(context.num_layers)]
