"""``afore-plus``: ``afore``, and where Algorithm 1 stays above the bound, a search by exact flow and copies across its cut."""

from __future__ import annotations

from typing import ClassVar

from afore.core.policy_options import AforePlusOptions
from afore.scheduler.planner import Planner
from afore.scheduler.plus_planner import PlusPlanner
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.base import PolicyContext


class AforePlus(Afore):
    """As ``Afore``, with planners whose plans are never worse than Algorithm 1's from the same state."""

    name: str = "afore-plus"
    planner: ClassVar[type[Planner]] = PlusPlanner

    def __init__(self, context: PolicyContext) -> None:
        self.options: AforePlusOptions = self._its_options(context)
        super().__init__(context)

    @staticmethod
    def _its_options(context: PolicyContext) -> AforePlusOptions:
        return context.options.afore_plus

    @property
    def protected_plans(self) -> int:
        return self.options.depth(self._context.num_microbatches)
