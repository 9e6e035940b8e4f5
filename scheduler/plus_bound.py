"""A lower bound for the search: what cannot leave a worker over the slots that may be rebound (as ``optimum_bound``, by worker).

With few slots the even share is often out of reach; a search that knows it does not run after it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import NO_SUCH_SLOT
from afore.scheduler.core_layout import H_COPY_CAP, Parts, compiled
from afore.scheduler.plus_layout import Scratch


@compiled
def least_by_reach(p: Parts, q: Scratch, protected: NDArray[np.bool_], bound: int) -> int:
    """No plan from here has a maximum below this; at least ``bound``. Uses ``need``, overwrites ``give``."""
    slots, owner, primary, base, homed, homed_from = p.slots, p.owner, p.primary, p.base, p.homed, p.homed_from
    need, give, N = q.need, q.give, p.load.size
    worst = bound
    for w in range(N):
        if base[w] <= worst:
            continue
        first, end = homed_from[w], homed_from[w + 1]
        for at in range(first, end):
            give[homed[at]] = need[homed[at]]
        left = base[w]
        safe, there = 0, 0
        for s in range(slots.size):
            e = slots[s]
            if e == NO_SUCH_SLOT or owner[s] == w:
                continue
            if not protected[s]:
                safe += 1
                if e >= 0 and primary[e] == w:
                    there += 1
            elif e >= 0 and primary[e] == w:
                left -= give[e]
                give[e] = 0
        more = min(safe, p.header[H_COPY_CAP] + there)
        if more >= end - first:
            continue
        for _ in range(more):
            best = homed[first]
            for at in range(first + 1, end):
                if give[homed[at]] > give[best]:
                    best = homed[at]
            if give[best] == 0:
                break
            left -= give[best]
            give[best] = 0
        worst = max(worst, left)
    return worst
