"""``afore-no-overlap``: ``afore``, but copies start only when their target is about to execute (paper §3, Approach 2)."""

from __future__ import annotations

from dataclasses import replace

from afore.scheduler.costs import Costs
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.base import CopyTime


class AforeNoOverlap(Afore):
    """No copy can hide, so the planner counts on no window: it copies where that pays although all of it is exposed."""

    name: str = "afore-no-overlap"
    start: CopyTime = "arrival"

    def costs(self, layer: int) -> Costs:
        return replace(super().costs(layer), window_us=0.0)
