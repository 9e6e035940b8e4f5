"""Whole numbers out of parts: an even split over replicas, and a total by weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def even_split(count: int, parts: int) -> list[int]:
    """``count`` over so many replicas, evenly; the remainder goes one each to the first ones."""
    each, more = divmod(count, parts)
    return [each + (part < more) for part in range(parts)]


def largest_remainder(weights: NDArray[np.floating[Any]] | Sequence[float], total: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to ``weights`` that add up to ``total``: floors, and one more to the largest remainders.

    Among equal remainders the first; without any weight, all zero. Raises ``ValueError`` for a weight or total below 0.
    """
    weights_X = np.asarray(weights, np.float64)
    if total < 0 or (weights_X.size and float(weights_X.min()) < 0):
        raise ValueError(f"largest_remainder: weights {weights_X} and total {total} must not be negative")
    whole = float(weights_X.sum())
    if whole == 0:
        return np.zeros(weights_X.shape, np.int64)
    exact_X = weights_X / whole * total
    floors_X: NDArray[np.int64] = np.floor(exact_X).astype(np.int64)
    more = total - int(floors_X.sum())
    floors_X[np.argsort(floors_X - exact_X, kind="stable")[: max(more, 0)]] += 1
    return floors_X
