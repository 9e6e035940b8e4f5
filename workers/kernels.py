"""The experts on a CPU: one compiled call runs all of a target's pairs on this worker (float32).

Weights of one expert are one row of ``gate_up`` [S, F, D] (F = 2I: rows 0…I-1 gate, I…2I-1 up) and of ``down`` [S, D, I].
Rows of hidden states are gathered in blocks; within a block, four weight rows are read once and used for all its tokens, two
at a time, so that weights stream through the cache once and eight sums are in flight.

Measured on two shared EPYC cores, one thread: 102 µs for T=16, K=8, E=128, D=128, I=32. BLAS per expert (torch.mm into
preallocated outputs) was slower up to 16 rows of one expert at nearly every size to D=4096, I=1408, and at most a third faster
from 64; decode targets rarely have as many, so there is one path.

Experts of another form than three matrices and silu (``ExpertForm``) have a kernel of their own beside it, of the same make.

Reassociated sums are not the float64 reference's (3e-7 of the largest output away), but the same on every call.

Letters: T tokens, K experts per token, P pairs, S store rows, D hidden size, I expert hidden size, F = 2I, B rows of a block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit, types

from afore.models.expert_form import SILU_GATED, Activation, ExpertForm
from afore.models.fused_math import sigmoid32
from afore.workers.device.base import F32, I32, Pairs
from afore.workers.partition import compile_partition, partition

_BLOCK_ROWS = 32
_ZERO = np.float32(0)
_NO_BIAS: F32 = np.zeros((0, 0), dtype=np.float32)
_CLAMPED = int(Activation.CLAMPED)
_RELAXED = {"reassoc", "contract", "nsz", "arcp", "afn"}  # not nnan, ninf: a NaN stays visible in the output


class CpuKernels:
    """``Kernels`` for host memory. Arrays are C-contiguous; inputs may be read-only (rows mapped from a peer)."""

    def __init__(self) -> None:
        compile_kernels()

    def partition(
        self,
        ids_TK: I32,
        shares_X4: I32,
        primary_row_E: I32,
        my_rank: int,
        num_rows: int,
        first_redundant: int,
        out: Pairs,
    ) -> None:
        """See ``Kernels.partition``."""
        partition(ids_TK, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, out)

    def grouped_mlp(
        self,
        hidden_TD: F32,
        weights_TK: F32,
        pairs: Pairs,
        gate_up_SFD: F32,
        down_SDI: F32,
        out_TD: F32,
        form: ExpertForm = SILU_GATED,
        biases: tuple[F32, F32] | None = None,
    ) -> None:
        """See ``Kernels.grouped_mlp``. Raises ``ValueError`` for shapes that do not belong together; releases the GIL."""
        check_shapes(hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD)
        pairs_of = pairs.token_P, pairs.k_P, pairs.start_S1
        if form.activation is Activation.SILU and not form.biases:
            _grouped_mlp(hidden_TD, weights_TK, *pairs_of, gate_up_SFD, down_SDI, out_TD)
            return
        biases = _checked_biases(form, biases, gate_up_SFD, down_SDI)
        constants = int(form.activation), np.float32(form.alpha), np.float32(form.limit)
        _grouped_mlp_formed(hidden_TD, weights_TK, *pairs_of, gate_up_SFD, down_SDI, *biases, *constants, out_TD)


def check_shapes(hidden_TD: F32, weights_TK: F32, pairs: Pairs, gate_up_SFD: F32, down_SDI: F32, out_TD: F32) -> None:
    """Raises ``ValueError`` unless the arrays of ``grouped_mlp`` agree: the compiled kernel checks no index."""
    num_rows, hidden_size, expert_size = down_SDI.shape
    problem = ""
    if gate_up_SFD.shape != (num_rows, 2 * expert_size, hidden_size):
        problem = f"gate_up {gate_up_SFD.shape} and down {down_SDI.shape} are not weights of the same experts"
    elif hidden_TD.shape[1] != hidden_size or out_TD.shape != hidden_TD.shape:
        problem = f"hidden {hidden_TD.shape} and out {out_TD.shape} do not fit experts of width {hidden_size}"
    elif weights_TK.shape[0] != hidden_TD.shape[0]:
        problem = f"{weights_TK.shape[0]} rows of routing weights for {hidden_TD.shape[0]} tokens"
    elif pairs.start_S1.shape[0] != num_rows + 1:
        problem = f"pairs are grouped over {pairs.start_S1.shape[0] - 1} rows, the store has {num_rows}"
    if problem:
        raise ValueError(problem)


def _checked_biases(
    form: ExpertForm, biases: tuple[F32, F32] | None, gate_up_SFD: F32, down_SDI: F32
) -> tuple[F32, F32]:
    """Biases of a form that has them; empty ones otherwise, whatever was given."""
    if not form.biases:
        return _NO_BIAS, _NO_BIAS
    if biases is None:
        raise ValueError("experts of this form have biases, and none were given")
    gate_up_SF, down_SD = biases
    if gate_up_SF.shape != gate_up_SFD.shape[:2] or down_SD.shape != down_SDI.shape[:2]:
        raise ValueError(f"biases {gate_up_SF.shape} and {down_SD.shape} are not of the experts {gate_up_SFD.shape}")
    return gate_up_SF, down_SD


def grouped_mlp_reference(
    hidden_TD: F32,
    weights_TK: F32,
    pairs: Pairs,
    gate_up_SFD: F32,
    down_SDI: F32,
    form: ExpertForm = SILU_GATED,
    biases: tuple[F32, F32] | None = None,
) -> npt.NDArray[np.float64]:
    """The same sum in plain float64 numpy, pair by pair: what the kernel must agree with."""
    out_TD = np.zeros(hidden_TD.shape)
    for row in range(down_SDI.shape[0]):
        gate_FD, up_FD = np.split(gate_up_SFD[row].astype(np.float64), 2)
        for p in range(pairs.start_S1[row], pairs.start_S1[row + 1]):
            token = pairs.token_P[p]
            hidden_D = hidden_TD[token].astype(np.float64)
            gate_I, up_I = gate_FD @ hidden_D, up_FD @ hidden_D
            if biases is not None:
                gate_I, up_I = gate_I + biases[0][row, : len(gate_I)], up_I + biases[0][row, len(gate_I) :]
            if form.activation is Activation.CLAMPED:
                gate_I, up_I = np.minimum(gate_I, form.limit), np.clip(up_I, -form.limit, form.limit)
                hidden_I = gate_I / (1 + np.exp(-form.alpha * gate_I)) * (up_I + 1)
            else:
                hidden_I = gate_I / (1 + np.exp(-gate_I)) * up_I
            row_D = down_SDI[row].astype(np.float64) @ hidden_I
            if biases is not None:
                row_D = row_D + biases[1][row]
            out_TD[token] += float(weights_TK[token, pairs.k_P[p]]) * row_D
    return out_TD


def compile_kernels() -> None:
    """Compiles (or reads from numba's cache) every kernel of an FFN worker, for exactly the types it is called with.

    Called before forking, so that role processes share the code and compile nothing; idempotent.
    """
    compile_partition()
    if _grouped_mlp.signatures:
        return
    rows = types.Array(types.float32, 2, "C", readonly=True)
    index = types.int32[::1]
    weights = types.float32[:, :, ::1]
    _grouped_mlp.compile((rows, rows, index, index, index, weights, weights, types.float32[:, ::1]))
    _grouped_mlp.disable_compile()
    bias, scalar = types.float32[:, ::1], types.float32
    _grouped_mlp_formed.compile(
        (rows, rows, index, index, index, weights, weights, bias, bias, types.int64, scalar, scalar, bias)
    )
    _grouped_mlp_formed.disable_compile()


@njit(nogil=True, fastmath=_RELAXED, error_model="numpy")
def _project(x_BD, count, weight_FD, out_BF):  # type: ignore[no-untyped-def]  # numba infers
    """out[b] = weight @ x[b] for b < count: two rows of x by four of weight at a time."""
    rows, depth = weight_FD.shape
    rows_by_4 = rows - rows % 4
    count_by_2 = count - count % 2
    for f in range(0, rows_by_4, 4):
        for b in range(0, count_by_2, 2):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = _ZERO
            for d in range(depth):
                x0 = x_BD[b, d]
                x1 = x_BD[b + 1, d]
                w = weight_FD[f, d]
                a0 += w * x0
                b0 += w * x1
                w = weight_FD[f + 1, d]
                a1 += w * x0
                b1 += w * x1
                w = weight_FD[f + 2, d]
                a2 += w * x0
                b2 += w * x1
                w = weight_FD[f + 3, d]
                a3 += w * x0
                b3 += w * x1
            out_BF[b, f], out_BF[b, f + 1], out_BF[b, f + 2], out_BF[b, f + 3] = a0, a1, a2, a3
            out_BF[b + 1, f], out_BF[b + 1, f + 1], out_BF[b + 1, f + 2], out_BF[b + 1, f + 3] = b0, b1, b2, b3
        for b in range(count_by_2, count):
            a0 = a1 = a2 = a3 = _ZERO
            for d in range(depth):
                x0 = x_BD[b, d]
                a0 += weight_FD[f, d] * x0
                a1 += weight_FD[f + 1, d] * x0
                a2 += weight_FD[f + 2, d] * x0
                a3 += weight_FD[f + 3, d] * x0
            out_BF[b, f], out_BF[b, f + 1], out_BF[b, f + 2], out_BF[b, f + 3] = a0, a1, a2, a3
    for f in range(rows_by_4, rows):
        for b in range(count):
            a0 = _ZERO
            for d in range(depth):
                a0 += weight_FD[f, d] * x_BD[b, d]
            out_BF[b, f] = a0


@njit(nogil=True, fastmath=_RELAXED, error_model="numpy")
def _swiglu(hidden_F, weight, out_I):  # type: ignore[no-untyped-def]  # numba infers
    """out = weight * silu(gate) * up."""
    size = out_I.shape[0]
    for i in range(size):
        gate = hidden_F[i]
        out_I[i] = weight * hidden_F[size + i] * gate * sigmoid32(gate)


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def _grouped_mlp(hidden_TD, weights_TK, token_P, k_P, start_S1, gate_up_SFD, down_SDI, out_TD):  # type: ignore[no-untyped-def]  # numba infers
    out_TD[:] = _ZERO
    hidden_size = hidden_TD.shape[1]
    expert_size = down_SDI.shape[2]
    x_BD = np.empty((_BLOCK_ROWS, hidden_size), dtype=np.float32)
    y_BD = np.empty((_BLOCK_ROWS, hidden_size), dtype=np.float32)
    h_BF = np.empty((_BLOCK_ROWS, 2 * expert_size), dtype=np.float32)
    a_BI = np.empty((_BLOCK_ROWS, expert_size), dtype=np.float32)
    for row in range(start_S1.shape[0] - 1):
        first = start_S1[row]
        while first < start_S1[row + 1]:
            count = min(_BLOCK_ROWS, start_S1[row + 1] - first)
            for b in range(count):
                x_BD[b] = hidden_TD[token_P[first + b]]
            _project(x_BD, count, gate_up_SFD[row], h_BF)
            for b in range(count):
                _swiglu(h_BF[b], weights_TK[token_P[first + b], k_P[first + b]], a_BI[b])
            _project(a_BI, count, down_SDI[row], y_BD)
            for b in range(count):
                token = token_P[first + b]
                for d in range(hidden_size):
                    out_TD[token, d] += y_BD[b, d]
            first += count


@njit(nogil=True, fastmath=_RELAXED, error_model="numpy")
def _clamped(hidden_F, weight, alpha, limit, out_I):  # type: ignore[no-untyped-def]  # numba infers
    """out = weight * g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = up within ±limit. A NaN stays one."""
    size = out_I.shape[0]
    for i in range(size):
        gate, up = hidden_F[i], hidden_F[size + i]
        gate = limit if gate > limit else gate
        up = limit if up > limit else (-limit if up < -limit else up)
        out_I[i] = weight * (up + np.float32(1)) * gate * sigmoid32(alpha * gate)


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def _grouped_mlp_formed(  # type: ignore[no-untyped-def]  # numba infers
    hidden_TD,
    weights_TK,
    token_P,
    k_P,
    start_S1,
    gate_up_SFD,
    down_SDI,
    gate_up_bias_SF,
    down_bias_SD,
    activation,
    alpha,
    limit,
    out_TD,
):
    """``_grouped_mlp`` for any form: biases where there are rows of them, and the activation that is asked for."""
    out_TD[:] = _ZERO
    hidden_size = hidden_TD.shape[1]
    expert_size = down_SDI.shape[2]
    biased = gate_up_bias_SF.shape[0] > 0
    x_BD = np.empty((_BLOCK_ROWS, hidden_size), dtype=np.float32)
    y_BD = np.empty((_BLOCK_ROWS, hidden_size), dtype=np.float32)
    h_BF = np.empty((_BLOCK_ROWS, 2 * expert_size), dtype=np.float32)
    a_BI = np.empty((_BLOCK_ROWS, expert_size), dtype=np.float32)
    for row in range(start_S1.shape[0] - 1):
        first = start_S1[row]
        while first < start_S1[row + 1]:
            count = min(_BLOCK_ROWS, start_S1[row + 1] - first)
            for b in range(count):
                x_BD[b] = hidden_TD[token_P[first + b]]
            _project(x_BD, count, gate_up_SFD[row], h_BF)
            for b in range(count):
                weight = weights_TK[token_P[first + b], k_P[first + b]]
                if biased:
                    for f in range(2 * expert_size):
                        h_BF[b, f] += gate_up_bias_SF[row, f]
                if activation == _CLAMPED:
                    _clamped(h_BF[b], weight, alpha, limit, a_BI[b])
                else:
                    _swiglu(h_BF[b], weight, a_BI[b])
            _project(a_BI, count, down_SDI[row], y_BD)
            for b in range(count):
                token = token_P[first + b]
                for d in range(hidden_size):
                    out_TD[token, d] += y_BD[b, d]
                if biased:
                    weight = weights_TK[token, k_P[first + b]]
                    for d in range(hidden_size):
                        out_TD[token, d] += weight * down_bias_SD[row, d]
            first += count
