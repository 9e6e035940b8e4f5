"""Products of few rows with a large matrix, as decoding has them: weights stream through the cache once, nothing is packed.

Three matrix rows are read once for all rows of x, four of these at a time, so that twelve sums are in flight. BLAS packs the matrix
first, which a product of few rows does not pay back, and on a machine whose cores are shared its code and buffers have left the
caches between two calls. On two busy EPYC cores, T=8: 256x128 11 us against 18 (54 against 184 with cold caches), 4096x128 315
against 663, 4096x1024 8.3 ms against 25.

Letters: T rows, D inner size, X outer size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types

F32 = npt.NDArray[np.float32]
_ZERO = np.float32(0)
_RELAXED = {"reassoc", "contract", "nsz", "arcp", "afn"}  # not nnan, ninf: a NaN stays visible in the output
MOST_ROWS = 64
"""More than so many rows go to BLAS, which then pays its packing back."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weights of a linear module, [out, in]."""

    torch_XD: torch.Tensor
    numpy_XD: F32

    @classmethod
    def of(cls, weight: torch.Tensor) -> Matrix:
        """Shares the parameter's memory."""
        weight = weight.detach()
        assert weight.is_contiguous(), "rows that do not lie side by side"
        assert weight.dtype == torch.float32, f"a matrix of {weight.dtype}"
        return cls(weight, weight.numpy())

    @property
    def in_size(self) -> int:
        """D."""
        return int(self.numpy_XD.shape[1])

    @property
    def out_size(self) -> int:
        """X."""
        return int(self.numpy_XD.shape[0])


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def few_rows(x_TD, weight_XD, out_TX):  # type: ignore[no-untyped-def]  # numba infers
    """out = x @ weight.T."""
    rows, depth = x_TD.shape
    wide = weight_XD.shape[0]
    rows_by_4, wide_by_3 = rows - rows % 4, wide - wide % 3
    for f in range(0, wide_by_3, 3):
        for t in range(0, rows_by_4, 4):
            a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = e0 = e1 = e2 = _ZERO
            for d in range(depth):
                w0, w1, w2 = weight_XD[f, d], weight_XD[f + 1, d], weight_XD[f + 2, d]
                x = x_TD[t, d]
                a0 += w0 * x
                a1 += w1 * x
                a2 += w2 * x
                x = x_TD[t + 1, d]
                b0 += w0 * x
                b1 += w1 * x
                b2 += w2 * x
                x = x_TD[t + 2, d]
                c0 += w0 * x
                c1 += w1 * x
                c2 += w2 * x
                x = x_TD[t + 3, d]
                e0 += w0 * x
                e1 += w1 * x
                e2 += w2 * x
            out_TX[t, f], out_TX[t, f + 1], out_TX[t, f + 2] = a0, a1, a2
            out_TX[t + 1, f], out_TX[t + 1, f + 1], out_TX[t + 1, f + 2] = b0, b1, b2
            out_TX[t + 2, f], out_TX[t + 2, f + 1], out_TX[t + 2, f + 2] = c0, c1, c2
            out_TX[t + 3, f], out_TX[t + 3, f + 1], out_TX[t + 3, f + 2] = e0, e1, e2
        for t in range(rows_by_4, rows):
            a0 = a1 = a2 = _ZERO
            for d in range(depth):
                x = x_TD[t, d]
                a0 += weight_XD[f, d] * x
                a1 += weight_XD[f + 1, d] * x
                a2 += weight_XD[f + 2, d] * x
            out_TX[t, f], out_TX[t, f + 1], out_TX[t, f + 2] = a0, a1, a2
    for f in range(wide_by_3, wide):
        for t in range(rows):
            a0 = _ZERO
            for d in range(depth):
                a0 += weight_XD[f, d] * x_TD[t, d]
            out_TX[t, f] = a0


def multiply(x_TD: torch.Tensor, x_numpy_TD: F32, matrix: Matrix, out_TX: torch.Tensor, out_numpy_TX: F32) -> None:
    """out = x @ matrix.T; each array is given as both libraries take it."""
    if len(x_numpy_TD) <= MOST_ROWS:
        few_rows(x_numpy_TD, matrix.numpy_XD, out_numpy_TX)
    else:
        torch.mm(x_TD, matrix.torch_XD.t(), out=out_TX)


def compile_product() -> None:
    """Compiles (or reads from numba's cache) the kernel for exactly the types it is called with; idempotent."""
    if not few_rows.signatures:
        rows = types.float32[:, ::1]
        few_rows.compile((rows, rows, rows))
        few_rows.disable_compile()
