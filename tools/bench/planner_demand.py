"""Demand for the planner's bench: drifting and skewed to a stated imbalance, seeded; or windows of recorded routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
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


def recorded(folder: Path, *, tokens: int, targets: int) -> Demands:
    """Windows of ``tokens`` consecutive tokens of the per-token routing in ``folder`` (``*.npz`` with ``ids`` [tokens, L, K]).

    One layer after the other, each window an eighth further on. Raises ``ConfigError`` where there is none.
    """
    found: list[NDArray[np.int64]] = []
    for path in sorted(folder.rglob("*.npz")):
        with np.load(path) as archive:
            if "ids" not in archive or archive["ids"].ndim != 3:
                continue
            ids = archive["ids"].astype(np.int64)
        experts = int(ids.max()) + 1
        experts = 1 << (experts - 1).bit_length()
        for layer in range(ids.shape[1]):
            for begin in range(0, max(1, len(ids) - tokens + 1), max(1, tokens // 8)):
                window = ids[begin : begin + tokens, layer].reshape(-1)
                found.append(np.bincount(window, minlength=experts))
            if len(found) >= targets:
                return np.array(found[:targets])
    if not found:
        raise ConfigError(
            "--traces", f"{folder} has no .npz with ids [tokens, layers, K]", "give a folder with routing"
        )
    return np.array([found[i % len(found)] for i in range(targets)])
