"""A demand vector's CRC-32 on a GPU, without a byte-by-byte loop.

CRC-32 is affine over GF(2): the CRC of a vector is that of the zero vector, changed by a fixed word for every bit that is set. So
a table with one word for each (expert, bit) and an exclusive or over the set bits give what ``zlib.crc32`` gives, in parallel.

Letters: E experts, B = 32 bits of a count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afore.core.demand import demand_crc
from afore.workers.device.base import I32

BITS = 32


@dataclass(frozen=True, slots=True)
class CrcTable:
    """For vectors of E counts."""

    zero: int
    """CRC of all zeros, as a signed 32-bit number."""
    words_EB: I32
    """[E, 32]: what each set bit of each count changes."""

    @classmethod
    def of(cls, num_experts: int) -> CrcTable:
        """Takes E x 32 checksums, once."""
        demand_E = np.zeros(num_experts, dtype=np.int32)
        zero = demand_crc(demand_E)
        words_EB = np.zeros((num_experts, BITS), dtype=np.uint32)
        bits = demand_E.view(np.uint32)
        for expert in range(num_experts):
            for bit in range(BITS):
                bits[expert] = 1 << bit
                words_EB[expert, bit] = demand_crc(demand_E) ^ zero
            bits[expert] = 0
        return cls(signed(zero), words_EB.view(np.int32))

    def crc(self, demand_E: I32) -> int:
        """``demand_crc`` by the table."""
        set_EB = (demand_E[:, None] >> np.arange(BITS, dtype=np.int32)) & 1
        return (self.zero ^ int(np.bitwise_xor.reduce(np.where(set_EB, self.words_EB, 0), axis=None))) & 0xFFFFFFFF


def signed(word: int) -> int:
    """A 32-bit word as the int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
