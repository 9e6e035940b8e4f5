"""The model's seam without a model, for virtual time: no ``transformers`` module runs, and every answer can be checked.

- Routing is skewed and drifts: each layer has its own popular experts, and which they are changes slowly with the position.
- Hidden rows carry a tag of (token, position, layer). ``combine`` knows what the routed sum must be, so a pair that is lost,
  computed twice, or computed with another expert's weights is an ``AssertionError`` that names the row.
- The next token depends on every cached key and value of the sequence, as attention does: a block that is not written, or
  written twice, changes the tokens. ``emulated_tokens`` says, without a cache, what they must be.

All of it is a pure function of the seed: integer mixing, no generator state, nothing from Python's ``hash``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from afore.models.attention import F32, I32, I64, LayerKind, Routed, StepBatch, layer_kinds
from afore.models.config import ModelSpec
from afore.models.kv import KEYS, VALUES, KVStorage
from afore.models.prefill import Prefilled

U64 = npt.NDArray[np.uint64]
ExpertFunction = Callable[[F32, I32], F32]
"""What the emulated experts compute: (hidden rows [P, D], their experts [P]) → output rows [P, D]."""

_TAG_VALUES = 1 << 12
_TOLERANCE = 1e-4
_ROUTE, _POPULARITY, _HIDDEN, _TOKEN, _GUESS = 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingProfile:
    """How skewed the emulated routing is."""

    skew: float = 1.0
    """Slope of log popularity over log rank: 0 is uniform, 1 gives max/mean over experts of about 5 for 128 experts, top-8."""
    drift_positions: float = 256.0
    """Positions in which the popular experts move once around; infinite for routing that stays."""
    drift: float = 1.0
    """How strongly: log popularity added at the crest of the moving wave."""
    next_gate_accuracy: float = 0.9
    """Part of a layer's choices that its gate finds on the hidden states of the layer before; what it misses are any other experts.
    Published: 0.86 to 0.92 on one model, 0.73 to 0.80 on another."""


def emulated_spec(
    *,
    num_experts: int = 64,
    experts_per_token: int = 4,
    moe_layers: int = 3,
    dense_layers: int = 1,
    hidden_size: int = 8,
    expert_size: int = 4,
    vocab_size: int = 256,
    max_positions: int = 4096,
) -> ModelSpec:
    """A spec for the emulated model: small rows, one float of keys and of values per token and layer, no end token."""
    return ModelSpec(
        family="emulated",
        num_layers=dense_layers + moe_layers,
        moe_layers=tuple(range(dense_layers, dense_layers + moe_layers)),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        hidden_size=hidden_size,
        expert_size=expert_size,
        expert_dtype="float32",
        has_shared_experts=False,
        vocab_size=vocab_size,
        eos_ids=(),
        max_positions=max_positions,
        num_heads=1,
        kv_parts=((1, 1), (1, 1)),
    )


def tagged_expert(hidden_PD: F32, expert_P: I32) -> F32:
    """Expert e multiplies a row by 1 + e/1024: the sum tells which experts were used, however it was split and added."""
    factor_P = 1.0 + expert_P.astype(np.float32) / 1024.0
    scaled: F32 = hidden_PD * factor_P[:, None]
    return scaled


def routed_sum(routed: Routed, expert: ExpertFunction = tagged_expert) -> F32:
    """What the FFN workers together must return for ``routed``: [T, D]."""
    rows, choices = routed.ids_TK.shape
    outputs = expert(np.repeat(routed.hidden_TD, choices, axis=0), routed.ids_TK.reshape(-1))
    weighted = outputs.reshape(rows, choices, -1) * routed.weights_TK[:, :, None]
    total: F32 = weighted.sum(axis=1, dtype=np.float32)
    return total


@dataclass(slots=True)
class EmulatedState:
    """One step in flight."""

    batch: StepBatch
    slots_T: I64
    expected_TD: F32 | None = None
    """What ``combine`` must receive; ``None`` outside a MoE layer."""


class EmulatedAttention:
    """``AttentionModel`` over a real paged cache, with made-up numbers that can be checked."""

    def __init__(
        self,
        spec: ModelSpec,
        storage: KVStorage,
        *,
        seed: int = 0,
        routing: RoutingProfile | None = None,
        expert: ExpertFunction | None = tagged_expert,
    ) -> None:
        """``expert`` is what the device computes, to check sums against; ``None`` for a device that computes nothing."""
        assert storage.layout.parts == spec.kv_parts, "a cache of another model"
        self._spec = spec
        self._seed = seed
        self._expert = expert
        self._routing = _Routing(spec, seed, routing or RoutingProfile())
        self._kinds = layer_kinds(spec)
        self._block_tokens = storage.layout.block_tokens
        self._planes = [(keys.numpy(), values.numpy()) for keys, values in storage.planes]

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def layers(self) -> tuple[LayerKind, ...]:
        return self._kinds

    def begin(self, batch: StepBatch) -> EmulatedState:
        blocks_T = batch.block_tables_TB[np.arange(batch.num_tokens), batch.positions_T // self._block_tokens]
        slots_T = blocks_T.astype(np.int64) * self._block_tokens + batch.positions_T % self._block_tokens
        return EmulatedState(batch, slots_T)

    def dense(self, state: EmulatedState, layer_index: int) -> None:
        self._write(state, layer_index)

    def attend(self, state: EmulatedState, moe_ordinal: int) -> Routed:
        assert state.expected_TD is None, "combine the previous layer first"
        self._write(state, self._spec.moe_layers[moe_ordinal])
        batch = state.batch
        mixed_T = _mix(self._seed, _HIDDEN, moe_ordinal, batch.token_ids_T, batch.positions_T)
        tag_T = 1.0 + (mixed_T % np.uint64(_TAG_VALUES)).astype(np.float32) / _TAG_VALUES
        columns_D = 1.0 + np.arange(self._spec.hidden_size, dtype=np.float32) / self._spec.hidden_size
        ids_TK, weights_TK = self._routing.route(moe_ordinal, batch.token_ids_T, batch.positions_T)
        routed = Routed(np.ascontiguousarray(tag_T[:, None] * columns_D), ids_TK, weights_TK)
        state.expected_TD = (
            np.zeros_like(routed.hidden_TD) if self._expert is None else routed_sum(routed, self._expert)
        )
        return routed

    def next_choices(self, state: EmulatedState, moe_ordinal: int) -> I32:
        assert state.expected_TD is not None, "attend this layer first"
        return self._routing.guess(moe_ordinal + 1, state.batch.token_ids_T, state.batch.positions_T)

    def combine(self, state: EmulatedState, moe_ordinal: int, expert_out_TD: F32) -> None:
        expected_TD = state.expected_TD
        assert expected_TD is not None, "attend this layer first"
        state.expected_TD = None
        if self._expert is None:
            return
        assert expert_out_TD.shape == expected_TD.shape, f"{expert_out_TD.shape} rows for {expected_TD.shape}"
        wrong = ~np.isclose(expert_out_TD, expected_TD, rtol=_TOLERANCE, atol=0.0).all(axis=1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise AssertionError(
                f"MoE layer {moe_ordinal}: {int(wrong.sum())} of {wrong.size} rows are wrong; row {row} "
                f"(position {state.batch.positions_T[row]}) begins with {expert_out_TD[row, 0]}, not {expected_TD[row, 0]}"
            )

    def logits(self, state: EmulatedState) -> F32:
        logits_TV = np.zeros((state.batch.num_tokens, self._spec.vocab_size), dtype=np.float32)
        for row, position in enumerate(state.batch.positions_T):
            blocks = state.batch.block_tables_TB[row, : position // self._block_tokens + 1].astype(np.int64)
            slots = (blocks[:, None] * self._block_tokens + np.arange(self._block_tokens)).reshape(-1)[: position + 1]
            cached = sum(int(plane[slots].sum(dtype=np.float64)) for planes in self._planes for plane in planes)
            logits_TV[row, _next_token(self._spec, self._seed, cached, int(position))] = 1.0
        return logits_TV

    def _write(self, state: EmulatedState, layer_index: int) -> None:
        batch = state.batch
        for part in (KEYS, VALUES):
            tags_T = _cache_tags(self._seed, layer_index, part, batch.token_ids_T, batch.positions_T)
            self._planes[layer_index][part][state.slots_T, 0] = tags_T


class EmulatedPrefill:
    """``PrefillModel`` whose keys and values are what ``EmulatedAttention`` would have written."""

    def __init__(self, spec: ModelSpec, *, seed: int = 0) -> None:
        self._spec = spec
        self._seed = seed

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def start(self) -> EmulatedPrefillRun:
        return EmulatedPrefillRun(self._spec, self._seed)

    def run(self, token_ids: Sequence[int]) -> Prefilled:
        return self.start().feed(token_ids)


class EmulatedPrefillRun:
    """``PrefillRun`` that remembers the sum of what it has cached."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self._length = self._cached = 0

    def feed(self, token_ids: Sequence[int]) -> Prefilled:
        assert len(token_ids) >= 1, "an empty chunk"
        start = self._length
        tags_LPn = _sequence_tags(self._spec, self._seed, token_ids, start)
        self._length += len(token_ids)
        self._cached += int(tags_LPn.sum(dtype=np.float64))
        layers = tuple((_as_states(tags[KEYS]), _as_states(tags[VALUES])) for tags in tags_LPn)
        logits_V = np.zeros(self._spec.vocab_size, dtype=np.float32)
        logits_V[_next_token(self._spec, self._seed, self._cached, self._length - 1)] = 1.0
        return Prefilled(logits_V, layers, start)


def emulated_tokens(spec: ModelSpec, prompt_ids: Sequence[int], max_new_tokens: int, *, seed: int = 0) -> list[int]:
    """The greedy tokens after a prompt: what a whole emulated system must produce."""
    cached = int(_sequence_tags(spec, seed, prompt_ids).sum(dtype=np.float64))
    position = len(prompt_ids) - 1
    tokens = [_next_token(spec, seed, cached, position)]
    while len(tokens) < max_new_tokens:
        position += 1
        token, at = np.asarray([tokens[-1]]), np.asarray([position])
        for layer in range(spec.num_layers):
            cached += sum(int(_cache_tags(seed, layer, part, token, at)[0]) for part in (KEYS, VALUES))
        tokens.append(_next_token(spec, seed, cached, position))
    return tokens


class _Routing:
    """Top-K of popularity plus noise (Gumbel), each a pure function of (seed, layer, token, position, expert)."""

    def __init__(self, spec: ModelSpec, seed: int, profile: RoutingProfile) -> None:
        self._spec, self._seed, self._profile = spec, seed, profile
        experts_E = np.arange(spec.num_experts)
        self._popularity_LE: list[npt.NDArray[np.float64]] = []
        for layer in range(spec.num_moe_layers):
            rank_E = np.argsort(np.argsort(_mix(seed, _POPULARITY, layer, experts_E), kind="stable"), kind="stable")
            self._popularity_LE.append(-profile.skew * np.log1p(rank_E.astype(np.float64)))

    def route(self, layer: int, token_ids_T: I64, positions_T: I64) -> tuple[I32, F32]:
        """K distinct ids [T, K] and weights [T, K] that sum to 1."""
        score_TE = self._scores(layer, token_ids_T, positions_T)
        ids_TK = np.argsort(-score_TE, axis=1, kind="stable")[:, : self._spec.experts_per_token]
        chosen_TK = np.take_along_axis(score_TE, ids_TK, axis=1)
        weights_TK = np.exp(chosen_TK - chosen_TK[:, :1])
        weights_TK /= weights_TK.sum(axis=1, keepdims=True)
        return np.ascontiguousarray(ids_TK, dtype=np.int32), np.ascontiguousarray(weights_TK, dtype=np.float32)

    def guess(self, layer: int, token_ids_T: I64, positions_T: I64) -> I32:
        """``route``'s ids [T, K] as the layer before would guess them: each one right with the profile's probability."""
        E, K = self._spec.num_experts, self._spec.experts_per_token
        order_TE = np.argsort(-self._scores(layer, token_ids_T, positions_T), axis=1, kind="stable")
        places_K = np.arange(K)
        mixed_TK = _mix(self._seed, _GUESS, layer, token_ids_T[:, None], positions_T[:, None], places_K[None, :])
        if K == E:
            return np.ascontiguousarray(order_TE, dtype=np.int32)
        # Neighbours in the order of those that were not chosen: distinct as long as there are K of them.
        strays_TK = K + ((mixed_TK[:, :1] % np.uint64(E - K)).astype(np.int64) + places_K) % (E - K)
        right_TK = _uniform(mixed_TK) < self._profile.next_gate_accuracy
        found_TK = np.take_along_axis(order_TE, np.where(right_TK, places_K[None, :], strays_TK), axis=1)
        return np.ascontiguousarray(found_TK, dtype=np.int32)

    def _scores(self, layer: int, token_ids_T: I64, positions_T: I64) -> npt.NDArray[np.float64]:
        experts_E = np.arange(self._spec.num_experts)
        noise_TE = _uniform(
            _mix(self._seed, _ROUTE, layer, token_ids_T[:, None], positions_T[:, None], experts_E[None, :])
        )
        turns_T = positions_T / self._profile.drift_positions
        phase_TE = experts_E[None, :] / self._spec.num_experts - turns_T[:, None]
        score_TE = self._popularity_LE[layer] + self._profile.drift * np.cos(2.0 * np.pi * phase_TE)
        scored_TE: npt.NDArray[np.float64] = score_TE - np.log(-np.log(noise_TE))
        return scored_TE


def _mix(seed: int, *words: int | npt.NDArray[np.integer[npt.NBitBase]] | npt.NDArray[np.int64]) -> U64:
    """SplitMix64's finaliser over the words, broadcast: equal inputs give equal outputs on every machine."""
    state: U64 = np.asarray([seed & (2**64 - 1)], dtype=np.uint64)
    for word in words:
        value = np.asarray(word).astype(np.uint64)
        state = (state ^ value) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def _uniform(words: U64) -> npt.NDArray[np.float64]:
    """Numbers strictly between 0 and 1."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def _cache_tags(seed: int, layer: int, part: int, token_ids_T: I64, positions_T: I64) -> F32:
    """What is cached for a token, small integers that float32 and their sums in float64 hold exactly."""
    mixed_T = _mix(seed, _TOKEN, layer, part, token_ids_T, positions_T)
    tags_T: F32 = (mixed_T % np.uint64(1 << 20)).astype(np.float32) + np.float32(1.0)
    return tags_T


def _sequence_tags(spec: ModelSpec, seed: int, token_ids: Sequence[int], start: int = 0) -> F32:
    """All that n tokens from position ``start`` have cached: [layers, parts, n]."""
    ids_n = np.asarray(token_ids, dtype=np.int64)
    positions_n = np.arange(start, start + len(token_ids), dtype=np.int64)
    layers = range(spec.num_layers)
    return np.stack([[_cache_tags(seed, l, p, ids_n, positions_n) for p in (KEYS, VALUES)] for l in layers])


def _as_states(tags_n: F32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(tags_n))[None, :, None]


def _next_token(spec: ModelSpec, seed: int, cached_sum: int, position: int) -> int:
    return int(_mix(seed, _TOKEN, cached_sum, position)[0] % np.uint64(spec.vocab_size))
