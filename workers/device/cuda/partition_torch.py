"""The exact share of eq. 11 by torch's own operations: a dozen launches, on any device that torch has, no host in between.

What the fused kernel is held against, and what runs where Triton is not installed. Letters as there.
"""

from __future__ import annotations

from typing import Any

import torch

from afore.workers.device.cuda.demand_check import BITS
from afore.workers.device.cuda.pair_plan import MOST


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
    """Enqueues it on torch's current stream; see ``partition_kernel.launch``."""
    device, num_places = ids_TK.device, ids_TK.numel()
    id_P = ids_TK.reshape(-1).long()
    at_P = torch.arange(num_places, device=device, dtype=torch.int32)
    bad_P = (id_P < 0) | (id_P >= num_experts)
    same_PE = id_P[:, None] == torch.arange(num_experts, device=device)
    demand_E = same_PE.sum(0)
    other = _crc(demand_E, words_EB) ^ zero_crc != plan_X[3 * num_experts]
    row_E, low_E, high_E = (plan_X[part * num_experts : (part + 1) * num_experts].long() for part in range(3))
    low_E = torch.where(other, 0, low_E)
    high_E = torch.where(other, torch.where(row_E < first_redundant, MOST, 0), high_E)
    pairs_E = torch.minimum(high_E, demand_E) - torch.minimum(low_E, demand_E)
    pairs_E = torch.where(row_E >= 0, pairs_E, 0)
    before_SE = (row_E < torch.arange(num_rows + 1, device=device)[:, None]) & (row_E >= 0)
    start_S1 = torch.where(before_SE, pairs_E, 0).sum(1)
    id_P = torch.where(bad_P, 0, id_P)
    ordinal_P = (same_PE.int().cumsum(0) * same_PE).sum(1) - 1
    row_P, low_P = row_E[id_P], low_E[id_P]
    here_P = ~bad_P & (row_P >= 0) & (ordinal_P >= low_P) & (ordinal_P < high_E[id_P])
    found_P = start_S1[row_P.clamp(min=0)] + ordinal_P - low_P
    place_P[:num_places] = torch.where(here_P, found_P, -1)
    # What is not ours goes into one place behind all others.
    room_P = torch.zeros(num_places + 1, device=device, dtype=torch.int32)
    room_P.scatter_(0, torch.where(here_P, found_P, num_places), at_P)
    pair_P[:num_places] = room_P[:num_places]
    summary_X[: num_rows + 1] = start_S1
    summary_X[num_rows + 1] = other
    unknown = torch.where(bad_P, at_P, num_places).amin()
    summary_X[num_rows + 2] = torch.where(unknown < num_places, unknown, -1)


def _crc(demand_E: torch.Tensor, words_EB: torch.Tensor) -> torch.Tensor:
    """What the set bits of the demand change, as int64 with the sign of its 32-bit word: parities by a product that is exact."""
    bit_B = torch.arange(BITS, device=demand_E.device)
    set_X = ((demand_E[:, None] >> bit_B) & 1).reshape(1, -1).float()
    out_XB = ((words_EB.reshape(-1, 1).long() >> bit_B) & 1).float()
    parity_B = (set_X @ out_XB).reshape(-1).long() & 1
    word = (parity_B << bit_B).sum()
    return torch.where(word >= 1 << (BITS - 1), word - (1 << BITS), word)
