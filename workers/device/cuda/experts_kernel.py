"""The experts over slots, tile by tile: gather → gate and up → activation → down → weighted sum, in three launches.

A tile is M_tile pairs of one store row, the very tile that the planner counts. How many there are is known on the GPU alone: the
grid has room for the most there can be, and programs behind the last tile end at once. Each pair's row is written once and a
token's rows are added in the order of its choices, so the same inputs give the same bits.

Weights are float32 (products in float32, no TF32) or bfloat16; sums are float32 always.

Letters: T tokens, K experts per token, P pairs, S store rows, D hidden size, I expert hidden size, M pairs of a tile, N and X
widths of a block of outputs and of what is summed over.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from afore.models.expert_form import Activation, ExpertForm

_SIZES = ["top_k", "num_rows"]
_CLAMPED = int(Activation.CLAMPED)


@triton.jit
def _tile(start_S1, num_rows, S: tl.constexpr, M: tl.constexpr):
    """(store row, first pair, end of the row's pairs) of this program's tile; row ``num_rows`` behind the last tile."""
    tile = tl.program_id(0)
    row_S = tl.arange(0, S)
    there_S = row_S < num_rows
    begin_S = tl.load(start_S1 + row_S, mask=there_S, other=0)
    end_S = tl.load(start_S1 + row_S + 1, mask=there_S, other=0)
    tiles_S = tl.where(there_S, (end_S - begin_S + M - 1) // M, 0)
    last_S = tl.cumsum(tiles_S, axis=0)
    row = tl.sum((there_S & (last_S <= tile)).to(tl.int32), axis=0)
    chosen_S = row_S == row
    first_tile = tl.sum(tl.where(chosen_S, last_S - tiles_S, 0), axis=0)
    first = tl.sum(tl.where(chosen_S, begin_S, 0), axis=0) + (tile - first_tile) * M
    return row, first, tl.sum(tl.where(chosen_S, end_S, 0), axis=0)


@triton.jit(do_not_specialize=_SIZES)
def gate_and_up(
    hidden_TD,
    pair_P,
    start_S1,
    gate_up_SFD,
    bias_SF,
    act_PI,
    top_k,
    num_rows,
    alpha,
    limit,
    D: tl.constexpr,
    INNER: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    X: tl.constexpr,
    PRECISION: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    """act[p] = activation of the pair's token through its expert's gate and up, in the weights' type."""
    row, first, end = _tile(start_S1, num_rows, S, M)
    if row < num_rows:
        at_M = first + tl.arange(0, M)
        there_M = at_M < end
        token_M = tl.load(pair_P + at_M, mask=there_M, other=0) // top_k
        out_N = tl.program_id(1) * N + tl.arange(0, N)
        inner_N = out_N < INNER
        weight = gate_up_SFD + row.to(tl.int64) * (2 * INNER * D)
        gate_MN = tl.zeros((M, N), tl.float32)
        up_MN = tl.zeros((M, N), tl.float32)
        for begin in range(0, D, X):
            at_X = begin + tl.arange(0, X)
            in_X = at_X < D
            x_MX = tl.load(
                hidden_TD + token_M[:, None] * D + at_X[None, :], mask=there_M[:, None] & in_X[None, :], other=0.0
            )
            x_MX = x_MX.to(gate_up_SFD.dtype.element_ty)
            at_XN = out_N[None, :] * D + at_X[:, None]
            w_XN = tl.load(weight + at_XN, mask=in_X[:, None] & inner_N[None, :], other=0.0)
            gate_MN = tl.dot(x_MX, w_XN, gate_MN, input_precision=PRECISION)
            w_XN = tl.load(weight + INNER * D + at_XN, mask=in_X[:, None] & inner_N[None, :], other=0.0)
            up_MN = tl.dot(x_MX, w_XN, up_MN, input_precision=PRECISION)
        if BIASED:
            bias = bias_SF + row.to(tl.int64) * (2 * INNER)
            gate_MN += tl.load(bias + out_N, mask=inner_N, other=0.0).to(tl.float32)[None, :]
            up_MN += tl.load(bias + INNER + out_N, mask=inner_N, other=0.0).to(tl.float32)[None, :]
        if CLAMPED:
            gate_MN = tl.minimum(gate_MN, limit)
            up_MN = tl.minimum(tl.maximum(up_MN, -limit), limit)
            act_MN = gate_MN * tl.sigmoid(alpha * gate_MN) * (up_MN + 1.0)
        else:
            act_MN = gate_MN * tl.sigmoid(gate_MN) * up_MN
        out_MN = act_PI + at_M[:, None].to(tl.int64) * INNER + out_N[None, :]
        tl.store(out_MN, act_MN.to(act_PI.dtype.element_ty), mask=there_M[:, None] & inner_N[None, :])


@triton.jit(do_not_specialize=_SIZES)
def down(
    act_PI,
    pair_P,
    start_S1,
    down_SDI,
    bias_SD,
    weight_P,
    y_PD,
    num_rows,
    top_k,
    D: tl.constexpr,
    INNER: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    X: tl.constexpr,
    PRECISION: tl.constexpr,
    BIASED: tl.constexpr,
):
    """y[p] = the pair's routing weight times its expert's down projection."""
    row, first, end = _tile(start_S1, num_rows, S, M)
    if row < num_rows:
        at_M = first + tl.arange(0, M)
        there_M = at_M < end
        scale_M = tl.load(weight_P + tl.load(pair_P + at_M, mask=there_M, other=0), mask=there_M, other=0.0)
        out_N = tl.program_id(1) * N + tl.arange(0, N)
        in_N = out_N < D
        weight = down_SDI + row.to(tl.int64) * (D * INNER)
        y_MN = tl.zeros((M, N), tl.float32)
        for begin in range(0, INNER, X):
            at_X = begin + tl.arange(0, X)
            in_X = at_X < INNER
            from_MX = act_PI + at_M[:, None].to(tl.int64) * INNER + at_X[None, :]
            a_MX = tl.load(from_MX, mask=there_M[:, None] & in_X[None, :], other=0.0)
            at_XN = out_N[None, :] * INNER + at_X[:, None]
            w_XN = tl.load(weight + at_XN, mask=in_X[:, None] & in_N[None, :], other=0.0)
            y_MN = tl.dot(a_MX, w_XN, y_MN, input_precision=PRECISION)
        if BIASED:
            bias_N = tl.load(bias_SD + row.to(tl.int64) * D + out_N, mask=in_N, other=0.0)
            y_MN += bias_N.to(tl.float32)[None, :]
        to_MN = y_PD + at_M[:, None].to(tl.int64) * D + out_N[None, :]
        tl.store(to_MN, y_MN * scale_M[:, None], mask=there_M[:, None] & in_N[None, :])


@triton.jit(do_not_specialize=["top_k"])
def sum_choices(y_PD, place_P, out_TD, top_k, D: tl.constexpr, N: tl.constexpr):
    """out[t] = the rows of the token's pairs here, added in the order of its choices; 0 without any."""
    token = tl.program_id(0)
    out_N = tl.program_id(1) * N + tl.arange(0, N)
    in_N = out_N < D
    sum_N = tl.zeros((N,), tl.float32)
    for k in range(top_k):
        pair = tl.load(place_P + token * top_k + k)
        from_N = y_PD + pair.to(tl.int64) * D + out_N
        sum_N += tl.load(from_N, mask=out_N < tl.where(pair >= 0, D, 0), other=0.0)
    tl.store(out_TD + token.to(tl.int64) * D + out_N, sum_N, mask=in_N)


def launch(
    hidden_TD: Any,
    weight_TK: Any,
    pair_P: Any,
    place_P: Any,
    start_S1: Any,
    gate_up_SFD: Any,
    down_SDI: Any,
    biases: tuple[Any, Any] | None,
    act_PI: Any,
    y_PD: Any,
    out_TD: Any,
    form: ExpertForm,
    tile_tokens: int,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Enqueues all three on torch's current stream. ``act_PI`` and ``y_PD`` are scratch with a row for every (token, choice).

    ``blocks``: the most outputs (N) and summands (X) of a block, powers of two from 16 on.
    """
    num_tokens, top_k = weight_TK.shape
    num_rows, hidden_size, expert_size = down_SDI.shape
    float32 = gate_up_SFD.element_size() == 4
    places = num_tokens * top_k
    tiles = min(places, places // tile_tokens + num_rows)
    width, depth = blocks or ((64, 32) if float32 else (128 if tile_tokens <= 64 else 64, 64))
    shape = {
        "D": hidden_size,
        "INNER": expert_size,
        "S": max(16, triton.next_power_of_2(num_rows + 1)),
        "M": tile_tokens,
        "X": min(depth, max(16, triton.next_power_of_2(min(hidden_size, expert_size)))),
        "PRECISION": "ieee" if float32 else "tf32",
        "BIASED": form.biases,
        "num_warps": 4 if tile_tokens <= 64 else 8,
    }
    gate_up_bias, down_bias = biases if biases is not None and form.biases else (act_PI, act_PI)
    wide = min(width, max(16, triton.next_power_of_2(expert_size)))
    gate_and_up[(tiles, triton.cdiv(expert_size, wide))](
        hidden_TD,
        pair_P,
        start_S1,
        gate_up_SFD,
        gate_up_bias,
        act_PI,
        top_k,
        num_rows,
        form.alpha,
        form.limit,
        N=wide,
        CLAMPED=int(form.activation) == _CLAMPED,
        **shape,
    )
    wide = min(width, max(16, triton.next_power_of_2(hidden_size)))
    down[(tiles, triton.cdiv(hidden_size, wide))](
        act_PI, pair_P, start_S1, down_SDI, down_bias, weight_TK, y_PD, num_rows, top_k, N=wide, **shape
    )
    wide = min(1024, triton.next_power_of_2(hidden_size))
    sum_choices[(num_tokens, triton.cdiv(hidden_size, wide))](y_PD, place_P, out_TD, top_k, D=hidden_size, N=wide)
