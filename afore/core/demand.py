"""Demand: how many token-expert pairs a target routes to each expert."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

DemandVector = npt.NDArray[np.int32]


def count_demand(ids_TK: npt.NDArray[np.integer[Any]], num_experts: int) -> DemandVector:
    """Counts expert ids [T, K] into demand [E] (int32): the vector an attention worker sends (paper §6.1)."""
    return np.bincount(ids_TK.reshape(-1), minlength=num_experts).astype(np.int32)


def demand_crc(demand_E: DemandVector) -> int:
    """CRC-32 of the summed demand [E] as little-endian int32: what workers compare their gathered inputs with."""
    return zlib.crc32(np.ascontiguousarray(demand_E, dtype="<i4").tobytes())
