"""Straight lines through what was measured, and how far off them it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class MeasuredLine:
    """time = fixed + each · number, in µs, by least squares; ``error``: the farthest point's distance, as a part of its time."""

    fixed_us: float
    each_us: float
    error: float


def line_of(points: Sequence[tuple[int, float]]) -> MeasuredLine:
    """Through (number, µs) of two or more numbers. Raises ``ValueError`` for fewer."""
    numbers = np.array([number for number, _ in points], dtype=float)
    times = np.array([us for _, us in points])
    if len(set(numbers)) < 2:
        raise ValueError(f"no line goes through {len(points)} points of one number")
    each, fixed = np.polyfit(numbers, times, 1)
    off = np.abs(fixed + each * numbers - times)
    return MeasuredLine(float(fixed), float(each), float((off / np.maximum(times, 1e-9)).max()))
