"""Decode attention over a paged cache in one compiled call: bias, norm, clip, rotary, cache write, and grouped-query attention.

A row is one request's one new token. Its queries, keys and values come as one row of a matrix product, [H·d | G·d | G·d]; its
keys and values go to its slot, block · block_tokens + position % block_tokens, and its queries meet those of the positions before
it, block by block, in chunks with a running softmax. Nothing is gathered, and nothing past a row's own position is ever read.
The plain version is ``fused_reference.paged_attention``.

Letters: T rows, X = (H + 2G)·d, H query heads, G key heads, d head size, R rotary width, S slots, B blocks of a row.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from afore.models.fused_math import exp32

CHUNK = 128
"""Positions whose scores are looked at together: enough for the softmax to pay, few enough to stay in the first cache."""
NO_WINDOW = np.iinfo(np.int64).max
_ZERO, _ONE = np.float32(0), np.float32(1)
_LOWEST = np.float32(-np.inf)
_RELAXED = {"reassoc", "contract", "nsz", "arcp", "afn"}  # not nnan, ninf: a NaN stays visible in the output


@njit(fastmath=_RELAXED, error_model="numpy")
def _norm_in_place(row_X, first, size, weight, eps):  # type: ignore[no-untyped-def]  # numba infers
    """RMS norm of row[first : first + size]; ``weight`` has ``size`` elements."""
    total = _ZERO
    for i in range(size):
        total += row_X[first + i] * row_X[first + i]
    factor = _ONE / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        row_X[first + i] = weight[i] * (row_X[first + i] * factor)


@njit(fastmath=_RELAXED, error_model="numpy")
def _rotate(row_X, first, cos_R, sin_R, interleaved):  # type: ignore[no-untyped-def]  # numba infers
    """Rotates one head's first R elements; pairs are neighbours, or lie R/2 apart."""
    half = cos_R.shape[0] // 2
    if interleaved:
        for i in range(half):
            a, b = row_X[first + 2 * i], row_X[first + 2 * i + 1]
            row_X[first + 2 * i] = a * cos_R[i] - b * sin_R[i]
            row_X[first + 2 * i + 1] = b * cos_R[i] + a * sin_R[i]
    else:
        for i in range(half):
            a, b = row_X[first + i], row_X[first + half + i]
            row_X[first + i] = a * cos_R[i] - b * sin_R[i]
            row_X[first + half + i] = b * cos_R[half + i] + a * sin_R[half + i]


# Unsigned indices: the sign of any other would be looked at in the innermost loop, which then stays scalar.


@njit(fastmath=_RELAXED, error_model="numpy")
def _scores(query_d, keys_SY, slot, first, count, scores_P, done):  # type: ignore[no-untyped-def]  # numba infers
    """scores[done + p] = query · keys[slot + p, first:], p < count: four positions at a time. All numbers are unsigned."""
    size = np.uint64(query_d.shape[0])
    by_4 = count & ~np.uint64(3)
    for p in range(np.uint64(0), by_4, np.uint64(4)):
        s0 = slot + p
        s1, s2, s3 = s0 + np.uint64(1), s0 + np.uint64(2), s0 + np.uint64(3)
        a0 = a1 = a2 = a3 = _ZERO
        for d in range(size):
            q = query_d[d]
            a0 += q * keys_SY[s0, first + d]
            a1 += q * keys_SY[s1, first + d]
            a2 += q * keys_SY[s2, first + d]
            a3 += q * keys_SY[s3, first + d]
        at = done + p
        scores_P[at] = a0
        scores_P[at + np.uint64(1)] = a1
        scores_P[at + np.uint64(2)] = a2
        scores_P[at + np.uint64(3)] = a3
    for p in range(by_4, count):
        a0 = _ZERO
        for d in range(size):
            a0 += query_d[d] * keys_SY[slot + p, first + d]
        scores_P[done + p] = a0


@njit(fastmath=_RELAXED, error_model="numpy")
def _add_values(weights_P, done, values_SY, slot, first, count, out_d):  # type: ignore[no-untyped-def]  # numba infers
    """out += weights[done + p] * values[slot + p, first:], p < count: four positions at a time. All numbers are unsigned."""
    size = np.uint64(out_d.shape[0])
    by_4 = count & ~np.uint64(3)
    for p in range(np.uint64(0), by_4, np.uint64(4)):
        s0, at = slot + p, done + p
        s1, s2, s3 = s0 + np.uint64(1), s0 + np.uint64(2), s0 + np.uint64(3)
        w0, w1 = weights_P[at], weights_P[at + np.uint64(1)]
        w2, w3 = weights_P[at + np.uint64(2)], weights_P[at + np.uint64(3)]
        for d in range(size):
            z = first + d
            out_d[d] += w0 * values_SY[s0, z] + w1 * values_SY[s1, z] + w2 * values_SY[s2, z] + w3 * values_SY[s3, z]
    for p in range(by_4, count):
        w0 = weights_P[done + p]
        for d in range(size):
            out_d[d] += w0 * values_SY[slot + p, first + d]


@njit(fastmath=_RELAXED, error_model="numpy")
def _soften(scores_P, count, best):  # type: ignore[no-untyped-def]  # numba infers
    """Scores become e to the score minus the running maximum; returns that maximum and their sum."""
    for p in range(count):
        best = scores_P[p] if scores_P[p] > best else best
    total = _ZERO
    for p in range(count):
        scores_P[p] = exp32(scores_P[p] - best)
        total += scores_P[p]
    return best, total


@njit(fastmath=_RELAXED, error_model="numpy")
def _attend_group(  # type: ignore[no-untyped-def]  # numba infers
    queries_Z,
    keys_SY,
    values_SY,
    group,
    table_B,
    block_tokens,
    begin,
    end,
    scores_P,
    best_J,
    total_J,
    out_Z,
):
    """The J query heads of one key head over positions [begin, end) of one row: chunk by chunk, a chunk's keys once for all J."""
    sharing = best_J.shape[0]
    size = queries_Z.shape[0] // sharing
    first = group * size
    for z in range(out_Z.shape[0]):
        out_Z[z] = _ZERO
    for start in range(begin, end, CHUNK):
        stop = min(start + CHUNK, end)
        for j in range(sharing):
            query_d = queries_Z[j * size : (j + 1) * size]
            out_d = out_Z[j * size : (j + 1) * size]
            position = start
            while position < stop:
                inside = position % block_tokens
                count = min(block_tokens - inside, stop - position)
                slot = np.int64(table_B[position // block_tokens]) * block_tokens + inside
                _scores(
                    query_d,
                    keys_SY,
                    np.uint64(slot),
                    np.uint64(first),
                    np.uint64(count),
                    scores_P,
                    np.uint64(position - start),
                )
                position += count
            before = _LOWEST if start == begin else best_J[j]
            best, added = _soften(scores_P, stop - start, before)
            if start == begin:
                total_J[j] = added
            else:
                shrink = exp32(before - best)
                total_J[j] = total_J[j] * shrink + added
                for d in range(size):
                    out_d[d] *= shrink
            best_J[j] = best
            position = start
            while position < stop:
                inside = position % block_tokens
                count = min(block_tokens - inside, stop - position)
                slot = np.int64(table_B[position // block_tokens]) * block_tokens + inside
                _add_values(
                    scores_P,
                    np.uint64(position - start),
                    values_SY,
                    np.uint64(slot),
                    np.uint64(first),
                    np.uint64(count),
                    out_d,
                )
                position += count
    for j in range(sharing):
        share = _ONE / total_J[j]
        for d in range(size):
            out_Z[j * size + d] *= share


@njit(nogil=True, cache=True, fastmath=_RELAXED, error_model="numpy")
def paged_attention(  # type: ignore[no-untyped-def]  # numba infers
    qkv_TX,
    bias_X,
    q_norm,
    k_norm,
    eps,
    clip,
    scale,
    cos_TR,
    sin_TR,
    interleaved,
    keys_SY,
    values_SY,
    tables_TB,
    positions_T,
    block_tokens,
    head_size,
    window,
    out_TZ,
):
    """One layer's attention of T rows, between the matrices: ``qkv`` [T, X] → ``out`` [T, H·d]; rewrites ``qkv``.

    ``bias`` [X] or empty. ``q_norm``, ``k_norm``: empty, one head long, or all heads long; norms come before ``clip`` (0: none),
    which comes before the rotation by ``cos`` and ``sin`` [T, R], R ≤ d. ``keys`` and ``values`` [S, G·d] take the new rows. A row
    sees its last ``window`` positions, its own among them.
    """
    rows = qkv_TX.shape[0]
    keys_size = keys_SY.shape[1]
    queries_size = out_TZ.shape[1]
    heads, kv_heads = queries_size // head_size, keys_size // head_size
    sharing = heads // kv_heads
    values_at = queries_size + keys_size
    scores_P = np.empty(CHUNK, dtype=np.float32)
    best_J = np.empty(sharing, dtype=np.float32)
    total_J = np.empty(sharing, dtype=np.float32)
    for t in range(rows):
        row_X = qkv_TX[t]
        if bias_X.shape[0] > 0:
            for x in range(row_X.shape[0]):
                row_X[x] += bias_X[x]
        if q_norm.shape[0] > 0:
            for first in range(0, queries_size, q_norm.shape[0]):
                _norm_in_place(row_X, first, q_norm.shape[0], q_norm, eps)
            for first in range(queries_size, values_at, k_norm.shape[0]):
                _norm_in_place(row_X, first, k_norm.shape[0], k_norm, eps)
        if clip > _ZERO:
            for x in range(row_X.shape[0]):
                limited = -clip if row_X[x] < -clip else row_X[x]
                row_X[x] = clip if limited > clip else limited
        for head in range(heads + kv_heads):
            _rotate(row_X, head * head_size, cos_TR[t], sin_TR[t], interleaved)
        for x in range(queries_size):
            row_X[x] *= scale
        position = positions_T[t]
        slot = np.int64(tables_TB[t, position // block_tokens]) * block_tokens + position % block_tokens
        for y in range(keys_size):
            keys_SY[slot, y] = row_X[queries_size + y]
            values_SY[slot, y] = row_X[values_at + y]
        begin = max(np.int64(0), position + 1 - window) if window <= position else np.int64(0)
        for group in range(kv_heads):
            first, last = group * sharing * head_size, (group + 1) * sharing * head_size
            _attend_group(
                row_X[first:last],
                keys_SY,
                values_SY,
                group,
                tables_TB[t],
                block_tokens,
                begin,
                position + 1,
                scores_P,
                best_J,
                total_J,
                out_TZ[t][first:last],
            )


@njit(nogil=True, cache=True)
def slots_exist(tables_TB, positions_T, block_tokens, num_blocks):  # type: ignore[no-untyped-def]  # numba infers
    """Whether every row's blocks up to its position are in its table and in the cache: ``paged_attention`` checks no index."""
    for t in range(positions_T.shape[0]):
        position = positions_T[t]
        if position < 0 or position // block_tokens >= tables_TB.shape[1]:
            return False
        for b in range(position // block_tokens + 1):
            if tables_TB[t, b] < 0 or tables_TB[t, b] >= num_blocks:
                return False
    return True


def compile_paged() -> None:
    """Compiles (or reads from numba's cache) the kernel for exactly the types it is called with; idempotent."""
    if paged_attention.signatures:
        return
    rows, vector, f32, i64 = types.float32[:, ::1], types.float32[::1], types.float32, types.int64
    matrices = rows, vector, vector, vector, f32, f32, f32, rows, rows, types.boolean
    cache = rows, rows, types.int32[:, ::1], types.int64[::1], i64, i64, i64
    paged_attention.compile((*matrices, *cache, rows))
    paged_attention.disable_compile()
    slots_exist.compile((types.int32[:, ::1], types.int64[::1], i64, i64))
    slots_exist.disable_compile()
