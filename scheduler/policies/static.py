"""``static``: every expert on its primary; no copies, no decisions; redundant slots stay empty."""

from __future__ import annotations

from afore.core.target import Target
from afore.scheduler.policies.base import Action, Assign, Demand, PolicyContext, Quiet

ON_PRIMARIES = "static: everything runs on primaries"


class Static(Quiet):
    """The baseline that the others are measured against."""

    name: str = "static"

    def __init__(self, context: PolicyContext) -> None:
        del context

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        return [Assign(target, (), skipped=ON_PRIMARIES)]
