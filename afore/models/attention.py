"""The seam between an attention worker and the model: one decode step, layer by layer, with the routed experts left out.

A role drives it so, for each step of each microbatch::

    state = model.begin(batch)
    for layer in model.layers():
        if layer.moe_ordinal is None:
            model.dense(state, layer.index)
        else:
            routed = model.attend(state, layer.moe_ordinal)
            ...                                             # the FFN workers compute the routed sum
            model.combine(state, layer.moe_ordinal, expert_out_TD)
    logits_TV = model.logits(state)

States of several microbatches may interleave. A row is one request's one new token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from afore.core.record import record
from afore.models.config import ModelSpec

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@record
class StepBatch:
    """The rows of one step on one attention worker: T ≥ 1 requests with one new token each."""

    token_ids_T: I64
    """The token that each row feeds in."""
    positions_T: I64
    """Its position in its sequence; positions before it are already cached."""
    block_tables_TB: I32
    """Blocks of each row's sequence in order, padded with any block number."""
    microbatch: int = 0
    """Whose step it is. Only models without weights look at these two: their routing is given by target."""
    step: int = 0

    def __post_init__(self) -> None:
        rows = self.token_ids_T.shape[0]
        assert rows >= 1, "a step without tokens is not run"
        assert self.token_ids_T.shape == self.positions_T.shape == (rows,), "one token and one position a row"
        assert self.block_tables_TB.ndim == 2, "block tables are [T, blocks]"
        assert self.block_tables_TB.shape[0] == rows, "one block table a row"

    @classmethod
    def of(cls, token_ids: Sequence[int], positions: Sequence[int], block_tables: Sequence[Sequence[int]]) -> StepBatch:
        """Builds a batch from lists; block tables may differ in length."""
        tables_TB = np.zeros((len(block_tables), max(map(len, block_tables), default=0)), dtype=np.int32)
        for row, table in enumerate(block_tables):
            tables_TB[row, : len(table)] = table
        return cls(np.asarray(token_ids, dtype=np.int64), np.asarray(positions, dtype=np.int64), tables_TB)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids_T.shape[0])

    @property
    def context(self) -> int:
        """Cached positions that attention reads in each layer, summed over rows."""
        return int(self.positions_T.sum()) + self.num_tokens


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One decoder layer: dense, or the MoE layer of that ordinal."""

    index: int
    """The model's layer index."""
    moe_ordinal: int | None
    """0…L-1, or ``None`` for a dense layer."""


@record
class Routed:
    """What leaves an attention worker for a target: contiguous arrays, valid until ``combine`` of the same target."""

    hidden_TD: F32
    """Rows after the post-attention norm."""
    ids_TK: I32
    """The K distinct experts of each row, in no particular order."""
    weights_TK: F32
    """What each expert's output is multiplied with."""
    demand_E: I32 | None = None
    """How often each expert was chosen, where that was counted already."""
    in_place: bool = False
    """The rows lie where FFN workers read them, in a GPU's memory: the arrays have T rows and no columns."""


class AttentionModel(Protocol):
    """One decode step without the routed experts. ``state`` is what ``begin`` returned, opaque to the caller."""

    @property
    def spec(self) -> ModelSpec: ...

    def begin(self, batch: StepBatch) -> Any:
        """Embeds the tokens, and prepares mask, rotary tables and cache slots for all layers."""
        ...

    def layers(self) -> tuple[LayerKind, ...]:
        """All decoder layers in order."""
        ...

    def dense(self, state: Any, layer_index: int) -> None:
        """Runs a whole dense layer."""
        ...

    def attend(self, state: Any, moe_ordinal: int) -> Routed:
        """Input norm, attention, post norm, gate and top-k of a MoE layer: once."""
        ...

    def next_choices(self, state: Any, moe_ordinal: int) -> I32:
        """The experts [T, K] that the next MoE layer's gate picks for this one's rows, between ``attend`` and ``combine``: a guess
        at what it will pick for its own. Changes nothing."""
        ...

    def combine(self, state: Any, moe_ordinal: int, expert_out_TD: F32) -> None:
        """Adds the routed sum [T, D], the shared experts and the residual."""
        ...

    def logits(self, state: Any) -> F32:
        """Logits [T, V] of the next token."""
        ...


def layer_kinds(spec: ModelSpec) -> tuple[LayerKind, ...]:
    """All layers of a model in order, with their MoE ordinals."""
    ordinal_of = {index: ordinal for ordinal, index in enumerate(spec.moe_layers)}
    return tuple(LayerKind(index, ordinal_of.get(index)) for index in range(spec.num_layers))
