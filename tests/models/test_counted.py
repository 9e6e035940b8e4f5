"""A model of counts: its ids are what its demand says, for any demand that tokens can have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from afore.models.attention import StepBatch
from afore.models.counted import CountedAttention, CountedPrefill, counted_spec, guessed_counts, ids_of_counts
from afore.models.kv import KVLayout

SPEC = counted_spec(num_experts=6, experts_per_token=2, moe_layers=3, dense_layers=1)


@st.composite
def demands(draw: st.DrawFn) -> tuple[int, int, npt.NDArray[np.int64]]:
    """(tokens, K, counts [E]): as real rows would count, K distinct experts each."""
    tokens, experts = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    top_k = draw(st.integers(1, experts))
    rows = [draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
    return tokens, top_k, np.bincount(np.array(rows).reshape(-1), minlength=experts)


@given(demands())
def test_ids_are_counted_as_demanded_and_a_rows_differ(case: tuple[int, int, npt.NDArray[np.int64]]) -> None:
    tokens, top_k, counts_E = case
    ids_TK = ids_of_counts(counts_E, tokens)
    assert ids_TK.shape == (tokens, top_k)
    assert ids_TK.flags.c_contiguous
    assert np.array_equal(np.bincount(ids_TK.reshape(-1), minlength=counts_E.shape[0]), counts_E)
    assert all(len(set(row)) == top_k for row in ids_TK.tolist())


class Asked:
    """A source that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int, int]] = []

    def counts(self, attention: int, microbatch: int, step: int, tokens: int) -> npt.NDArray[np.int64]:
        self.calls.append((attention, microbatch, step, tokens))
        return np.array([[tokens, tokens, 0, 0, 0, 0], [0, 0, tokens, tokens, 0, 0], [0, 0, 0, 0, tokens, tokens]])


def batch(tokens: int, microbatch: int, step: int) -> StepBatch:
    zeros_T = np.zeros(tokens, dtype=np.int64)
    return StepBatch(zeros_T, zeros_T, np.zeros((tokens, 1), dtype=np.int32), microbatch=microbatch, step=step)


def test_a_step_asks_once_and_routes_each_layer_as_told() -> None:
    source = Asked()
    model = CountedAttention(SPEC, source, rank=3)
    state = model.begin(batch(4, microbatch=2, step=9))
    assert source.calls == [(3, 2, 9, 4)]
    assert [layer.moe_ordinal for layer in model.layers()] == [None, 0, 1, 2]
    model.dense(state, 0)
    for layer in range(3):
        routed = model.attend(state, layer)
        assert routed.hidden_TD.shape == (4, 1)
        assert routed.weights_TK.sum(axis=1).tolist() == [1.0] * 4
        assert sorted(set(routed.ids_TK.reshape(-1).tolist())) == [2 * layer, 2 * layer + 1]
        model.combine(state, layer, routed.hidden_TD)
    assert model.logits(state).argmax(axis=1).tolist() == [0] * 4
    assert model.attend(model.begin(batch(2, 0, 10)), 0).hidden_TD.shape == (2, 1)
    assert len(source.calls) == 2


def test_nothing_is_cached() -> None:
    layout = KVLayout.for_model(SPEC, num_blocks=1000)
    assert layout.nbytes == 0
    chunk = CountedPrefill(SPEC).start().feed([1, 2, 3])
    assert [(offset, bytes(data)) for offset, data in chunk.pack(layout, (5, 6))] == [(0, b"")]


@given(
    counts=st.lists(st.integers(0, 9), min_size=3, max_size=12),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_a_guess_has_as_many_assignments_and_gets_the_stated_part_right(counts: list[int], accuracy: float) -> None:
    counts_E, tokens = np.array(counts, np.int64), 9
    guess_E = guessed_counts(counts_E, tokens, accuracy)
    assert guess_E.sum() == counts_E.sum()
    assert guess_E.max() <= tokens
    right = int(np.minimum(guess_E, counts_E).sum())
    assert right >= int(np.floor(counts_E * accuracy).sum())
    if accuracy == 1.0:
        assert guess_E.tolist() == counts


def test_the_next_layer_is_guessed() -> None:
    model = CountedAttention(SPEC, Asked(), rank=0, next_gate_accuracy=1.0)
    state = model.begin(batch(4, microbatch=0, step=0))
    ids_TK = model.next_choices(state, 0)
    assert sorted(set(ids_TK.reshape(-1).tolist())) == [2, 3]
