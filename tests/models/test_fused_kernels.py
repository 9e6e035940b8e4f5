"""Every compiled piece of the fused path against the same in plain float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from afore.models import fused_reference as plain
from afore.models.fused_kernels import (
    add_and_norm,
    add_two_and_norm,
    choose_experts,
    compile_fused_kernels,
    norm_rows,
    silu_up,
)
from afore.models.fused_math import exp32, sigmoid32
from afore.models.fused_paged import CHUNK, NO_WINDOW, paged_attention
from afore.models.fused_product import few_rows

F32 = npt.NDArray[np.float32]
NONE = np.zeros(0, dtype=np.float32)
PLAIN: Any = plain
seeds = st.integers(0, 2**32 - 1)


def assert_close(ours: F32, expected: npt.NDArray[np.floating]) -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_fused_kernels()


@njit(fastmath=True)
def both_of(x, exponential, sigmoid):  # type: ignore[no-untyped-def]  # numba infers
    for i in range(x.shape[0]):
        exponential[i] = exp32(x[i])
        sigmoid[i] = sigmoid32(x[i])


def functions_of(x: F32) -> tuple[F32, F32]:
    exponential, sigmoid = np.empty_like(x), np.empty_like(x)
    both_of(x, exponential, sigmoid)
    return exponential, sigmoid


@pytest.mark.slow
def test_exp_and_sigmoid_keep_their_precision_in_callers_that_allow_everything() -> None:
    x = np.linspace(-87, 88, 200_001, dtype=np.float32)
    exponential, sigmoid = functions_of(x)
    np.testing.assert_allclose(exponential, np.exp(x.astype(np.float64)), rtol=2e-7)
    np.testing.assert_allclose(sigmoid, plain.sigmoid(x), rtol=4e-7)


@pytest.mark.slow
def test_what_lies_beyond_stays_finite() -> None:
    exponential, sigmoid = functions_of(np.array([-1e30, 1e30, -100, 100], dtype=np.float32))
    assert np.all(np.isfinite(exponential))
    np.testing.assert_allclose(exponential[[0, 2]], 0, atol=1e-37)
    np.testing.assert_allclose(sigmoid, [0, 1, 0, 1], atol=1e-37)


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.slow
@given(seeds, st.integers(1, 9), st.integers(1, 70), st.booleans(), st.booleans(), st.booleans())
def test_norms_with_what_is_added_before(
    seed: int, rows: int, width: int, centred: bool, biased: bool, gated: bool
) -> None:
    rng = np.random.default_rng(seed)
    x, added, shared, hidden = (normal(rng, rows, width) for _ in range(4))
    weight, bias = normal(rng, width), normal(rng, width) if centred else NONE
    added_bias, gate = normal(rng, width) if biased else NONE, normal(rng, width) if gated else NONE
    out, eps = np.empty_like(x), 1e-3

    norm_rows(x, weight, bias, eps, out)
    assert_close(out, plain.norm(x, weight, bias, eps))

    summed = x.copy()
    add_and_norm(summed, added, added_bias, weight, bias, eps, out)
    assert_close(summed, x + added + (added_bias if biased else 0))
    assert_close(out, plain.norm(summed, weight, bias, eps))

    summed = x.copy()
    add_two_and_norm(summed, added, shared, hidden, gate, weight, bias, eps, out)
    share = plain.sigmoid(hidden.astype(np.float64) @ gate)[:, None] if gated else 1.0
    assert_close(summed, x + added + share * shared)
    assert_close(out, plain.norm(summed, weight, bias, eps))


@pytest.mark.slow
@given(seeds, st.integers(1, 13), st.integers(1, 70), st.integers(1, 40))
def test_products_of_few_rows(seed: int, rows: int, depth: int, wide: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight, out = normal(rng, rows, depth), normal(rng, wide, depth), np.empty((rows, wide), dtype=np.float32)
    few_rows(x, weight, out)
    np.testing.assert_allclose(out, x.astype(np.float64) @ weight.T.astype(np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@given(seeds, st.integers(1, 9), st.integers(1, 70), st.booleans())
def test_silu_up(seed: int, rows: int, width: int, biased: bool) -> None:
    rng = np.random.default_rng(seed)
    gate_up, bias = normal(rng, rows, 2 * width) * 4, normal(rng, 2 * width) if biased else NONE
    expected, out = plain.silu_up(gate_up, bias), np.empty((rows, width), dtype=np.float32)
    silu_up(gate_up.copy(), bias, out)
    assert_close(out, expected)


@pytest.mark.slow
@given(seeds, st.integers(1, 9), st.integers(1, 8), st.data(), st.booleans(), st.booleans(), st.booleans())
def test_the_gate_chooses_and_weighs(
    seed: int, rows: int, groups: int, data: st.DataObject, sigmoid: bool, normalised: bool, biased: bool
) -> None:
    experts = groups * data.draw(st.integers(2 if groups > 1 else 1, 20), label="experts of a group")
    kept = data.draw(st.integers(1, groups), label="kept")
    per_token = data.draw(st.integers(1, min(8, kept * experts // groups)), label="K")
    rng = np.random.default_rng(seed)
    logits, bias = normal(rng, rows, experts), normal(rng, experts) * np.float32(0.1) if biased else NONE
    form: Any = (sigmoid, groups, kept, normalised, 1e-20, 1.5)
    expected_ids, expected_weights = PLAIN.choose_experts(logits, bias, *form, per_token)
    ids, weights = np.zeros((rows, per_token), dtype=np.int32), np.zeros((rows, per_token), dtype=np.float32)
    choose_experts(logits.copy(), bias, *form, ids, weights)
    # Random scores that lie closer together than float32 tells apart are rare enough not to be drawn.
    np.testing.assert_array_equal(ids, expected_ids)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("value", [0.0, np.nan, -np.inf])
def test_rows_without_an_order_still_choose_distinct_experts(value: float) -> None:
    ids, weights = np.full((2, 5), -1, dtype=np.int32), np.zeros((2, 5), dtype=np.float32)
    logits = np.full((2, 12), value, dtype=np.float32)
    choose_experts(logits, NONE, True, 3, 2, True, 1e-20, 1.0, ids, weights)
    for ids_K in ids:
        assert len(set(ids_K.tolist())) == 5
        assert 0 <= ids_K.min() <= ids_K.max() < 12


@pytest.mark.slow
@given(
    seed=seeds,
    positions=st.lists(st.integers(0, 2 * CHUNK + 5), min_size=1, max_size=5),
    shape=st.sampled_from([(4, 2, 8, 8), (4, 2, 8, 4), (3, 1, 12, 6), (2, 2, 5, 2), (8, 4, 16, 16), (6, 2, 32, 16)]),
    block_tokens=st.integers(1, 19),
    window=st.one_of(st.just(NO_WINDOW), st.integers(1, CHUNK + 20)),
    norms=st.sampled_from(["none", "head", "whole"]),
    biased=st.booleans(),
    clip=st.sampled_from([0.0, 1.0]),
    interleaved=st.booleans(),
)
def test_paged_attention(
    seed: int,
    positions: list[int],
    shape: tuple[int, int, int, int],
    block_tokens: int,
    window: int,
    norms: str,
    biased: bool,
    clip: float,
    interleaved: bool,
) -> None:
    heads, kv_heads, size, rotary = shape
    rng, rows = np.random.default_rng(seed), len(positions)
    width = (heads + 2 * kv_heads) * size
    blocks = max(positions) // block_tokens + 1
    # Blocks lie scattered; whatever a row does not own holds NaN, and would show.
    tables = rng.permutation(rows * blocks + 3)[: rows * blocks].reshape(rows, blocks).astype(np.int32)
    keys = np.full(((rows * blocks + 3) * block_tokens, kv_heads * size), np.nan, dtype=np.float32)
    values = keys.copy()
    for row, position in enumerate(positions):
        for p in range(position):
            slot = tables[row, p // block_tokens] * block_tokens + p % block_tokens
            keys[slot], values[slot] = normal(rng, kv_heads * size), normal(rng, kv_heads * size)
    qkv, angles = normal(rng, rows, width), normal(rng, rows, rotary)
    q_norm = k_norm = NONE
    if norms == "head":
        q_norm, k_norm = normal(rng, size), normal(rng, size)
    elif norms == "whole":
        q_norm, k_norm = normal(rng, heads * size), normal(rng, kv_heads * size)
    before: Any = (qkv, normal(rng, width) if biased else NONE, q_norm, k_norm, 1e-3, clip, size**-0.5)
    turns: Any = (np.cos(angles), np.sin(angles), interleaved)
    after: Any = (tables, np.array(positions, dtype=np.int64), block_tokens, size, window)
    expected_keys, expected_values = keys.copy(), values.copy()
    expected = PLAIN.paged_attention(*before, *turns, expected_keys, expected_values, *after)

    out = np.full((rows, heads * size), np.nan, dtype=np.float32)
    paged_attention(*before, *turns, keys, values, *after, out)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(keys, expected_keys, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(values, expected_values, rtol=2e-5, atol=2e-5)


def test_scores_far_apart_over_several_chunks() -> None:
    """The running maximum rises from chunk to chunk, and nothing overflows on the way."""
    length, size = 3 * CHUNK, 4
    keys = np.zeros((length, size), dtype=np.float32)
    keys[:, 0] = np.linspace(0, 500, length)
    values = np.arange(length * size, dtype=np.float32).reshape(length, size)
    qkv = np.concatenate([np.full(size, 2.0), keys[-1], values[-1]]).astype(np.float32)[None]
    turns: Any = (np.ones((1, 4), dtype=np.float32), np.zeros((1, 4), dtype=np.float32), False)
    after: Any = (np.zeros((1, 1), dtype=np.int32), np.array([length - 1]), length, size, NO_WINDOW)
    arguments: Any = (qkv, NONE, NONE, NONE, 0.0, 0.0, 1.0, *turns, keys, values, *after)
    expected = PLAIN.paged_attention(*arguments)
    out = np.empty((1, size), dtype=np.float32)
    paged_attention(*arguments, out)
    np.testing.assert_allclose(out, expected, rtol=1e-4)
