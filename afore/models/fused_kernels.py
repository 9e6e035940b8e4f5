"""What lies between the matrices of a layer, compiled: norms with the residual, the gate's choice, silu · up.

Each kernel has a plain counterpart in ``fused_reference`` that it is compared with. Float32 throughout; arrays are C-contiguous and
their shapes belong together: the kernels check no index, ``attention_fused`` does.

Letters: T rows, D hidden size, E experts, K experts per token, F = 2I gate and up columns of an MLP side by side.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from afore.models.fused_math import exp32, sigmoid32
from afore.models.fused_paged import compile_paged
from afore.models.fused_product import compile_product

_ZERO, _ONE = np.float32(0), np.float32(1)
_LOWEST = np.float32(-np.inf)
_RELAXED = {"reassoc", "contract", "nsz", "arcp", "afn"}  # not nnan, ninf: a NaN stays visible in the output


@njit(fastmath=_RELAXED, error_model="numpy")
def _norm(x_D, weight_D, bias_D, eps, out_D):  # type: ignore[no-untyped-def]  # numba infers
    """RMS norm; with a bias (not empty) layer norm, which takes the mean away first."""
    size = x_D.shape[0]
    centred = bias_D.shape[0] > 0
    mean = _ZERO
    if centred:
        for d in range(size):
            mean += x_D[d]
        mean /= np.float32(size)
    total = _ZERO
    for d in range(size):
        total += (x_D[d] - mean) * (x_D[d] - mean)
    factor = _ONE / np.sqrt(total / np.float32(size) + eps)
    if centred:
        for d in range(size):
            out_D[d] = (x_D[d] - mean) * factor * weight_D[d] + bias_D[d]
    else:
        for d in range(size):
            out_D[d] = weight_D[d] * (x_D[d] * factor)


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def norm_rows(x_TD, weight_D, bias_D, eps, out_TD):  # type: ignore[no-untyped-def]  # numba infers
    """out = norm(x)."""
    for t in range(x_TD.shape[0]):
        _norm(x_TD[t], weight_D, bias_D, eps, out_TD[t])


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def add_and_norm(x_TD, added_TD, added_bias_D, weight_D, bias_D, eps, out_TD):  # type: ignore[no-untyped-def]  # numba infers
    """x += added (+ its bias); out = norm(x)."""
    size = x_TD.shape[1]
    for t in range(x_TD.shape[0]):
        x_D, added_D = x_TD[t], added_TD[t]
        if added_bias_D.shape[0] > 0:
            for d in range(size):
                x_D[d] += added_D[d] + added_bias_D[d]
        else:
            for d in range(size):
                x_D[d] += added_D[d]
        _norm(x_D, weight_D, bias_D, eps, out_TD[t])


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def add_two_and_norm(x_TD, routed_TD, shared_TD, hidden_TD, gate_D, weight_D, bias_D, eps, out_TD):  # type: ignore[no-untyped-def]  # numba infers
    """x += routed + shared; out = norm(x). A gate (not empty) multiplies ``shared`` with sigmoid(gate · hidden) first."""
    size = x_TD.shape[1]
    for t in range(x_TD.shape[0]):
        x_D, routed_D, shared_D = x_TD[t], routed_TD[t], shared_TD[t]
        if gate_D.shape[0] > 0:
            score, hidden_D = _ZERO, hidden_TD[t]
            for d in range(size):
                score += gate_D[d] * hidden_D[d]
            share = sigmoid32(score)
            for d in range(size):
                x_D[d] += routed_D[d] + share * shared_D[d]
        else:
            for d in range(size):
                x_D[d] += routed_D[d] + shared_D[d]
        _norm(x_D, weight_D, bias_D, eps, out_TD[t])


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def silu_up(gate_up_TF, bias_F, out_TI):  # type: ignore[no-untyped-def]  # numba infers
    """out = silu(gate) * up of [gate | up] (+ their bias, where it is not empty)."""
    size = out_TI.shape[1]
    for t in range(out_TI.shape[0]):
        row_F, out_I = gate_up_TF[t], out_TI[t]
        if bias_F.shape[0] > 0:
            for f in range(row_F.shape[0]):
                row_F[f] += bias_F[f]
        gate_I, up_I = row_F[:size], row_F[size:]
        for i in range(size):
            out_I[i] = gate_I[i] * sigmoid32(gate_I[i]) * up_I[i]


@njit(fastmath=_RELAXED, error_model="numpy")
def _best_groups(choice_E, groups, kept):  # type: ignore[no-untyped-def]  # numba infers
    """Sets the choice scores of every group but the ``kept`` best to minus infinity; the lower group wins a tie."""
    size = choice_E.shape[0] // groups
    score_G = np.empty(groups, dtype=np.float32)
    for g in range(groups):
        first = second = _LOWEST
        for e in range(g * size, (g + 1) * size):
            if choice_E[e] > first:
                first, second = choice_E[e], first
            elif choice_E[e] > second:
                second = choice_E[e]
        score_G[g] = first + second
    for g in range(groups):
        before = 0
        for other in range(groups):
            if score_G[other] > score_G[g] or (score_G[other] == score_G[g] and other < g):
                before += 1
        if before >= kept:
            for e in range(g * size, (g + 1) * size):
                choice_E[e] = _LOWEST


@njit(fastmath=_RELAXED, error_model="numpy")
def _best(choice_E, ids_K, best_K):  # type: ignore[no-untyped-def]  # numba infers
    """The K best, best first, the lower expert before the higher; always K distinct ones, whatever the scores are."""
    count = ids_K.shape[0]
    for k in range(count):
        best_K[k] = _LOWEST
        ids_K[k] = k
    held = 0
    for e in range(choice_E.shape[0]):
        value = choice_E[e]
        if held == count and not value > best_K[count - 1]:
            continue
        at = min(held, count - 1)
        while at > 0 and value > best_K[at - 1]:
            best_K[at] = best_K[at - 1]
            ids_K[at] = ids_K[at - 1]
            at -= 1
        best_K[at] = value
        ids_K[at] = e
        held = min(held + 1, count)


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def choose_experts(logits_TE, bias_E, sigmoid, groups, kept, normalised, least_sum, scale, ids_TK, weights_TK):  # type: ignore[no-untyped-def]  # numba infers
    """The K experts of each row and their weights, from the router's logits (which are rewritten).

    Chosen by score + ``bias`` (empty: none) within the best groups, weighed by score alone; see ``GateForm``.
    """
    experts, count = logits_TE.shape[1], ids_TK.shape[1]
    choice_E = np.empty(experts, dtype=np.float32)
    best_K = np.empty(count, dtype=np.float32)
    for t in range(logits_TE.shape[0]):
        score_E = logits_TE[t]
        if sigmoid:
            for e in range(experts):
                score_E[e] = sigmoid32(score_E[e])
        else:
            highest, total = _LOWEST, _ZERO
            for e in range(experts):
                highest = score_E[e] if score_E[e] > highest else highest
            for e in range(experts):
                score_E[e] = exp32(score_E[e] - highest)
                total += score_E[e]
            for e in range(experts):
                score_E[e] /= total
        for e in range(experts):
            choice_E[e] = score_E[e]
        if bias_E.shape[0] > 0:
            for e in range(experts):
                choice_E[e] += bias_E[e]
        if groups > 1:
            _best_groups(choice_E, groups, kept)
        _best(choice_E, ids_TK[t], best_K)
        total, share = _ZERO, scale
        if normalised:
            for k in range(count):
                total += score_E[ids_TK[t, k]]
            share = scale / (least_sum if total < least_sum else total)
        for k in range(count):
            weights_TK[t, k] = score_E[ids_TK[t, k]] * share


def compile_fused_kernels() -> None:
    """Compiles (or reads from numba's cache) every kernel of the fused attention path, for exactly the types they are called with.

    Called before forking, so that role processes share the code and compile nothing; idempotent.
    """
    compile_paged()
    compile_product()
    if choose_experts.signatures:
        return
    rows, vector, ids = types.float32[:, ::1], types.float32[::1], types.int32[:, ::1]
    f32, i64, flag = types.float32, types.int64, types.boolean
    for kernel, signature in (
        (norm_rows, (rows, vector, vector, f32, rows)),
        (add_and_norm, (rows, rows, vector, vector, vector, f32, rows)),
        (add_two_and_norm, (rows, rows, rows, rows, vector, vector, vector, f32, rows)),
        (silu_up, (rows, vector, rows)),
        (choose_experts, (rows, vector, flag, i64, i64, flag, f32, f32, ids, rows)),
    ):
        kernel.compile(signature)
        kernel.disable_compile()
