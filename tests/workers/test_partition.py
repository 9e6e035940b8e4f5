"""Eq. 11: exact shares of every worker."""

from __future__ import annotations

import zlib
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.demand import count_demand, demand_crc
from afore.core.errors import PlanError, WireError
from afore.core.plan import Share, shares_array
from afore.core.slots import StoreLayout, contiguous_primaries
from afore.workers.device.base import Pairs
from afore.workers.partition import (
    compile_partition,
    count_and_crc,
    count_rows,
    count_tiles,
    partition,
    partition_reference,
    rows_measured,
)
from tests.workers.shares import Case, cases


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_partition()


def _rows(case: Case, rank: int) -> tuple[list[list[tuple[int, int]]], Pairs]:
    out = Pairs.empty(case.ids_TK.size, case.layouts_N[rank].num_rows)
    partition(*case.arguments(rank), out)
    pairs = list(zip(out.token_P.tolist(), out.k_P.tolist(), strict=True))
    starts = out.start_S1.tolist()
    return [pairs[first:end] for first, end in pairwise(starts)], out


@pytest.mark.slow
@given(cases())
def test_shares_are_disjoint_and_cover_every_pair_once(case: Case) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(len(case.layouts_N)):
        rows, out = _rows(case, rank)
        assert out.count == sum(map(len, rows))
        for row, expert in zip(rows, out.expert_S.tolist(), strict=True):
            assert row == sorted(row), "gathered order within a row"
            assert (expert >= 0) == bool(row)
            assert all(case.ids_TK[pair] == expert for pair in row)
            seen.update(row)
    assert seen == Counter(dict.fromkeys(np.ndindex(*case.ids_TK.shape), 1))


@pytest.mark.slow
@given(cases())
def test_counts_are_the_plans_clipped_in_rank_order(case: Case) -> None:
    left_E = count_demand(case.ids_TK, case.num_experts).tolist()
    expected: dict[tuple[int, int], int] = {}
    for expert, worker, slot, count in case.shares_X4.tolist():
        taken = min(count, left_E[expert])
        left_E[expert] -= taken
        expected[worker, case.layouts_N[worker].redundant_row(slot)] = taken
    for rank, layout in enumerate(case.layouts_N):
        for expert in layout.primary_experts:
            expected[rank, int(layout.row_E[expert])] = left_E[expert]
        rows, _ = _rows(case, rank)
        assert [len(row) for row in rows] == [expected.get((rank, row), 0) for row in range(layout.num_rows)]


@pytest.mark.slow
@given(cases())
def test_equals_the_reference(case: Case) -> None:
    for rank in range(len(case.layouts_N)):
        assert _rows(case, rank)[0] == partition_reference(*case.arguments(rank))


@pytest.mark.slow
@given(cases())
def test_demand_alone_tells_the_counts(case: Case) -> None:
    demand_E = count_demand(case.ids_TK, case.num_experts)
    for rank in range(len(case.layouts_N)):
        rows_S = count_rows(demand_E, *case.arguments(rank)[1:])
        assert rows_S.tolist() == [len(row) for row in _rows(case, rank)[0]]


@pytest.mark.slow
@given(cases())
def test_demand_and_crc_are_those_of_the_scheduler(case: Case) -> None:
    demand_E, crc = count_and_crc(case.ids_TK, case.num_experts)
    assert demand_E.tolist() == count_demand(case.ids_TK, case.num_experts).tolist()
    assert crc == demand_crc(demand_E) == zlib.crc32(demand_E.astype("<i4").tobytes())


@given(st.lists(st.integers(0, 40)), st.integers(1, 9))
def test_tiles(rows: list[int], tile_tokens: int) -> None:
    assert count_tiles(np.array(rows, dtype=np.int32), tile_tokens) == sum(-(-row // tile_tokens) for row in rows)


@given(st.lists(st.integers(0, 40), min_size=1), st.integers(1, 9), st.data())
def test_rows_measured(rows: list[int], tile_tokens: int, data: st.DataObject) -> None:
    start_S1 = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    first = data.draw(st.integers(0, len(rows)))
    expected = sum(-(-row // tile_tokens) for row in rows), sum(rows[first:])
    assert rows_measured(start_S1, first, tile_tokens) == expected


def test_shares_array_keeps_the_plans_order() -> None:
    shares = (Share(3, 1, 0, 5, 17), Share(3, 2, 1, 4, 18))
    assert shares_array(shares).tolist() == [[3, 1, 0, 5], [3, 2, 1, 4]]
    assert shares_array(()).shape == (0, 4)


def test_inputs_may_be_mapped_read_only() -> None:
    layout = StoreLayout(contiguous_primaries(4, 1), 0, 0)
    ids_TK = np.array([[0, 3], [2, 0]], dtype=np.int32)
    ids_TK.flags.writeable = False
    out = Pairs.empty(4, 4)
    partition(ids_TK, shares_array(()), layout.row_E, 0, 4, 4, out)
    assert out.count == 4
    assert out.token_P.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_an_unknown_expert_id_is_refused_by_row(bad: int) -> None:
    layout = StoreLayout(contiguous_primaries(4, 2), 0, 1)
    ids_TK = np.array([[0, 1], [2, 3], [1, bad]], dtype=np.int32)
    out = Pairs.empty(6, layout.num_rows)
    with pytest.raises(WireError, match=f"gathered row 2, choice 1 names expert {bad}") as refused:
        partition(ids_TK, shares_array(()), layout.row_E, 0, layout.num_rows, 2, out)
    assert out.count == 0
    assert "0 … 3" in str(refused.value)
    with pytest.raises(WireError, match="gathered row 2, choice 1"):
        count_and_crc(ids_TK, 4)


PLANS: list[tuple[list[tuple[int, int, int, int]], str]] = [
    ([(4, 1, 0, 1)], "no such expert"),
    ([(-1, 1, 0, 1)], "no such expert"),
    ([(0, 1, 0, -1)], "negative"),
    ([(1, 1, 0, 1), (0, 1, 1, 1)], "by expert, then by worker rank"),
    ([(0, 2, 0, 1), (0, 1, 0, 1)], "by expert, then by worker rank"),
    ([(0, 1, 0, 1), (0, 1, 1, 1)], "two replicas of one expert"),
    ([(2, 1, 0, 1)], "two replicas of one expert"),  # its primary is on worker 1
    ([(0, 1, 2, 1)], "no such redundant slot"),
    ([(0, 1, -1, 1)], "no such redundant slot"),
    ([(0, 1, 0, 1), (1, 1, 0, 1)], "another expert has the same slot"),
]


@pytest.mark.parametrize(("shares", "why"), PLANS)
def test_a_plan_that_breaks_a_rule_is_refused(shares: list[tuple[int, int, int, int]], why: str) -> None:
    layout = StoreLayout(contiguous_primaries(4, 2), 1, 2)
    shares_X4 = np.array(shares, dtype=np.int32)
    out = Pairs.empty(2, layout.num_rows)
    arguments = (shares_X4, layout.row_E, 1, layout.num_rows, 2)
    with pytest.raises(PlanError, match=why):
        partition(np.array([[0, 1]], dtype=np.int32), *arguments, out)
    with pytest.raises(PlanError, match=why):
        count_rows(np.array([1, 1, 0, 0], dtype=np.int32), *arguments)


@pytest.mark.parametrize("room", [Pairs.empty(3, 4), Pairs.empty(4, 3)])
def test_pairs_that_are_too_small_are_refused(room: Pairs) -> None:
    layout = StoreLayout(contiguous_primaries(4, 1), 0, 0)
    with pytest.raises(ValueError, match="cannot hold 4 pairs over 4 rows"):
        partition(np.zeros((2, 2), dtype=np.int32), shares_array(()), layout.row_E, 0, 4, 4, room)


def test_a_worker_without_experts_has_an_empty_share() -> None:
    layout = StoreLayout(contiguous_primaries(2, 5), 4, 0)
    assert layout.num_rows == 0
    out = Pairs.empty(0, 0)
    partition(np.array([[0, 1]], dtype=np.int32), shares_array(()), layout.row_E, 4, 0, 0, out)
    assert out.count == 0


def test_no_other_types_are_compiled_behind_our_back() -> None:
    layout = StoreLayout(contiguous_primaries(4, 1), 0, 0)
    every_second: Any = np.zeros((4, 4), dtype=np.int32)[:, ::2]
    with pytest.raises(TypeError, match="No matching definition"):
        partition(every_second, shares_array(()), layout.row_E, 0, 4, 4, Pairs.empty(8, 4))
