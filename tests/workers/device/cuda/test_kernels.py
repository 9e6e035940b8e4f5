"""Partition and experts of a GPU against the CPU's references: torch's way, our Triton kernels interpreted, and both on a GPU.

The interpreter multiplies bfloat16 as if its bits were whole numbers, so float16 stands for it there; the kernels are also
compiled for a Hopper GPU, which needs none.

Letters: E experts, T tokens, K choices, S rows, D hidden size, I expert size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from afore.core.demand import count_demand, demand_crc
from afore.core.errors import ConfigError, PlanError
from afore.core.slots import StoreLayout, contiguous_primaries
from afore.models.expert_form import SILU_GATED, Activation, ExpertForm
from afore.workers.device.base import F32, I32, Pairs
from afore.workers.device.cuda.demand_check import CrcTable
from afore.workers.device.cuda.kernels import (
    NARROW,
    Implementation,
    applicable,
    check_tile,
    torch_implementation,
    triton_implementation,
)
from afore.workers.device.cuda.pair_plan import fill_plan, plan_words
from afore.workers.kernels import grouped_mlp_reference
from afore.workers.partition import partition_reference
from tests.workers.device.cuda.interpreted import interpreted, run_interpreted
from tests.workers.device.cuda.presence import need, need_gpu
from tests.workers.shares import Case, cases

WAYS = (
    "torch",
    "interpreted",
    pytest.param("triton-gpu", marks=pytest.mark.gpu),
    pytest.param("torch-gpu", marks=pytest.mark.gpu),
)
EXPERTS_WAYS = (*WAYS, "interpreted-narrow", pytest.param("triton-narrow-gpu", marks=pytest.mark.gpu))
CLAMPED = ExpertForm(activation=Activation.CLAMPED, biases=True)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference from float64, as a part of the largest output: sums of a few dozen to a few hundred products."""


def way(name: str) -> tuple[Implementation, torch.device]:
    """The implementation and where its tensors lie."""
    blocks = NARROW if "narrow" in name else None
    if name.endswith("-gpu"):
        need_gpu()
        chosen = triton_implementation(blocks) if name.startswith("triton") else torch_implementation()
        return chosen, torch.device("cuda")
    return (interpreted(blocks) if name.startswith("interpreted") else torch_implementation()), torch.device("cpu")


@dataclass
class Split:
    """What a partition fills."""

    pair_P: torch.Tensor
    place_P: torch.Tensor
    summary_X: torch.Tensor
    rows: list[list[tuple[int, int]]]
    mismatched: bool
    unknown: int


def split(
    name: str, ids_TK: I32, shares_X4: I32, primary_row_E: I32, rank: int, num_rows: int, first_redundant: int, crc: int
) -> Split:
    implementation, where = way(name)
    num_experts, places = primary_row_E.shape[0], ids_TK.size
    plan_X = np.zeros(plan_words(num_experts), dtype=np.int32)
    fill_plan(plan_X, shares_X4, primary_row_E, rank, num_rows, first_redundant, crc)
    table = CrcTable.of(num_experts)
    pair_P = torch.full((places,), 10**6, dtype=torch.int32, device=where)
    place_P = torch.full((places,), 10**6, dtype=torch.int32, device=where)
    summary_X = torch.full((num_rows + 3,), 10**6, dtype=torch.int32, device=where)
    implementation.partition(
        torch.from_numpy(ids_TK).to(where),
        torch.from_numpy(plan_X).to(where),
        torch.from_numpy(table.words_EB).to(where),
        table.zero,
        num_experts,
        num_rows,
        first_redundant,
        pair_P,
        place_P,
        summary_X,
    )
    *start_S1, mismatched, unknown = summary_X.tolist()
    top_k = ids_TK.shape[1]
    rows = [[divmod(place, top_k) for place in pair_P[start_S1[s] : start_S1[s + 1]].tolist()] for s in range(num_rows)]
    return Split(pair_P, place_P, summary_X, rows, bool(mismatched), unknown)


def check_split(name: str, case: Case, rank: int, *, planned: bool) -> None:
    """``planned`` False: the entry's demand is another, so that all runs on primaries."""
    ids_TK, shares_X4, row_E, rank, num_rows, first_redundant = case.arguments(rank)
    crc = demand_crc(count_demand(ids_TK, case.num_experts)) ^ (0 if planned else 1)
    found = split(name, ids_TK, shares_X4, row_E, rank, num_rows, first_redundant, crc)
    if not planned:
        shares_X4 = np.zeros((0, 4), dtype=np.int32)
    expected = partition_reference(ids_TK, shares_X4, row_E, rank, num_rows, first_redundant)
    assert found.rows == expected
    assert (found.mismatched, found.unknown) == (not planned, -1)
    place_of = {place: pair for pair, place in enumerate(found.pair_P[: sum(map(len, expected))].tolist())}
    assert found.place_P.tolist() == [place_of.get(place, -1) for place in range(ids_TK.size)]


@given(case=cases(), planned=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_exact_share_by_torch(case: Case, planned: bool) -> None:
    assume(case.ids_TK.size)
    for rank in range(len(case.layouts_N)):
        check_split("torch", case, rank, planned=planned)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
@given(case=cases(), planned=st.booleans())
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_exact_share(name: str, case: Case, planned: bool) -> None:
    assume(case.ids_TK.size)
    check_split(name, case, 0, planned=planned)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_more_ids_than_a_block(name: str) -> None:
    ids_TK = np.stack([np.random.default_rng(t).permutation(20)[:3] for t in range(41)]).astype(np.int32)
    layouts = [StoreLayout(contiguous_primaries(20, 3), rank, 2) for rank in range(3)]
    shares_X4 = np.array([[0, 1, 0, 2], [8, 0, 1, 3], [8, 2, 0, 1]], dtype=np.int32)
    check_split(name, Case(ids_TK, shares_X4, layouts), 0, planned=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_an_unknown_id_is_found_and_harms_nothing(name: str) -> None:
    ids_TK = np.array([[0, 1], [1, 7], [-3, 0]], dtype=np.int32)
    row_E = np.array([0, 1], dtype=np.int32)
    found = split(name, ids_TK, np.zeros((0, 4), dtype=np.int32), row_E, 0, 3, 2, 0)
    assert found.unknown == 3
    assert found.rows == [[(0, 0), (2, 1)], [(0, 1), (1, 0)], []]
    assert found.place_P.tolist() == [0, 2, 3, -1, -1, 1]


def test_a_plan_that_breaks_a_rule_is_refused_before_anything_runs() -> None:
    row_E = np.array([0, -1], dtype=np.int32)
    plan_X = np.zeros(plan_words(2), dtype=np.int32)
    with pytest.raises(PlanError, match="no such redundant slot"):
        fill_plan(plan_X, np.array([[1, 0, 5, 2]], dtype=np.int32), row_E, 0, 2, 1, 0)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_the_crc_of_a_demand_by_table(counts: list[int]) -> None:
    demand_E = np.array(counts, dtype=np.int32)
    assert CrcTable.of(len(counts)).crc(demand_E) == demand_crc(demand_E)


@dataclass
class Layer:
    """Random experts and pairs."""

    hidden_TD: F32
    weights_TK: F32
    pairs: Pairs
    gate_up_SFD: torch.Tensor
    down_SDI: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor]


def layer(
    dtype: torch.dtype, seed: int, *, tokens: int = 11, hidden: int = 32, expert: int = 16, rows: int = 5
) -> Layer:
    numbers = np.random.default_rng(seed)

    def pick(*shape: int) -> torch.Tensor:
        return torch.from_numpy(numbers.standard_normal(shape, dtype=np.float32) / 2).to(dtype)

    top_k = 2
    pairs = Pairs.empty(tokens * top_k, rows)
    row_P = np.sort(numbers.choice([0, 1, 3, 4], size=int(numbers.integers(1, tokens * top_k + 1))))  # row 2 has none
    pairs.count = len(row_P)
    pairs.start_S1[:] = np.searchsorted(row_P, np.arange(rows + 1))
    places = numbers.permutation(tokens * top_k)[: pairs.count]
    pairs.token_P[: pairs.count], pairs.k_P[: pairs.count] = np.divmod(places, top_k)
    return Layer(
        numbers.standard_normal((tokens, hidden), dtype=np.float32),
        numbers.random((tokens, top_k), dtype=np.float32),
        pairs,
        pick(rows, 2 * expert, hidden),
        pick(rows, hidden, expert),
        (pick(rows, 2 * expert), pick(rows, hidden)),
    )


def computed(name: str, one: Layer, form: ExpertForm, tile: int) -> F32:
    """All scratch is NaN before: what nobody wrote may touch nothing."""
    implementation, where = way(name)
    tokens, top_k = one.weights_TK.shape
    places, hidden, expert = tokens * top_k, one.down_SDI.shape[1], one.down_SDI.shape[2]
    pair_P = one.pairs.token_P * top_k + one.pairs.k_P
    place_P = np.full(places, -1, dtype=np.int32)
    place_P[pair_P[: one.pairs.count]] = np.arange(one.pairs.count)
    out_TD = torch.full((tokens, hidden), float("nan"), device=where)
    implementation.experts(
        torch.from_numpy(one.hidden_TD).to(where),
        torch.from_numpy(one.weights_TK).to(where),
        torch.from_numpy(pair_P).to(where),
        torch.from_numpy(place_P).to(where),
        torch.from_numpy(one.pairs.start_S1).to(where),
        one.gate_up_SFD.to(where),
        one.down_SDI.to(where),
        tuple(bias.to(where) for bias in one.biases) if form.biases else None,
        torch.full((places, expert), float("nan"), dtype=one.down_SDI.dtype, device=where),
        torch.full((places, hidden), float("nan"), device=where),
        out_TD,
        form,
        tile,
    )
    out: F32 = out_TD.cpu().numpy()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("form", [SILU_GATED, CLAMPED], ids=["silu", "clamped-biased"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", EXPERTS_WAYS)
def test_experts(name: str, dtype: torch.dtype, form: ExpertForm) -> None:
    if name.startswith("interpreted") and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as whole numbers; float16 stands for it")
    if name == "torch-gpu" and dtype is not torch.bfloat16:
        pytest.skip("torch's grouped product is for bfloat16 on GPUs")
    for seed, tile in ((0, 16), (1, 32)):
        one = layer(dtype, seed)
        biases = tuple(bias.float().numpy() for bias in one.biases)
        expected_TD = grouped_mlp_reference(
            one.hidden_TD,
            one.weights_TK,
            one.pairs,
            one.gate_up_SFD.float().numpy(),
            one.down_SDI.float().numpy(),
            form,
            (biases[0], biases[1]) if form.biases else None,
        )
        off = np.abs(computed(name, one, form, tile) - expected_TD).max() / np.abs(expected_TD).max()
        assert off <= TOLERANCE[dtype], f"{off:.2e} of the largest output"


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_rows_that_no_tile_divides_and_sizes_that_no_block_does(name: str) -> None:
    if name == "torch-gpu":
        pytest.skip("torch's grouped product is for bfloat16 on GPUs")
    one = layer(torch.float32, 3, tokens=19, hidden=20, expert=12)
    expected_TD = grouped_mlp_reference(
        one.hidden_TD, one.weights_TK, one.pairs, one.gate_up_SFD.numpy(), one.down_SDI.numpy()
    )
    first_TD = computed(name, one, SILU_GATED, 16)
    off = np.abs(first_TD - expected_TD).max() / np.abs(expected_TD).max()
    assert off <= TOLERANCE[torch.float32]
    assert np.array_equal(first_TD, computed(name, one, SILU_GATED, 16)), "the same inputs give the same bits"


def test_a_worker_without_pairs_gives_zeros() -> None:
    one = layer(torch.float32, 5)
    one.pairs.count = 0
    one.pairs.start_S1[:] = 0
    assert not computed("torch", one, SILU_GATED, 16).any()


def test_tiles_that_a_gpu_has() -> None:
    for tile in (16, 64):
        check_tile(tile)
    with pytest.raises(ConfigError, match=r"planner.tile_tokens: 8 is no tile of a GPU.*add --planner.tile_tokens 64"):
        check_tile(8)


def test_what_applies_where() -> None:
    need("triton")

    def names(dtype: torch.dtype, capability: tuple[int, int], widths: tuple[int, int]) -> list[str]:
        return [one.name for one in applicable(dtype, capability, widths)]

    assert names(torch.float32, (9, 0), (4096, 1408)) == ["triton"]
    assert names(torch.bfloat16, (9, 0), (4096, 1408)) == ["triton", "grouped"]
    assert names(torch.bfloat16, (7, 5), (4096, 1408)) == ["triton"]
    assert names(torch.bfloat16, (9, 0), (4096, 1404)) == ["triton"]


def pointers(kernel: Any, weights: str) -> dict[str, str]:
    """Types of a kernel's arguments by their names: which letters stand for indices, weights and rows."""
    kinds: dict[str, str] = {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            kinds[name] = "constexpr"
        elif name in ("ids_P", "plan_X", "words_EB", "pair_P", "place_P", "start_S1", "summary_X"):
            kinds[name] = "*i32"
        elif name in ("gate_up_SFD", "down_SDI", "bias_SF", "bias_SD", "act_PI"):
            kinds[name] = f"*{weights}"
        elif "_" in name and name[-1].isupper():
            kinds[name] = "*fp32"
        else:
            kinds[name] = "fp32" if name in ("alpha", "limit") else "i32"
    return kinds


SIZES = {"D": 256, "INNER": 96, "S": 32, "M": 16, "N": 32, "X": 32, "BIASED": True, "CLAMPED": True}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["partition_places", "gate_and_up", "down", "sum_choices"])
def test_the_kernels_compile_for_a_hopper_gpu(name: str, weights: str) -> None:
    need("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from afore.workers.device.cuda import experts_kernel, partition_kernel

    kernel = getattr(partition_kernel if name == "partition_places" else experts_kernel, name)
    values = {**SIZES, "E": 64, "B": 32, "NUM_BITS": 32, "PRECISION": "ieee" if weights == "fp32" else "tf32"}
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    source = ASTSource(fn=kernel, signature=pointers(kernel, weights), constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert len(compiled.asm["cubin"]) > 1000


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    need("triton")
    assert "12 passed" in run_interpreted(__file__)
