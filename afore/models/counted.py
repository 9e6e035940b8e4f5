"""A model of counts, for virtual time at full size: how many tokens go to which expert is given, and nothing else is real.

``afore.models.emulated`` checks every row and every cached value, which costs more than serving does once a microbatch has
thousands of tokens. Here a ``DemandSource`` says what each target's demand is; rows are one zero wide, keys and values take no
room, and every token is the same. The ids are real: each attention worker's rows name exactly the experts that its demand counts,
so that demand vectors, their CRC, exact shares and tile loads are what they would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from afore.models.attention import F32, I32, LayerKind, Routed, StepBatch, layer_kinds
from afore.models.config import ModelSpec
from afore.models.kv import KVLayout
from afore.models.prefill import Prefilled

I64 = npt.NDArray[np.int64]

NEXT_GATE_ACCURACY = 0.9
"""Part of its assignments that a layer's gate gives right on the layer before's hidden states. Inferred: published are 86-92 % on
one model, 73-80 % on another."""
_VOCABULARY = 4
"""Tokens of a counted model; the one that it says is 0."""


class DemandSource(Protocol):
    """What routes: a generator, or a recording. A pure function of its arguments, so that every policy meets the same demand."""

    def counts(self, attention: int, microbatch: int, step: int, tokens: int) -> I64:
        """Token-expert assignments [L, E] of all layers for ``tokens`` rows of an attention worker in a step.

        Each layer sums to tokens · K, and no expert has more than ``tokens``: a token's experts differ.
        """
        ...


def counted_spec(
    *, num_experts: int, experts_per_token: int, moe_layers: int, dense_layers: int = 0, max_positions: int = 1 << 20
) -> ModelSpec:
    """A spec for the counted model. What its rows and experts weigh is in the cost profile, not here."""
    return ModelSpec(
        family="counted",
        num_layers=dense_layers + moe_layers,
        moe_layers=tuple(range(dense_layers, dense_layers + moe_layers)),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        hidden_size=1,
        expert_size=1,
        expert_dtype="float32",
        has_shared_experts=False,
        vocab_size=_VOCABULARY,
        eos_ids=(),
        max_positions=max_positions,
        num_heads=1,
        kv_parts=((0, 0), (0, 0)),
    )


def ids_of_counts(counts_E: I64, tokens: int) -> I32:
    """Expert ids [T, K] of ``tokens`` rows that are demanded exactly ``counts_E`` times, the K of a row distinct.

    Ids are dealt out expert by expert, down the rows: an expert with at most T assignments meets no row twice.
    """
    flat_P = np.repeat(np.arange(counts_E.shape[0], dtype=np.int32), counts_E)
    return np.ascontiguousarray(flat_P.reshape(-1, tokens).T)


def guessed_counts(counts_E: I64, tokens: int, accuracy: float) -> I64:
    """What a predictor makes of a demand of which it gets the part ``accuracy`` of the assignments right.

    The others go to the experts that have fewest of the right ones, evenly: a wrong guess says nothing of where the load is.
    """
    guess_E: I64 = np.floor(counts_E * accuracy).astype(np.int64)
    left = int(counts_E.sum() - guess_E.sum())
    # Nobody is asked twice by one token: a full expert takes no more.
    while left > 0:
        open_E = np.flatnonzero(guess_E < tokens)
        taking_E = open_E[np.argsort(guess_E[open_E], kind="stable")][:left]
        guess_E[taking_E] += 1
        left -= len(taking_E)
    return guess_E


@dataclass(slots=True)
class CountedState:
    """One step in flight: its demand in every layer."""

    tokens: int
    counts_LE: I64


class CountedAttention:
    """``AttentionModel`` of one attention worker over a ``DemandSource``."""

    def __init__(
        self, spec: ModelSpec, source: DemandSource, rank: int, *, next_gate_accuracy: float = NEXT_GATE_ACCURACY
    ) -> None:
        self._spec = spec
        self._accuracy = next_gate_accuracy
        self._source = source
        self._rank = rank
        self._kinds = layer_kinds(spec)
        self._room: tuple[F32, F32, F32] | None = None
        """Hidden rows, weights and logits, of the most tokens so far: all of them say nothing."""

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def layers(self) -> tuple[LayerKind, ...]:
        return self._kinds

    def begin(self, batch: StepBatch) -> CountedState:
        tokens = batch.num_tokens
        return CountedState(tokens, self._source.counts(self._rank, batch.microbatch, batch.step, tokens))

    def dense(self, state: CountedState, layer_index: int) -> None:
        """Nothing is kept."""

    def attend(self, state: CountedState, moe_ordinal: int) -> Routed:
        hidden_TD, weights_TK, _ = self._of(state.tokens)
        counts_E = state.counts_LE[moe_ordinal]
        ids_TK = ids_of_counts(counts_E, state.tokens)
        return Routed(hidden_TD, ids_TK, weights_TK, demand_E=counts_E.astype(np.int32))

    def next_choices(self, state: CountedState, moe_ordinal: int) -> I32:
        """As ``AttentionModel``, right for the stated part of the assignments."""
        counts_E = state.counts_LE[moe_ordinal + 1]
        return ids_of_counts(guessed_counts(counts_E, state.tokens, self._accuracy), state.tokens)

    def combine(self, state: CountedState, moe_ordinal: int, expert_out_TD: F32) -> None:
        """Nothing was computed."""

    def logits(self, state: CountedState) -> F32:
        return self._of(state.tokens)[2]

    def _of(self, tokens: int) -> tuple[F32, F32, F32]:
        room = self._room
        if room is None or room[0].shape[0] < tokens:
            hidden_TD = np.zeros((tokens, self._spec.hidden_size), dtype=np.float32)
            weights_TK = np.full((tokens, self._spec.experts_per_token), 1 / self._spec.experts_per_token, np.float32)
            room = self._room = (hidden_TD, weights_TK, np.zeros((tokens, self._spec.vocab_size), dtype=np.float32))
        return room[0][:tokens], room[1][:tokens], room[2][:tokens]


class NothingPrefilled(Prefilled):
    """A chunk that leaves neither keys nor values behind: one write of nothing, which carries the bell."""

    def pack(self, layout: KVLayout, blocks: Sequence[int]) -> list[tuple[int, memoryview]]:
        return [(0, memoryview(b""))]


class CountedPrefill:
    """``PrefillModel`` whose answer is always the same; every prompt is its own run."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._done = NothingPrefilled(np.zeros(spec.vocab_size, dtype=np.float32), ())

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def start(self) -> CountedPrefill:
        return self

    def feed(self, token_ids: Sequence[int]) -> Prefilled:
        return self._done

    def run(self, token_ids: Sequence[int]) -> Prefilled:
        return self._done
