"""What a policy is: pure (no I/O, ``now_us`` passed in), driven by events, answering with actions.

A policy of your own is a class with these methods, built with one ``PolicyContext`` and named as ``--policy package.module:Class``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import PolicyOptions
from afore.core.record import record
from afore.core.target import Target
from afore.scheduler.costs import Costs
from afore.scheduler.plan import Copy, Plan, PlannerConfig

CopyTime = Literal["now", "arrival"]
Predictor = Literal["transitions", "next-gate"]
"""What attention workers predict the next layer's demand with: how often expert e of a layer was followed by each expert of the
next, or the next layer's gate on this layer's hidden states."""
Demand = NDArray[np.integer[Any]]


@record
class Copies:
    """Fill redundant slots of a layer from the experts' primaries."""

    layer: int
    """MoE ordinal."""
    copies: tuple[Copy, ...]
    """(expert, worker, slot)."""
    start: CopyTime = "now"
    """As soon as the entry is read and the slot is safe, or only when the target is about to execute."""


@record
class Assign:
    """Where a target's pairs run. Every target gets exactly one; copies it needs stand before it in the same answer."""

    target: Target
    shares: tuple[tuple[int, int, int, int], ...]
    """(expert, worker, slot, count) of redundant replicas, by expert, then worker; the primary runs the rest. Counts above the
    true demand are clipped in rank order by the workers."""
    plan: Plan | None = None
    """The plan behind it, for records; none when all runs on primaries by rule."""
    costs: Costs | None = None
    """The estimates the plan was made with."""
    skipped: str = ""
    """Why no copies go with it; empty if some do."""


Action = Copies | Assign


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What a policy is built with."""

    planner: PlannerConfig
    """Sizes (E, N, R, M_tile) and Algorithm 1's knobs; the same for every layer."""
    primaries_E: NDArray[np.int32]
    """Rank of each expert's fixed primary; the same for every layer."""
    num_layers: int
    """L."""
    num_microbatches: int
    """M."""
    costs: Callable[[int], Costs]
    """The layer's estimates now."""
    experts_per_token: int = 1
    """K."""
    options: PolicyOptions = field(default_factory=PolicyOptions)
    """What the baselines leave open."""


class Policy(Protocol):
    """Called by the scheduler, one event at a time, in the order in which targets will execute."""

    name: str
    """As given to ``--policy``."""
    wants_inputs: bool
    """Whether workers shall report when a target's inputs have come (``on_inputs``)."""

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        """The target's true demand [E] is complete. Without an ``Assign`` here, one must come from ``on_inputs``."""
        ...

    def on_prediction(self, target: Target, predicted_E: Demand, now_us: float) -> list[Action]:
        """Attention workers predict the target's demand [E], ahead of it; only copies may be answered. It may not come at all."""
        ...

    def on_inputs(self, target: Target, now_us: float) -> list[Action]:
        """The target's inputs have reached the FFN workers."""
        ...

    def on_step_end(self, microbatch: int, step: int, now_us: float) -> list[Action]:
        """The step's last layer has been assigned."""
        ...

    def reset_layer(self, layer: int) -> None:
        """A plan of the layer was refused: no redundant replica of it can be relied on any more."""
        ...


def policy_options(policy: object) -> dict[str, Any]:
    """What the policy decides with, as printed with its results: the fields of its ``options``, where that is a dataclass."""
    options = getattr(policy, "options", None)
    return dataclasses.asdict(options) if dataclasses.is_dataclass(options) and not isinstance(options, type) else {}


class Quiet:
    """Answers nothing to any event; policies override what they need."""

    wants_inputs: bool = False
    wants_predictions: Predictor | None = None
    """Whether attention workers shall predict (``on_prediction``), and how; a class without it wants none."""

    def on_prediction(self, target: Target, predicted_E: Demand, now_us: float) -> list[Action]:
        return []

    def on_inputs(self, target: Target, now_us: float) -> list[Action]:
        return []

    def on_step_end(self, microbatch: int, step: int, now_us: float) -> list[Action]:
        return []

    def reset_layer(self, layer: int) -> None:
        return None
