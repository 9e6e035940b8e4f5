"""Predictors by hand: transitions that are counted and applied, and one of a stated accuracy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.scheduler.predictors import Transitions, inaccurate
from tests.scheduler.baseline_cases import counts


def test_transitions_by_hand() -> None:
    """Two tokens chose {0, 1} and {0, 2}, then {2, 3} and {3, 1}: expert 0 was followed by 2, 3, 3, 1."""
    transitions = Transitions(num_layers=2, num_experts=4)
    transitions.observe(0, np.array([[0, 1], [0, 2]]), np.array([[2, 3], [3, 1]]))
    assert transitions.counts_LEE[0].tolist() == [[0, 1, 1, 2], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]
    # 8 pairs of expert 0: 2 to 1, 2 to 2, 4 to 3. 2 of expert 1: one each to 2 and 3.
    assert transitions.predict(0, counts(8, 2, 0, 0)).tolist() == [0, 2, 3, 5]
    # Of expert 3 nothing is known: all that were seen went to 1, 2 and 3 as 2, 2 and 4.
    assert transitions.predict(0, counts(0, 0, 0, 8)).tolist() == [0, 2, 2, 4]
    assert transitions.predict(0, counts(8, 2, 0, 8)).tolist() == [0, 4, 5, 9]


def test_each_layer_has_its_own_and_learns_as_it_goes() -> None:
    transitions = Transitions(num_layers=3, num_experts=2)
    transitions.observe(1, np.array([[0]]), np.array([[1]]))
    assert transitions.predict(0, counts(4, 0)).tolist() == [0, 0]
    assert transitions.predict(1, counts(4, 0)).tolist() == [0, 4]
    transitions.observe(1, np.array([[0], [0], [0]]), np.array([[0], [0], [0]]))
    assert transitions.predict(1, counts(4, 0)).tolist() == [3, 1]
    assert Transitions(num_layers=1, num_experts=2).counts_LEE.shape == (0, 2, 2)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=9),
    st.lists(st.integers(0, 90), min_size=6, max_size=6),
)
def test_as_many_pairs_are_predicted_as_there_are(rows: list[list[int]], demand: list[int]) -> None:
    ids_TK = np.array(rows)
    transitions = Transitions(num_layers=2, num_experts=6)
    transitions.observe(0, ids_TK, (ids_TK + 1) % 6)
    predicted_E = transitions.predict(0, counts(*demand))
    assert predicted_E.dtype == np.int32
    assert int(predicted_E.sum()) == sum(demand)


@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_a_predictor_of_a_stated_accuracy(accuracy: float) -> None:
    """All pairs are expert 0's: what is predicted of it are those that are right, and the strays that hit it by chance."""
    demand_E = np.zeros(50, np.int64)
    demand_E[0] = 100_000
    predicted_E = inaccurate(demand_E, accuracy, np.random.default_rng(1))
    assert int(predicted_E.sum()) == 100_000
    assert abs(int(predicted_E[0]) / 100_000 - accuracy - (1 - accuracy) / 50) < 0.01
    with pytest.raises(ValueError, match=r"1\.2 is not from 0 to 1"):
        inaccurate(demand_E, 1.2, np.random.default_rng(1))


def test_wrong_pairs_go_where_they_are_said_to_go() -> None:
    predicted_E = inaccurate(np.array([1000, 0, 0]), 0.0, np.random.default_rng(1), np.array([0.0, 3.0, 1.0]))
    assert predicted_E[0] == 0
    assert 650 < predicted_E[1] < 850
