"""``--warm_start``: replicas before the first target, placed for what a trace demanded.

EPLB's replicate and pack, primaries fixed, over the trace's counts of each layer. The copies go ahead of the first target, through
the ring as any other copies: an answer never depends on them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.scheduler.eplb import redundant_layout
from afore.scheduler.plan import Copy, PlannerConfig
from afore.scheduler.traces.imports import counts_of

LayerCopies = list[tuple[int, tuple[Copy, ...]]]
"""(layer, copies) of the layers that get some."""


def warm_copies(file: str, config: PlannerConfig, primaries_E: NDArray[np.int32], num_layers: int) -> LayerCopies:
    """What to copy before the first target. Raises ``ConfigError`` for a file that is no trace, or of another model."""
    counts_LE = counts_of(Path(file))
    if counts_LE.shape != (num_layers, config.num_experts):
        raise ConfigError(
            "warm_start",
            f"{file} has {counts_LE.shape[0]} layers of {counts_LE.shape[1]} experts, the model {num_layers} of"
            f" {config.num_experts}",
            "give a trace of this model",
        )
    found: LayerCopies = []
    for layer, load_E in enumerate(counts_LE):
        if not load_E.any():
            continue
        held_N = redundant_layout(load_E, primaries_E, config.slots_N)
        copies = tuple((e, w, slot) for w, held in enumerate(held_N) for slot, e in enumerate(held))
        if copies:
            found.append((layer, copies))
    return found


def filled(config: PlannerConfig, copies: tuple[Copy, ...]) -> NDArray[np.int32]:
    """The slot table [N, R] once these copies have landed in empty slots."""
    slots_NR = config.empty_slots()
    for e, w, r in copies:
        slots_NR[w, r] = e
    return slots_NR
