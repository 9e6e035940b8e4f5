"""Hypothesis strategies: where experts live, what is routed, and plans over it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from afore.core.slots import StoreLayout

Vector = npt.NDArray[np.int32]
Arguments = tuple[Vector, Vector, Vector, int, int, int]


@dataclass(frozen=True)
class Case:
    """Gathered ids, and a plan's shares over N workers."""

    ids_TK: Vector
    shares_X4: Vector
    layouts_N: list[StoreLayout]

    @property
    def num_experts(self) -> int:
        return int(self.layouts_N[0].row_E.shape[0])

    def arguments(self, rank: int) -> Arguments:
        """What ``partition`` takes for that worker, up to ``out``."""
        layout = self.layouts_N[rank]
        return (
            self.ids_TK,
            self.shares_X4,
            layout.row_E,
            rank,
            layout.num_rows,
            len(layout.primary_experts),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any E, N (also E < N), R, K, T (also 0) and any placement; counts from 0 to well beyond the true demand."""
    num_experts = draw(st.integers(1, 12))
    num_workers = draw(st.integers(1, 6))
    num_slots = draw(st.integers(0, 4))
    choices = draw(st.integers(1, min(4, num_experts)))
    tokens = draw(st.integers(0, 12))
    rows = [draw(st.permutations(range(num_experts)))[:choices] for _ in range(tokens)]
    ids_TK = np.array(rows, dtype=np.int32).reshape(tokens, choices)
    primaries = draw(st.lists(st.integers(0, num_workers - 1), min_size=num_experts, max_size=num_experts))
    primaries_E = np.array(primaries, dtype=np.int32)
    shares = []
    for worker in range(num_workers):
        foreign = [expert for expert in range(num_experts) if primaries_E[expert] != worker]
        bound = draw(st.lists(st.sampled_from(foreign), unique=True, max_size=num_slots)) if foreign else []
        slots = draw(st.permutations(range(num_slots)))
        for expert, slot in zip(bound, slots, strict=False):
            shares.append((expert, worker, slot, draw(st.integers(0, tokens + 3))))
    shares_X4 = np.array(sorted(shares), dtype=np.int32).reshape(-1, 4)
    return Case(ids_TK, shares_X4, [StoreLayout(primaries_E, rank, num_slots) for rank in range(num_workers)])
