"""Whole numbers out of parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.scheduler.split import even_split, largest_remainder


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [(10, 3, [4, 3, 3]), (11, 3, [4, 4, 3]), (9, 3, [3, 3, 3]), (2, 3, [1, 1, 0]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_remainders_go_to_the_first_replicas(count: int, parts: int, expected: list[int]) -> None:
    assert even_split(count, parts) == expected


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ([1.0, 1.0, 1.0], 3, [1, 1, 1]),
        ([0.5, 0.3, 0.2], 5, [3, 1, 1]),  # 2.5, 1.5, 1: of the equal remainders the first
        ([2.0, 1.0, 1.0], 2, [1, 1, 0]),
        ([0.0, 4.0], 7, [0, 7]),
        ([0.0, 0.0], 7, [0, 0]),
        ([], 0, []),
    ],
)
def test_largest_remainders_by_hand(weights: list[float], total: int, expected: list[int]) -> None:
    assert largest_remainder(weights, total).tolist() == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(0, 100_000))
def test_it_adds_up_and_is_within_one_of_the_exact_share(weights: list[float], total: int) -> None:
    parts_X = largest_remainder(weights, total)
    whole = float(np.sum(weights))
    if whole == 0:
        assert not parts_X.any()
        return
    assert int(parts_X.sum()) == total
    assert (np.abs(parts_X - np.array(weights) / whole * total) < 1 + 1e-6).all()


@pytest.mark.parametrize(("weights", "total"), [([-1.0, 2.0], 3), ([1.0], -1)])
def test_less_than_nothing_is_refused(weights: list[float], total: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        largest_remainder(weights, total)
