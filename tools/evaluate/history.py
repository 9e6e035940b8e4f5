"""EPLB in a run of some twenty steps: it rebalances before what is measured, and must not do so again within it.

A rebalancing stops all microbatches and copies. Published intervals are thousands of steps: one that falls into the few steps that
are measured would cost EPLB a large part of what it gains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afore.core.config import RunConfig
from afore.core.errors import ConfigError

if TYPE_CHECKING:
    from afore.tools.evaluate.cell import Cell

_LEAST, _SETTLE = 5, 2


def least_warm(steps: int) -> int:
    """Fewest warm steps after which EPLB has rebalanced once, as ``world`` has it, and does not again in ``steps`` more."""
    return steps + _LEAST


def warm_for(steps: int) -> int:
    """Warm steps for so many measured ones: microbatches that a rebalancing stopped then come apart before anything is measured."""
    return least_warm(steps) + _SETTLE


def check_rebalancing(cell: Cell, config: RunConfig) -> None:
    """Raises ``ConfigError`` for a cell of EPLB whose second rebalancing would fall into what is measured, or whose first."""
    if not cell.policy.startswith("eplb") or cell.arrivals:
        return
    interval, passes = config.policy_options.eplb.interval_steps, cell.microbatches
    # The step that is planned when the last measured one ends; a step is a forward pass of each microbatch.
    last = cell.warm + cell.steps + 2
    if interval > passes * cell.warm or 2 * interval <= passes * last:
        raise ConfigError(
            "--warm",
            f"after {cell.warm} steps {cell.policy} would rebalance within the {cell.steps} that are measured",
            f"give {least_warm(cell.steps)} or more for {cell.steps} steps, better {warm_for(cell.steps)}",
        )
