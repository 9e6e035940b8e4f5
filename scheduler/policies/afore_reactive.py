"""``afore-reactive``: planned on the previous step's demand, and copies start only at their target (paper §3, Approach 1)."""

from __future__ import annotations

from afore.scheduler.policies.afore_no_overlap import AforeNoOverlap
from afore.scheduler.policies.afore_no_prefetch import AforeNoPrefetch


class AforeReactive(AforeNoPrefetch, AforeNoOverlap):
    """Neither prefetched demand nor overlapped copies."""

    name: str = "afore-reactive"
