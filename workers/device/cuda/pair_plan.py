"""What a GPU needs to know of a plan to take its exact share (eq. 11): for each expert a store row here and two ordinals.

Of an expert's occurrences in gathered order, a worker takes [low, high): a redundant replica what its boundaries say, the primary
what is left behind the last of them. Both follow from the plan alone; the GPU clips them to the demand that it counts itself. So
one small upload goes in front of a target and nothing comes back before the partition.
"""

from __future__ import annotations

import numpy as np

from afore.workers.device.base import I32
from afore.workers.device.cuda.demand_check import signed
from afore.workers.partition import count_rows

NO_ROW = -1
MOST = np.iinfo(np.int32).max
"""Ordinal behind all others."""
_SHARE_LIMIT = 1 << 16
"""More pairs of one expert than a target ever has: what shares are checked against before anything is counted."""


def plan_words(num_experts: int) -> int:
    """Length of a plan's vector."""
    return 3 * num_experts + 1


def fill_plan(
    out_X: I32,
    shares_X4: I32,
    primary_row_E: I32,
    my_rank: int,
    num_rows: int,
    first_redundant: int,
    expected_crc: int,
) -> None:
    """Writes rows [E], low ordinals [E], high ordinals [E] and the planned demand's CRC into ``out_X``.

    Raises ``PlanError`` for shares that break a rule, as ``Kernels.partition`` does.
    """
    num_experts = primary_row_E.shape[0]
    if shares_X4.shape[0]:
        demand_E = np.full(num_experts, _SHARE_LIMIT, dtype=np.int32)
        count_rows(demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant)
    row_E, low_E, high_E = (out_X[part * num_experts : (part + 1) * num_experts] for part in range(3))
    row_E[:] = primary_row_E
    low_E[:] = 0
    high_E[:] = MOST
    boundary_E: dict[int, int] = {}
    for expert, worker, slot, count in shares_X4.tolist():
        first = boundary_E.get(expert, 0)
        boundary_E[expert] = last = min(first + count, MOST)
        if worker == my_rank:
            row_E[expert], low_E[expert], high_E[expert] = first_redundant + slot, first, last
        elif primary_row_E[expert] >= 0:
            low_E[expert] = last
    out_X[3 * num_experts] = signed(expected_crc)
