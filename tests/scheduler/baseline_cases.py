"""Small worlds for the baselines' tests: a context of a few experts, and what an answer says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import PolicyOptions
from afore.core.slots import contiguous_primaries
from afore.scheduler.costs import Costs
from afore.scheduler.plan import Copy, PlannerConfig
from afore.scheduler.policies.base import Action, Assign, Copies, PolicyContext


def context(
    *,
    experts: int = 4,
    workers: int = 2,
    slots: int | Sequence[int] = 2,
    layers: int = 1,
    microbatches: int = 1,
    tile: int = 1,
    top_k: int = 1,
    costs: Costs | None = None,
    options: PolicyOptions | None = None,
) -> PolicyContext:
    """Experts spread evenly: ⌊e·N/E⌋."""
    seed = costs or Costs(tile_us=20.0, copy_us=20.0, window_us=1000.0)
    return PolicyContext(
        planner=PlannerConfig(num_experts=experts, num_workers=workers, slots_per_worker=slots, tile_tokens=tile),
        primaries_E=contiguous_primaries(experts, workers),
        num_layers=layers,
        num_microbatches=microbatches,
        costs=lambda layer: seed,
        experts_per_token=top_k,
        options=options or PolicyOptions(),
    )


def counts(*pairs: int) -> NDArray[np.int32]:
    """A demand [E]."""
    return np.array(pairs, np.int32)


def copied(actions: Sequence[Action]) -> list[Copy]:
    """All copies of an answer."""
    return [copy for action in actions if isinstance(action, Copies) for copy in action.copies]


def starts(actions: Sequence[Action]) -> set[str]:
    """When they begin."""
    return {action.start for action in actions if isinstance(action, Copies)}


def assigned(actions: Sequence[Action]) -> Assign:
    """The one assignment of an answer, which ends it."""
    assigns = [action for action in actions if isinstance(action, Assign)]
    assert len(assigns) == 1
    assert actions[-1] is assigns[0]
    return assigns[0]
