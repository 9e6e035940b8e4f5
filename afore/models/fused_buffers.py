"""Memory of the fused path, allocated once and grown: views of T rows are made once for each T.

A step in flight has rows of its own (``StepRows``), which the pool takes back after its logits; ``ScratchRows`` holds what lives
within one call, shared by all steps, since calls come one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from afore.models.fused_product import Matrix, multiply
from afore.models.fused_weights import FusedWeights

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
_FIRST_ROWS = 16


class Rows(Protocol):
    """Arrays with the same number of rows."""

    def first(self, rows: int) -> Self:
        """Views of the first rows."""
        ...


R = TypeVar("R", bound=Rows)


@dataclass(frozen=True, slots=True)
class Both:
    """One array, as torch and as the kernels take it."""

    torch: torch.Tensor
    numpy: F32

    @classmethod
    def of(cls, rows: int, width: int) -> Both:
        """Zeroed; [rows, width]."""
        array: F32 = np.zeros((rows, width), dtype=np.float32)
        with torch.inference_mode(False):  # a tensor made in that mode could only be written in it
            return cls(torch.from_numpy(array), array)

    def times(self, matrix: Matrix, out: Both) -> None:
        """out = self @ matrix.T."""
        multiply(self.torch, self.numpy, matrix, out.torch, out.numpy)

    def first(self, rows: int) -> Both:
        """A view of the first rows."""
        return Both(self.torch[:rows], self.numpy[:rows])


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one step in flight."""

    x_TD: Both
    """The residual stream."""
    normed_TD: Both
    """After the next layer's input norm, or after the last layer's final one."""
    hidden_TD: Both
    """After the post-attention norm: what the experts get."""
    ids_TK: I32
    weights_TK: F32

    def first(self, rows: int) -> StepRows:
        """Views of the first rows."""
        return StepRows(
            self.x_TD.first(rows),
            self.normed_TD.first(rows),
            self.hidden_TD.first(rows),
            self.ids_TK[:rows],
            self.weights_TK[:rows],
        )


@dataclass(frozen=True, slots=True)
class ScratchRows:
    """Rows that live within one call; MLPs of different widths have buffers of their own."""

    qkv_TX: Both
    attended_TZ: Both
    added_TD: Both
    logits_TE: Both
    gate_up_TF: dict[int, Both]
    """By F."""
    activated_TI: dict[int, Both]
    """By I."""
    logits_TV: Both

    def first(self, rows: int) -> ScratchRows:
        """Views of the first rows."""
        return ScratchRows(
            self.qkv_TX.first(rows),
            self.attended_TZ.first(rows),
            self.added_TD.first(rows),
            self.logits_TE.first(rows),
            {width: both.first(rows) for width, both in self.gate_up_TF.items()},
            {width: both.first(rows) for width, both in self.activated_TI.items()},
            self.logits_TV.first(rows),
        )


class Views(Generic[R]):
    """Buffers of some rows, and their views of fewer, each made once."""

    def __init__(self, whole: R, rows: int) -> None:
        self.rows = rows
        """How many there are."""
        self._whole = whole
        self._views: dict[int, R] = {}

    def first(self, rows: int) -> R:
        """Views of the first ``rows`` rows."""
        found = self._views.get(rows)
        if found is None:
            assert rows <= self.rows, f"{rows} rows of {self.rows}"
            found = self._views[rows] = self._whole.first(rows)
        return found


class BufferPool:
    """Every buffer of one model, grown when a step has more rows than any before."""

    def __init__(self, weights: FusedWeights) -> None:
        self._weights = weights
        self._rows = _FIRST_ROWS
        self._free: list[Views[StepRows]] = []
        self._scratch = Views(self._new_scratch(), self._rows)

    def take(self, rows: int) -> Views[StepRows]:
        """Buffers for a step of ``rows`` rows; those of a step that is given up are simply let go of."""
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
            self._scratch = Views(self._new_scratch(), self._rows)
            self._free.clear()
        return self._free.pop() if self._free else Views(self._new_step(), self._rows)

    def give_back(self, views: Views[StepRows]) -> None:
        """The step is over, and nobody looks at its rows any more."""
        if views.rows == self._rows:
            self._free.append(views)

    def scratch(self, rows: int) -> ScratchRows:
        """What the calls of a step of ``rows`` rows share."""
        return self._scratch.first(rows)

    def _new_step(self) -> StepRows:
        spec, rows = self._weights.model.spec, self._rows
        hidden = spec.hidden_size
        return StepRows(
            x_TD=Both.of(rows, hidden),
            normed_TD=Both.of(rows, hidden),
            hidden_TD=Both.of(rows, hidden),
            ids_TK=np.zeros((rows, spec.experts_per_token), dtype=np.int32),
            weights_TK=np.zeros((rows, spec.experts_per_token), dtype=np.float32),
        )

    def _new_scratch(self) -> ScratchRows:
        weights, rows = self._weights, self._rows
        spec, layer = weights.model.spec, weights.layers[0]
        widths = {layer.mlp.gate_up.out_size for layer in weights.layers if layer.mlp is not None}
        return ScratchRows(
            qkv_TX=Both.of(rows, layer.qkv.out_size),
            attended_TZ=Both.of(rows, layer.out.in_size),
            added_TD=Both.of(rows, spec.hidden_size),
            logits_TE=Both.of(rows, spec.num_experts),
            gate_up_TF={width: Both.of(rows, width) for width in widths},
            activated_TI={width // 2: Both.of(rows, width // 2) for width in widths},
            logits_TV=Both.of(rows, weights.head.out_size),
        )
