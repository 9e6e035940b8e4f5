"""Rows of logits to tokens: penalties and log-probabilities, beside rows that ask for nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import RepetitionPenaltyLogitsProcessor

from afore.core.control import Sampling
from afore.models.attention import F32
from afore.models.sampling import LEAST_LOGPROB, logprobs, penalise
from afore.workers.choosing import Chooser, choose_rows, logprobs_of_rows

logits = arrays(np.float32, st.integers(2, 20), elements=st.floats(-30, 30, width=32))


@given(logits, st.data(), st.floats(0.1, 10))
def test_the_penalty_is_transformers_own(logits_V: F32, data: st.DataObject, penalty: float) -> None:
    seen = data.draw(st.lists(st.integers(0, len(logits_V) - 1), min_size=1))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([seen]), torch.from_numpy(logits_V.copy()[None])
    ).numpy()[0]
    before = logits_V.copy()
    np.testing.assert_allclose(penalise(logits_V, np.unique(seen).astype(np.int64), penalty), expected, rtol=1e-5)
    np.testing.assert_array_equal(logits_V, before)


@given(logits, st.data())
def test_logprobs_are_the_log_softmax_best_first(logits_V: F32, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits_V) - 1))
    top = data.draw(st.integers(0, 25))
    expected_V = torch.log_softmax(torch.from_numpy(logits_V).double(), dim=0).numpy()
    own, best = logprobs(logits_V, token, top)
    assert own == pytest.approx(expected_V[token], abs=1e-9)
    order = np.argsort(-logits_V, kind="stable")[:top].tolist()
    assert [token for token, _ in best] == order
    assert [value for _, value in best] == pytest.approx(expected_V[order].tolist(), abs=1e-9)


def test_what_is_impossible_has_a_finite_logprob() -> None:
    own, best = logprobs(np.array([0.0, -np.inf], np.float32), 1, 2)
    assert own == LEAST_LOGPROB
    assert best == ((0, 0.0), (1, LEAST_LOGPROB))


def test_a_penalised_row_remembers_what_it_saw_and_leaves_its_neighbours_alone() -> None:
    logits_TV = np.array([[3.0, 2.5, 1.0]] * 3, np.float32)
    plain, penalised = Chooser(Sampling()), Chooser(Sampling(repetition_penalty=2.0), seen=(2,))
    rows = [plain, penalised, plain]
    assert choose_rows(logits_TV, rows, [5, 5, 5]) == (0, 0, 0)
    for chooser in rows:
        chooser.saw(0)
    assert choose_rows(logits_TV, rows, [6, 6, 6]) == (0, 1, 0)
    penalised.saw(0)  # a step that comes again
    assert choose_rows(logits_TV, rows, [6, 6, 6]) == (0, 1, 0)


def test_logprobs_cost_nothing_where_nobody_asks_and_are_the_raw_ones() -> None:
    logits_TV = np.array([[1.0, 0.0], [1.0, 0.0]], np.float32)
    plain = Chooser(Sampling())
    asking = Chooser(Sampling(temperature=0.5, repetition_penalty=3.0, logprobs=1), seen=(0,))
    assert logprobs_of_rows(logits_TV, [plain, plain], (0, 0)) == ()
    nothing, report = logprobs_of_rows(logits_TV, [plain, asking], (0, 1))
    assert nothing is None
    assert report is not None
    raw = torch.log_softmax(torch.tensor([1.0, 0.0]), 0).tolist()
    assert report.logprob == pytest.approx(raw[1])
    ((token, logprob),) = report.top
    assert token == 0
    assert logprob == pytest.approx(raw[0])
