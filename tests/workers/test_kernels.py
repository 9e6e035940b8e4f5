"""The CPU's grouped expert MLP against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from afore.models.expert_form import Activation, ExpertForm
from afore.workers.device.base import F32, Pairs
from afore.workers.kernels import CpuKernels, compile_kernels, grouped_mlp_reference

Arguments = tuple[F32, F32, Pairs, F32, F32, F32]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels()


def _grouped(tokens: int, choices: int, num_rows: int, generator: np.random.Generator) -> Pairs:
    """Every token chooses ``choices`` of the rows."""
    rows = [generator.permutation(num_rows)[:choices] for _ in range(tokens)]
    row_P = np.array(rows, dtype=np.int32).reshape(-1)
    order = np.argsort(row_P, kind="stable")
    pairs = Pairs.empty(row_P.size, num_rows)
    pairs.token_P[:] = order // choices
    pairs.k_P[:] = order % choices
    pairs.start_S1[1:] = np.cumsum(np.bincount(row_P, minlength=num_rows))
    pairs.count = row_P.size
    return pairs


def _arguments(tokens: int, num_rows: int, hidden: int, expert: int, choices: int = 2) -> Arguments:
    generator = np.random.default_rng(tokens * 7919 + num_rows * 104729 + hidden * 31 + expert)

    def normal(*shape: int) -> F32:
        return generator.standard_normal(shape).astype(np.float32)

    return (
        normal(tokens, hidden),
        generator.random((tokens, choices)).astype(np.float32),
        _grouped(tokens, choices, num_rows, generator),
        normal(num_rows, 2 * expert, hidden) / np.float32(hidden**0.5),
        normal(num_rows, hidden, expert) / np.float32(expert**0.5),
        np.full((tokens, hidden), np.nan, dtype=np.float32),
    )


# One token alone and many of one expert, more than a block; sizes with and without a remainder at every width of a loop.
@pytest.mark.parametrize(
    ("tokens", "num_rows", "hidden", "expert"),
    [
        *product((0, 1, 5), (2, 7), (4, 13), (1, 6)),
        (16, 8, 128, 32),
        (3, 4, 37, 11),
        (71, 2, 20, 10),
        (40, 3, 260, 65),
    ],
)
def test_agrees_with_float64(kernels: CpuKernels, tokens: int, num_rows: int, hidden: int, expert: int) -> None:
    arguments = _arguments(tokens, num_rows, hidden, expert)
    kernels.grouped_mlp(*arguments)
    expected_TD = grouped_mlp_reference(*arguments[:5])
    scale = float(np.abs(expected_TD).max(initial=1e-30))
    np.testing.assert_allclose(arguments[5], expected_TD, rtol=1e-5, atol=1e-6 * scale)


FORMS = [
    ExpertForm(activation=Activation.CLAMPED, biases=True, limit=0.75),
    ExpertForm(activation=Activation.CLAMPED, alpha=1.1, limit=0.5),
    ExpertForm(biases=True),
]


# The clamps are low, so that both sides of both are reached.
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "num_rows", "hidden", "expert"), [(0, 2, 4, 1), (5, 7, 13, 6), (71, 2, 20, 10), (16, 8, 128, 32)]
)
def test_other_forms_agree_with_float64(
    kernels: CpuKernels, form: ExpertForm, tokens: int, num_rows: int, hidden: int, expert: int
) -> None:
    arguments = _arguments(tokens, num_rows, hidden, expert)
    biases = _biases(num_rows, hidden, expert) if form.biases else None
    kernels.grouped_mlp(*arguments, form, biases)
    expected_TD = grouped_mlp_reference(*arguments[:5], form, biases)
    scale = float(np.abs(expected_TD).max(initial=1e-30))
    np.testing.assert_allclose(arguments[5], expected_TD, rtol=1e-5, atol=1e-6 * scale)


def _biases(num_rows: int, hidden: int, expert: int) -> tuple[F32, F32]:
    generator = np.random.default_rng(num_rows)
    gate_up_SF = generator.standard_normal((num_rows, 2 * expert)).astype(np.float32)
    return gate_up_SF, generator.standard_normal((num_rows, hidden)).astype(np.float32)


def test_biases_that_do_not_belong_are_refused(kernels: CpuKernels) -> None:
    arguments, form = _arguments(4, 3, 8, 4), ExpertForm(biases=True)
    with pytest.raises(ValueError, match="none were given"):
        kernels.grouped_mlp(*arguments, form)
    gate_up_SF, down_SD = _biases(3, 8, 4)
    for biases in ((gate_up_SF[:2], down_SD), (gate_up_SF, down_SD[:, :7])):
        with pytest.raises(ValueError, match="are not of the experts"):
            kernels.grouped_mlp(*arguments, form, biases)


def test_what_is_not_a_number_stays_visible_under_clamps(kernels: CpuKernels) -> None:
    arguments = _arguments(4, 3, 8, 4)
    arguments[0][2, 5] = np.nan
    kernels.grouped_mlp(*arguments, FORMS[0], _biases(3, 8, 4))
    assert np.isnan(arguments[5][2]).all()
    assert np.isfinite(arguments[5][[0, 1, 3]]).all()


def test_is_the_same_on_every_call(kernels: CpuKernels) -> None:
    arguments = _arguments(33, 5, 128, 32)
    kernels.grouped_mlp(*arguments)
    first_TD = arguments[5].copy()
    kernels.grouped_mlp(*arguments)
    assert first_TD.tobytes() == arguments[5].tobytes()


def test_rows_without_pairs_are_zero(kernels: CpuKernels) -> None:
    hidden_TD, weights_TK, _, gate_up_SFD, down_SDI, out_TD = _arguments(4, 3, 8, 4)
    pairs = Pairs.empty(1, 3)
    pairs.token_P[0], pairs.k_P[0], pairs.count = 2, 1, 1
    pairs.start_S1[:] = 0, 0, 1, 1
    kernels.grouped_mlp(hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD)
    assert np.flatnonzero(out_TD.any(axis=1)).tolist() == [2]


def test_large_activations_saturate_and_nan_stays_visible(kernels: CpuKernels) -> None:
    hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD = _arguments(6, 2, 8, 4)
    hidden_TD[:3] *= 3e3
    hidden_TD[5, 0] = np.nan
    kernels.grouped_mlp(hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD)
    with np.errstate(over="ignore"):
        expected_TD = grouped_mlp_reference(hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI)
    np.testing.assert_allclose(out_TD[:5], expected_TD[:5], rtol=1e-5, atol=1e-6 * np.abs(expected_TD[:5]).max())
    assert np.isnan(out_TD[5]).all()


def test_hidden_rows_may_be_mapped_read_only(kernels: CpuKernels) -> None:
    arguments = _arguments(4, 3, 8, 4)
    kernels.grouped_mlp(*arguments)
    expected_TD = arguments[5].copy()
    arguments[0].flags.writeable = arguments[1].flags.writeable = False
    kernels.grouped_mlp(*arguments)
    assert expected_TD.tobytes() == arguments[5].tobytes()


def test_shapes_that_do_not_belong_together_are_refused(kernels: CpuKernels) -> None:
    hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD = _arguments(4, 3, 8, 4)
    wrong: list[tuple[Any, str]] = [
        ((hidden_TD, weights_TK, pairs, gate_up_SFD[:2], down_SDI, out_TD), "weights of the same experts"),
        ((hidden_TD[:, :6], weights_TK, pairs, gate_up_SFD, down_SDI, out_TD), "width 8"),
        ((hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD[:3]), "width 8"),
        ((hidden_TD, weights_TK[:3], pairs, gate_up_SFD, down_SDI, out_TD), "routing weights for 4 tokens"),
        ((hidden_TD, weights_TK, Pairs.empty(8, 4), gate_up_SFD, down_SDI, out_TD), "over 4 rows, the store has 3"),
    ]
    for arguments, why in wrong:
        with pytest.raises(ValueError, match=why):
            kernels.grouped_mlp(*arguments)


def test_no_other_layout_is_compiled_behind_our_back(kernels: CpuKernels) -> None:
    compile_kernels()
    hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD = _arguments(4, 3, 8, 4)
    with pytest.raises(TypeError, match="No matching definition"):
        kernels.grouped_mlp(np.asfortranarray(hidden_TD), weights_TK, pairs, gate_up_SFD, down_SDI, out_TD)
