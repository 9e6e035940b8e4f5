"""What the planner carries for the largest model it is meant for stays small."""

from __future__ import annotations

import tracemalloc

import pytest

from afore.core.slots import contiguous_primaries
from afore.scheduler.bindings import CellBindings
from afore.scheduler.core_layout import buffer_words
from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.planner import compile_planner
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.base import PolicyContext

L, E, N, R, M = 92, 256, 128, 8, 3
MOST_BYTES = 64 * 10**6


@pytest.mark.slow
def test_92_layers_of_256_experts_on_128_workers_fit_64_megabytes() -> None:
    """All that the policy, its windows and the bindings allocate, and that it is the buffers that make it up."""
    compile_planner()
    config = PlannerConfig(num_experts=E, num_workers=N, slots_per_worker=R)
    costs = Costs(tile_us=20.0, copy_us=100.0, window_us=1000.0)
    tracemalloc.start()
    try:
        policy = Afore(
            PolicyContext(
                planner=config,
                primaries_E=contiguous_primaries(E, N),
                num_layers=L,
                num_microbatches=M,
                costs=lambda layer: costs,
            )
        )
        layers = policy.compiled_layers()
        cells = CellBindings(L, N, R)
        allocated, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert layers is not None
    assert len(layers) == len(cells.cells_L) == L
    buffers = sum(layer.buffer.nbytes + layer.window.nbytes for layer in layers) + sum(c.nbytes for c in cells.cells_L)
    assert buffers == L * (4 * buffer_words(E, N, R, N) + M * N * R + 2 * 8 * N * R)
    assert buffers < allocated < MOST_BYTES
