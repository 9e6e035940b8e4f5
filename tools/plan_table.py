"""The paper's Table 2 on the pinned workload: how often a planner's most loaded worker is as light as any plan could make it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from afore.core.slots import contiguous_primaries
from afore.scheduler.costs import Costs
from afore.scheduler.optimum import optimum
from afore.scheduler.plan import PlannerConfig, ProtectedWindow
from afore.scheduler.planner import Planner
from afore.scheduler.plus_planner import PlusPlanner
from afore.tools.plan_workload import EXPERTS, TILE_TOKENS, Workload

PLANNERS = {"afore": Planner, "afore-plus": PlusPlanner}
HIDDEN = Costs(tile_us=20.0, copy_us=0.0, window_us=0.0)
"""Every copy hides: only tiles decide, as they do for the optimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One planner at one EP and R over all targets. Each planner carries its own slots, so each has optima of its own."""

    policy: str
    ep: int
    slots: int
    targets: int
    optimal: int
    """Targets whose maximum is proven the least possible."""
    open: int
    """Targets whose optimum the solver left open; they count against its lower bound."""
    mean_gap_percent: float
    """Mean of maximum / optimum - 1 over all targets."""
    max_gap_percent: float
    at_bound: int
    """Targets whose maximum is ⌈tiles/N⌉."""
    bound_gap_percent: float
    """Mean of maximum / ⌈tiles/N⌉ - 1: what no copies of any kind would leave."""
    copies: float
    """Expert copies a target, mean."""
    solve_s: float
    """Seconds in the solver, all targets."""


def rows(
    workload: Workload,
    *,
    eps: Sequence[int],
    slots: Sequence[int],
    policies: Sequence[str],
    in_flight: int,
    time_limit_s: float,
) -> Iterator[Row]:
    """One row after the other, by R, EP and policy. Raises ``HostError`` where a solver is needed and not installed."""
    for R in slots:
        for ep in eps:
            for policy in policies:
                yield _row(workload, policy, ep, R, in_flight, time_limit_s)


def _row(workload: Workload, policy: str, ep: int, slots: int, in_flight: int, time_limit_s: float) -> Row:
    config = PlannerConfig(num_experts=EXPERTS, num_workers=ep, slots_per_worker=slots, tile_tokens=TILE_TOKENS)
    planner = PLANNERS[policy](config, contiguous_primaries(EXPERTS, ep))
    window = ProtectedWindow(in_flight)
    gaps, bound_gaps = [], []
    optimal = left_open = at_bound = copies = 0
    solve_s = 0.0
    for demand_E in workload.demands_XE:
        before_NR, protected_NR = planner.slots_NR, window.protected()
        plan = planner.plan(demand_E, protected_NR, HIDDEN)
        window.push(plan.used_NR)
        best = optimum(
            config,
            planner.primaries_E,
            demand_E,
            before_NR,
            protected=protected_NR,
            plan=plan,
            time_limit_s=time_limit_s,
        )
        least = best.best_tiles if best.state == "optimal" else best.lower_tiles
        gaps.append(plan.max_tiles / least - 1 if least else 0.0)
        bound_gaps.append(plan.max_tiles / plan.bound_tiles - 1 if plan.bound_tiles else 0.0)
        optimal += plan.max_tiles == least
        left_open += best.state == "open"
        at_bound += plan.max_tiles == plan.bound_tiles
        copies += len(plan.copies)
        solve_s += best.solve_s
    targets = len(workload.demands_XE)
    return Row(
        policy=policy,
        ep=ep,
        slots=slots,
        targets=targets,
        optimal=optimal,
        open=left_open,
        mean_gap_percent=100 * float(np.mean(gaps)),
        max_gap_percent=100 * float(np.max(gaps)),
        at_bound=at_bound,
        bound_gap_percent=100 * float(np.mean(bound_gaps)),
        copies=copies / targets,
        solve_s=solve_s,
    )


def table_of(found: Sequence[Row]) -> Table:
    """The rows as a table."""
    table = Table("R", "EP", "policy")
    for heading in ("optimal", "open", "mean gap", "max gap", "at bound", "gap to bound", "copies"):
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(
            str(row.slots),
            str(row.ep),
            row.policy,
            f"{row.optimal} / {row.targets}",
            str(row.open),
            f"{row.mean_gap_percent:.2f} %",
            f"{row.max_gap_percent:.2f} %",
            str(row.at_bound),
            f"{row.bound_gap_percent:.2f} %",
            f"{row.copies:.1f}",
        )
    return table


def as_dict(row: Row) -> dict[str, object]:
    """The row for JSON."""
    return dataclasses.asdict(row)
