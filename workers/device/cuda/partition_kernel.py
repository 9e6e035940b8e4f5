"""The exact share of eq. 11 as one launch: a program for each expert, none of which waits for another.

Each program counts the whole demand (ids are few, and counting them again is cheaper than meeting), checks its CRC against the
planned one, knows from all rows' counts where its own row begins, and numbers its expert's occurrences. The order within a
row is the gathered order, whatever runs first.

Letters: E experts (padded to a power of two), S store rows, P places (t, k) of the gathered ids, B places of a block.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from afore.workers.device.cuda.demand_check import BITS

BLOCK = 32


# A target's size must not choose among compiled variants: the first odd one would compile while others wait.
@triton.jit(do_not_specialize=["zero_crc", "num_places", "num_experts", "num_rows", "first_redundant"])
def partition_places(
    ids_P,
    plan_X,
    words_EB,
    zero_crc,
    num_places,
    num_experts,
    num_rows,
    first_redundant,
    pair_P,
    place_P,
    summary_X,
    E: tl.constexpr,
    S: tl.constexpr,
    B: tl.constexpr,
    NUM_BITS: tl.constexpr,
):
    """``pair_P``: places by store row. ``place_P``: the pair of each place, -1 for other workers'.

    ``summary_X``: first pair of each row [S+1], whether the demand was another than planned, the first unknown id's place or -1.
    """
    mine = tl.program_id(0)
    expert_E = tl.arange(0, E)
    known_E = expert_E < num_experts
    demand_E = tl.zeros((E,), tl.int32)
    unknown = mine * 0 + num_places
    for begin in range(0, num_places, B):
        at_B = begin + tl.arange(0, B)
        id_B = tl.load(ids_P + at_B, mask=at_B < num_places, other=0)
        bad_B = ((id_B < 0) | (id_B >= num_experts)) & (at_B < num_places)
        unknown = tl.minimum(unknown, tl.min(tl.where(bad_B, at_B, num_places), axis=0))
        counted_BE = (id_B[:, None] == expert_E[None, :]) & (at_B < num_places)[:, None] & known_E[None, :]
        demand_E += tl.sum(counted_BE.to(tl.int32), axis=0)
    changed_E = tl.zeros((E,), tl.int32)
    for bit in range(NUM_BITS):
        word_E = tl.load(words_EB + expert_E * NUM_BITS + bit, mask=known_E, other=0)
        changed_E ^= tl.where(((demand_E >> bit) & 1) != 0, word_E, 0)
    other = (tl.xor_sum(changed_E, axis=0) ^ zero_crc) != tl.load(plan_X + 3 * num_experts)
    row_E = tl.load(plan_X + expert_E, mask=known_E, other=-1)
    low_E = tl.load(plan_X + num_experts + expert_E, mask=known_E, other=0)
    high_E = tl.load(plan_X + 2 * num_experts + expert_E, mask=known_E, other=0)
    # Another demand than was planned for runs on primaries: every worker counts the same, so all decide the same.
    primary_E = row_E < first_redundant
    low_E = tl.where(other, 0, low_E)
    high_E = tl.where(other, tl.where(primary_E, 2147483647, 0), high_E)
    high_E = tl.where(row_E >= 0, high_E, 0)
    low_E = tl.where(row_E >= 0, low_E, 0)
    pairs_E = tl.minimum(high_E, demand_E) - tl.minimum(low_E, demand_E)
    chosen_E = expert_E == mine
    row = tl.sum(tl.where(chosen_E, row_E, 0), axis=0)
    low = tl.sum(tl.where(chosen_E, low_E, 0), axis=0)
    high = tl.sum(tl.where(chosen_E, high_E, 0), axis=0)
    first = tl.sum(tl.where(row_E < row, pairs_E, 0), axis=0)
    seen = mine * 0
    for begin in range(0, num_places, B):
        at_B = begin + tl.arange(0, B)
        there_B = at_B < num_places
        id_B = tl.load(ids_P + at_B, mask=there_B, other=-1)
        same_B = there_B & (id_B == mine)
        ordinal_B = seen + tl.cumsum(same_B.to(tl.int32), axis=0) - 1
        seen += tl.sum(same_B.to(tl.int32), axis=0)
        here_B = same_B & (ordinal_B >= low) & (ordinal_B < high)
        pair_B = first + ordinal_B - low
        tl.store(pair_P + pair_B, at_B, mask=here_B)
        tl.store(place_P + at_B, tl.where(here_B, pair_B, -1), mask=same_B)
        if mine == 0:
            bad_B = there_B & ((id_B < 0) | (id_B >= num_experts))
            tl.store(place_P + at_B, tl.full((B,), -1, tl.int32), mask=bad_B)
    if mine == 0:
        row_S = tl.arange(0, S)
        before_SE = (row_E[None, :] < row_S[:, None]) & (row_E[None, :] >= 0)
        start_S = tl.sum(tl.where(before_SE, pairs_E[None, :], 0), axis=1)
        tl.store(summary_X + row_S, start_S, mask=row_S <= num_rows)
        tl.store(summary_X + num_rows + 1, other.to(tl.int32))
        tl.store(summary_X + num_rows + 2, tl.where(unknown < num_places, unknown, -1))


def launch(
    ids_TK: Any,
    plan_X: Any,
    words_EB: Any,
    zero_crc: int,
    num_experts: int,
    num_rows: int,
    first_redundant: int,
    pair_P: Any,
    place_P: Any,
    summary_X: Any,
) -> None:
    """Enqueues it on torch's current stream. All tensors are int32 and contiguous, on one device."""
    partition_places[(num_experts,)](
        ids_TK,
        plan_X,
        words_EB,
        zero_crc,
        ids_TK.numel(),
        num_experts,
        num_rows,
        first_redundant,
        pair_P,
        place_P,
        summary_X,
        E=max(16, triton.next_power_of_2(num_experts)),
        S=max(16, triton.next_power_of_2(num_rows + 1)),
        B=BLOCK,
        NUM_BITS=BITS,
    )
