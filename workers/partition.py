"""Which token-expert pairs a worker executes (paper §6.2, eq. 11): exact shares without moving a token.

Every worker has the same gathered ids [T, K], in gathered order: attention rank, row, k. It numbers the occurrences of each
expert in that order. Redundant replica j of an expert, in rank order of the workers, takes ordinals [o_(j-1), o_j); the primary
takes what is left. A plan made from history may count more than there is: boundaries are clipped to the true demand.

Letters: T tokens, K experts per token, E experts, S rows of this worker's store (primaries, then redundant slots), X shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from afore.core.demand import demand_crc
from afore.core.errors import PlanError, WireError
from afore.workers.device.base import I32, Pairs

_OK = 0
_UNKNOWN_ID = 1
_UNKNOWN_EXPERT = 2
_NEGATIVE = 3
_UNSORTED = 4
_TWO_REPLICAS = 5
_NO_SUCH_SLOT = 6
_SLOT_TWICE = 7
_BAD_PRIMARY = 8
_TOO_SMALL = 9

_SHARE_PROBLEMS = {
    _UNKNOWN_EXPERT: "the model has no such expert",
    _NEGATIVE: "its count is negative",
    _UNSORTED: "shares must come by expert, then by worker rank",
    _TWO_REPLICAS: "that worker would have two replicas of one expert",
    _NO_SUCH_SLOT: "the worker has no such redundant slot",
    _SLOT_TWICE: "another expert has the same slot in this plan",
}


def partition(
    ids_TK: I32,
    shares_X4: I32,
    primary_row_E: I32,
    my_rank: int,
    num_rows: int,
    first_redundant: int,
    out: Pairs,
) -> None:
    """Fills ``out`` with this worker's pairs, grouped by store row, in gathered order within a row (eq. 11).

    The contract, with its errors, is ``Kernels.partition``. Allocates nothing that grows with T; releases the GIL.
    """
    count, problem, place = _partition(
        ids_TK,
        shares_X4,
        primary_row_E,
        my_rank,
        num_rows,
        first_redundant,
        out.token_P,
        out.k_P,
        out.start_S1,
        out.expert_S,
    )
    if problem != _OK:
        out.count = 0
        _refuse(problem, place, ids_TK, shares_X4, primary_row_E, num_rows, out)
    out.count = count


def count_rows(
    demand_E: I32, shares_X4: I32, primary_row_E: I32, my_rank: int, num_rows: int, first_redundant: int
) -> I32:
    """Pairs of each store row [S], from the demand alone: what ``partition`` will find. Raises ``PlanError`` likewise."""
    start_S1 = np.empty(num_rows + 1, dtype=np.int32)
    expert_S = np.empty(num_rows, dtype=np.int32)
    problem, place = _count_rows(
        demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, start_S1, expert_S
    )
    if problem != _OK:
        _refuse(problem, place, None, shares_X4, primary_row_E, num_rows, None)
    return np.diff(start_S1)


def count_pairs(
    ids_TK: I32,
    shares_X4: I32,
    primary_row_E: I32,
    my_rank: int,
    num_rows: int,
    first_redundant: int,
    out: Pairs,
) -> int:
    """``partition`` without its list of pairs: fills ``start_S1`` and ``expert_S`` of ``out`` and returns the pairs' number.

    Raises as ``partition`` does.
    """
    demand_E = np.empty(primary_row_E.shape[0], dtype=np.int32)
    place = _count(ids_TK, demand_E)
    if place >= 0:
        raise _unknown_id(ids_TK, place, primary_row_E.shape[0])
    return count_demand(demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, out)


def count_demand(
    demand_E: I32, shares_X4: I32, primary_row_E: I32, my_rank: int, num_rows: int, first_redundant: int, out: Pairs
) -> int:
    """``count_pairs`` of ids that are demanded so often."""
    problem, place = _count_rows(
        demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, out.start_S1, out.expert_S
    )
    if problem != _OK:
        _refuse(problem, place, None, shares_X4, primary_row_E, num_rows, None)
    return int(out.start_S1[num_rows])


def count_ids(ids_A: Sequence[I32], num_experts: int) -> I32:
    """Demand [E] of the ids [T_a, K] of all attention workers together.

    Raises ``WireError`` naming the row of an id outside 0…E-1.
    """
    total_E = np.zeros(num_experts, dtype=np.int32)
    demand_E = np.empty(num_experts, dtype=np.int32)
    for ids_TK in ids_A:
        place = _count(ids_TK, demand_E)
        if place >= 0:
            raise _unknown_id(ids_TK, place, num_experts)
        total_E += demand_E
    return total_E


def count_tiles(rows_S: I32, tile_tokens: int) -> int:
    """Tiles of ``tile_tokens`` pairs over rows [S]: the sum of ⌈pairs / M_tile⌉ (paper §5.1)."""
    return int(np.sum(-(-rows_S // tile_tokens)))


def rows_measured(start_S1: I32, first_redundant: int, tile_tokens: int) -> tuple[int, int]:
    """(tiles of ``tile_tokens`` pairs over all rows, pairs on redundant rows) of a grouping: after every target, so compiled."""
    tiles, redundant = _rows_measured(start_S1, first_redundant, tile_tokens)
    return tiles, redundant


def rows_us(start_S1: I32, tile_tokens: int, tile_us: float, expert_us: float) -> float:
    """Time of a grouping of pairs by store row [S+1]: each row with pairs its tiles, at least ``expert_us``. After every target."""
    return float(_rows_us(start_S1, tile_tokens, tile_us, expert_us))


def count_and_crc(ids_TK: I32, num_experts: int) -> tuple[I32, int]:
    """Demand [E] of gathered ids and its CRC-32: what is compared with a plan's ``demand_crc``.

    Raises ``WireError`` naming the gathered row of an id outside 0…E-1.
    """
    demand_E = np.empty(num_experts, dtype=np.int32)
    place = _count(ids_TK, demand_E)
    if place >= 0:
        raise _unknown_id(ids_TK, place, num_experts)
    return demand_E, demand_crc(demand_E)


def partition_reference(
    ids_TK: I32, shares_X4: I32, primary_row_E: I32, my_rank: int, num_rows: int, first_redundant: int
) -> list[list[tuple[int, int]]]:
    """Eq. 11 word for word, for shares without a mistake: (token, k) of each store row. Slow."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    for expert, primary_row in enumerate(primary_row_E.tolist()):
        occurrences = [(t, k) for t in range(ids_TK.shape[0]) for k in range(ids_TK.shape[1]) if ids_TK[t, k] == expert]
        boundary = 0
        for _, worker, slot, count in sorted(share for share in shares_X4.tolist() if share[0] == expert):
            if worker == my_rank:
                rows[first_redundant + slot] = occurrences[boundary : boundary + count]
            boundary += count
        if primary_row >= 0:
            rows[primary_row] = occurrences[boundary:]
    return rows


def compile_partition() -> None:
    """Compiles (or reads from numba's cache) the kernels, for exactly these types: nothing compiles later."""
    ids = types.Array(types.int32, 2, "C", readonly=True)
    demand = types.Array(types.int32, 1, "C", readonly=True)
    out, whole = types.int32[::1], types.int64
    plan = (ids, demand, whole, whole, whole)
    for kernel, signature in (
        (_count, (ids, out)),
        (_count_rows, (demand, *plan, out, out)),
        (_rows_measured, (out, whole, whole)),
        (_rows_us, (out, whole, types.float64, types.float64)),
        (_partition, (ids, *plan, out, out, out, out)),
    ):
        if not kernel.signatures:
            kernel.compile(signature)
            kernel.disable_compile()


def _unknown_id(ids_TK: npt.NDArray[np.integer[Any]], place: int, num_experts: int) -> WireError:
    row, k = divmod(place, ids_TK.shape[1])
    return WireError(
        "attention",
        f"gathered row {row}, choice {k} names expert {int(ids_TK[row, k])}",
        f"ids are 0 … {num_experts - 1}; do all roles serve the same model?",
    )


def _refuse(
    problem: int, place: int, ids_TK: I32 | None, shares_X4: I32, primary_row_E: I32, num_rows: int, out: Pairs | None
) -> None:
    if problem == _UNKNOWN_ID:
        assert ids_TK is not None
        raise _unknown_id(ids_TK, place, primary_row_E.shape[0])
    if problem == _TOO_SMALL:
        assert out is not None
        raise ValueError(
            f"Pairs with room for {min(out.token_P.size, out.k_P.size)} pairs and {out.expert_S.size} rows cannot hold "
            f"{place} pairs over {num_rows} rows; make it with Pairs.empty(tokens * K, rows)"
        )
    assert problem != _BAD_PRIMARY, f"expert {place}: row {primary_row_E[place]} is not a primary's"
    expert, worker, slot, count = shares_X4[place].tolist()
    raise PlanError(
        f"share {place} (expert {expert}, worker {worker}, slot {slot}, count {count}): {_SHARE_PROBLEMS[problem]}"
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _count(ids_TK, demand_E):  # type: ignore[no-untyped-def]  # numba infers
    """Fills demand_E; returns -1, or the flat place of the first unknown id."""
    num_experts = demand_E.shape[0]
    demand_E[:] = 0
    for t in range(ids_TK.shape[0]):
        for k in range(ids_TK.shape[1]):
            expert = ids_TK[t, k]
            if expert < 0 or expert >= num_experts:
                return t * ids_TK.shape[1] + k
            demand_E[expert] += 1
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def _rows_measured(start_S1, first_redundant, tile_tokens):  # type: ignore[no-untyped-def]  # numba infers
    tiles = 0
    for row in range(start_S1.shape[0] - 1):
        tiles += (start_S1[row + 1] - start_S1[row] + tile_tokens - 1) // tile_tokens
    return tiles, start_S1[start_S1.shape[0] - 1] - start_S1[first_redundant]


@njit(nogil=True, cache=True, error_model="numpy")
def _rows_us(start_S1, tile_tokens, tile_us, expert_us):  # type: ignore[no-untyped-def]  # numba infers
    total_us = 0.0
    for row in range(start_S1.shape[0] - 1):
        pairs = start_S1[row + 1] - start_S1[row]
        if pairs > 0:
            total_us += max((pairs + tile_tokens - 1) // tile_tokens * tile_us, expert_us)
    return total_us


@njit(nogil=True, error_model="numpy")
def _intervals(demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, mine_E4, start_S1, expert_S):  # type: ignore[no-untyped-def]  # numba infers
    """Fills mine_E4 (first ordinal and end of the replica here, its row, the primary's first ordinal), starts and experts of rows.

    Returns (problem, index of the share or expert that has it).
    """
    num_experts = demand_E.shape[0]
    mine_E4[:] = 0
    expert_S[:] = -1
    offset = 0
    for x in range(shares_X4.shape[0]):
        expert, worker, slot, count = shares_X4[x, 0], shares_X4[x, 1], shares_X4[x, 2], shares_X4[x, 3]
        if expert < 0 or expert >= num_experts:
            return _UNKNOWN_EXPERT, x
        if count < 0:
            return _NEGATIVE, x
        if x > 0 and shares_X4[x - 1, 0] == expert:
            if worker == shares_X4[x - 1, 1]:
                return _TWO_REPLICAS, x
            if worker < shares_X4[x - 1, 1]:
                return _UNSORTED, x
        else:
            if x > 0 and expert < shares_X4[x - 1, 0]:
                return _UNSORTED, x
            offset = 0
        first = offset
        offset = min(offset + count, demand_E[expert])
        mine_E4[expert, 3] = offset
        if worker != my_rank:
            continue
        if primary_row_E[expert] >= 0:
            return _TWO_REPLICAS, x
        row = first_redundant + slot
        if slot < 0 or row >= num_rows:
            return _NO_SUCH_SLOT, x
        if expert_S[row] != -1:
            return _SLOT_TWICE, x
        expert_S[row] = expert
        mine_E4[expert, 0] = first
        mine_E4[expert, 1] = offset
        mine_E4[expert, 2] = row
    for expert in range(num_experts):
        row = primary_row_E[expert]
        if row >= 0:
            if row >= first_redundant or expert_S[row] != -1:
                return _BAD_PRIMARY, expert
            expert_S[row] = expert
    start_S1[0] = 0
    for row in range(num_rows):
        pairs = 0
        expert = expert_S[row]
        if expert >= 0:
            mine = mine_E4[expert]
            pairs = demand_E[expert] - mine[3] if row < first_redundant else mine[1] - mine[0]
            if pairs == 0:
                expert_S[row] = -1
        start_S1[row + 1] = start_S1[row] + pairs
    return _OK, 0


@njit(nogil=True, cache=True, error_model="numpy")
def _count_rows(demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, start_S1, expert_S):  # type: ignore[no-untyped-def]  # numba infers
    mine_E4 = np.empty((demand_E.shape[0], 4), dtype=np.int32)
    return _intervals(
        demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, mine_E4, start_S1, expert_S
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _partition(ids_TK, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, token_P, k_P, start_S1, expert_S):  # type: ignore[no-untyped-def]  # numba infers
    """Returns (pairs, problem, where the problem is)."""
    num_experts = primary_row_E.shape[0]
    demand_E = np.empty(num_experts, dtype=np.int32)
    place = _count(ids_TK, demand_E)
    if place >= 0:
        return 0, _UNKNOWN_ID, place
    if start_S1.shape[0] != num_rows + 1 or expert_S.shape[0] != num_rows:
        return 0, _TOO_SMALL, ids_TK.size
    mine_E4 = np.empty((num_experts, 4), dtype=np.int32)
    problem, place = _intervals(
        demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, mine_E4, start_S1, expert_S
    )
    if problem != _OK:
        return 0, problem, place
    total = start_S1[num_rows]
    if total > min(token_P.shape[0], k_P.shape[0]):
        return 0, _TOO_SMALL, total
    next_S = start_S1[:num_rows].copy()
    seen_E = demand_E
    seen_E[:] = 0
    for t in range(ids_TK.shape[0]):
        for k in range(ids_TK.shape[1]):
            expert = ids_TK[t, k]
            ordinal = seen_E[expert]
            seen_E[expert] = ordinal + 1
            row = primary_row_E[expert]
            if row < 0 or ordinal < mine_E4[expert, 3]:
                if ordinal < mine_E4[expert, 0] or ordinal >= mine_E4[expert, 1]:
                    continue
                row = mine_E4[expert, 2]
            token_P[next_S[row]] = t
            k_P[next_S[row]] = k
            next_S[row] += 1
    return total, _OK, 0
