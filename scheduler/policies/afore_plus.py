"""``afore-plus``: ``afore``, and where Algorithm 1 stays above the bound, a search by exact flow and copies across its cut."""

from __future__ import annotations

from typing import ClassVar

from afore.scheduler.planner import Planner
from afore.scheduler.plus_planner import PlusPlanner
from afore.scheduler.policies.afore import Afore


class AforePlus(Afore):
    """As ``Afore``, with planners whose plans are never worse than Algorithm 1's from the same state."""

    name: str = "afore-plus"
    planner: ClassVar[type[Planner]] = PlusPlanner
