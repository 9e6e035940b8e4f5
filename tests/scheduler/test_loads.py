"""The compiled loads of a target equal the plain ones for any demand and any shares in the order of ring entries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.metrics import shared_loads
from afore.core.plan import Share
from afore.scheduler.loads import LoadMeter

E, N = 6, 3


@settings(deadline=None)
@given(
    demand=st.lists(st.integers(0, 40), min_size=E, max_size=E),
    primaries=st.lists(st.integers(0, N - 1), min_size=E, max_size=E),
    counts=st.dictionaries(st.tuples(st.integers(0, E - 1), st.integers(0, N - 1)), st.integers(1, 50)),
    tile_tokens=st.integers(1, 9),
    costs_N=st.none() | st.tuples(*[st.integers(1, 5)] * N),
)
def test_loads_equal_the_plain_ones(
    demand: list[int],
    primaries: list[int],
    counts: dict[tuple[int, int], int],
    tile_tokens: int,
    costs_N: tuple[int, ...] | None,
) -> None:
    demand_E, primaries_E = np.array(demand, np.int32), np.array(primaries, np.int32)
    shares = [
        Share(expert, worker, 0, count, 1)
        for (expert, worker), count in sorted(counts.items())
        if worker != primaries[expert]
    ]
    meter = LoadMeter(primaries_E, N, tile_tokens, costs_N)
    for _ in range(2):  # its scratch starts anew
        plain = shared_loads(demand_E, shares, primaries_E, N, tile_tokens, costs_N)
        assert meter.loads(demand_E, shares) == plain
