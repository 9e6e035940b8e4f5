"""Generated demand for the planner's bench: drifting and skewed to a stated imbalance, seeded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import contiguous_primaries

Demands = NDArray[np.int64]
"""[targets, E] pairs."""

STATIC_IMBALANCE = 1.68
"""Mean max/mean of pairs over 8 workers with everything on primaries: what the paper's model shows."""
_KEEP, _STEP = 0.95, 0.35
"""How much of an expert's heat stays from target to target, and how much is new."""


def drifting(*, num_experts: int, pairs: int, targets: int, seed: int) -> Demands:
    """Log-normal popularity that drifts, scaled so that the static imbalance over 8 workers is ``STATIC_IMBALANCE``."""
    rng = np.random.default_rng(seed)
    heat_E = rng.normal(size=num_experts) * _STEP / np.sqrt(1 - _KEEP**2)
    heats = np.empty((targets, num_experts))
    for t in range(targets):
        heat_E = _KEEP * heat_E + _STEP * rng.normal(size=num_experts)
        heats[t] = heat_E
    low, high = 0.0, 3.0
    for _ in range(20):
        scale = (low + high) / 2
        found = static_imbalance(np.exp(heats * scale), 8)
        low, high = (scale, high) if found < STATIC_IMBALANCE else (low, scale)
    share = np.exp(heats * (low + high) / 2)
    share /= share.sum(axis=1, keepdims=True)
    return np.array([rng.multinomial(pairs, row) for row in share], np.int64)


def static_imbalance(demand_TE: NDArray[np.float64] | Demands, num_workers: int) -> float:
    """Mean over targets of max/mean over workers, everything on contiguous primaries."""
    primaries_E = contiguous_primaries(demand_TE.shape[1], num_workers)
    loads = np.zeros((len(demand_TE), num_workers))
    for e, w in enumerate(primaries_E):
        loads[:, w] += demand_TE[:, e]
    return float((loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1e-9)).mean())
