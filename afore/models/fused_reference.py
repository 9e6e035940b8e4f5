"""The fused path's kernels in plain float64 numpy, one row at a time: what the compiled ones must agree with.

Arguments and letters are those of the kernels (``fused_paged``, ``fused_kernels``), without the arrays they write to.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


def norm(x_TD: npt.NDArray[np.floating], weight_D: F32, bias_D: F32, eps: float) -> F64:
    """RMS norm; with a bias (not empty) layer norm."""
    x_TD = x_TD.astype(np.float64)
    if bias_D.size:
        x_TD = x_TD - x_TD.mean(1, keepdims=True)
    normed_TD: F64 = x_TD / np.sqrt(np.mean(x_TD**2, 1, keepdims=True) + eps) * weight_D
    return normed_TD + bias_D if bias_D.size else normed_TD


def sigmoid(x: npt.NDArray[np.floating]) -> F64:
    """1 / (1 + e to the -x)."""
    result: F64 = 1 / (1 + np.exp(-x.astype(np.float64)))
    return result


def silu_up(gate_up_TF: F32, bias_F: F32) -> F64:
    """silu(gate) * up of [gate | up] (+ their bias)."""
    gate_TI, up_TI = np.split(gate_up_TF + (bias_F.astype(np.float64) if bias_F.size else 0.0), 2, axis=1)
    out_TI: F64 = gate_TI * sigmoid(gate_TI) * up_TI
    return out_TI


def choose_experts(
    logits_TE: F32,
    bias_E: F32,
    sigmoid_scores: bool,
    groups: int,
    kept: int,
    normalised: bool,
    least_sum: float,
    scale: float,
    per_token: int,
) -> tuple[I32, F64]:
    """Ids [T, K], best first, and weights [T, K]."""
    ids, weights = [], []
    for logits_E in logits_TE.astype(np.float64):
        exp_E = np.exp(logits_E - logits_E.max())
        score_E = sigmoid(logits_E) if sigmoid_scores else exp_E / exp_E.sum()
        choice_E = score_E + (bias_E if bias_E.size else 0.0)
        if groups > 1:
            by_group = choice_E.reshape(groups, -1)
            group_score_G = np.sort(by_group, 1)[:, -2:].sum(1)
            lost = np.argsort(-group_score_G, kind="stable")[kept:]
            by_group[lost] = -np.inf
        ids_K = np.argsort(-choice_E, kind="stable")[:per_token]
        weights_K = score_E[ids_K]
        if normalised:
            weights_K = weights_K / max(weights_K.sum(), least_sum)
        ids.append(ids_K)
        weights.append(weights_K * scale)
    return np.array(ids, dtype=np.int32), np.array(weights)


def paged_attention(
    qkv_TX: F32,
    bias_X: F32,
    q_norm: F32,
    k_norm: F32,
    eps: float,
    clip: float,
    scale: float,
    cos_TR: F32,
    sin_TR: F32,
    interleaved: bool,
    keys_SY: F32,
    values_SY: F32,
    tables_TB: I32,
    positions_T: I64,
    block_tokens: int,
    head_size: int,
    window: int,
) -> F64:
    """Row by row and head by head. Writes the cache, as the kernel does; leaves ``qkv`` alone."""
    keys_size, queries_size = keys_SY.shape[1], qkv_TX.shape[1] - 2 * keys_SY.shape[1]
    out_TZ = np.zeros((len(qkv_TX), queries_size))
    for t, position in enumerate(positions_T.tolist()):
        row_X = qkv_TX[t].astype(np.float64) + (bias_X if bias_X.size else 0.0)
        q, k, v = np.split(row_X, [queries_size, queries_size + keys_size])
        if q_norm.size:
            q, k = (
                (part.reshape(-1, w.size) / np.sqrt(np.mean(part.reshape(-1, w.size) ** 2, 1, keepdims=True) + eps) * w)
                for part, w in ((q, q_norm), (k, k_norm))
            )
        if clip > 0:
            q, k, v = np.clip(q, -clip, clip), np.clip(k, -clip, clip), np.clip(v, -clip, clip)
        q, k = (_rotated(part.reshape(-1, head_size), cos_TR[t], sin_TR[t], interleaved) for part in (q, k))
        slots = [int(tables_TB[t, p // block_tokens]) * block_tokens + p % block_tokens for p in range(position + 1)]
        keys_SY[slots[-1]], values_SY[slots[-1]] = k.reshape(-1), v
        seen = slots[max(0, position + 1 - window) :]
        keys_PGd = keys_SY[seen].reshape(len(seen), -1, head_size).astype(np.float64)
        values_PGd = values_SY[seen].reshape(len(seen), -1, head_size).astype(np.float64)
        shared_by = len(q) // keys_PGd.shape[1]
        for head, query_d in enumerate(q):
            scores_P = keys_PGd[:, head // shared_by] @ query_d * scale
            weights_P = np.exp(scores_P - scores_P.max())
            row_d = weights_P / weights_P.sum() @ values_PGd[:, head // shared_by]
            out_TZ[t, head * head_size : (head + 1) * head_size] = row_d
    return out_TZ


def _rotated(heads_Hd: F64, cos_R: F32, sin_R: F32, interleaved: bool) -> F64:
    width = len(cos_R)
    turned, rest = heads_Hd[:, :width], heads_Hd[:, width:]
    if interleaved:
        cos_R, sin_R = np.repeat(cos_R[: width // 2], 2), np.repeat(sin_R[: width // 2], 2)
        other = np.stack((-turned[:, 1::2], turned[:, 0::2]), axis=2).reshape(turned.shape)
    else:
        other = np.concatenate((-turned[:, width // 2 :], turned[:, : width // 2]), axis=1)
    return np.concatenate((turned * cos_R + other * sin_R, rest), axis=1)
