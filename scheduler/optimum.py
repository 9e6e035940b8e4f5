"""The certified optimum: the least possible maximum load under the constraints that Algorithm 1 plans under.

Fixed primaries, the replicas there are, at most B copies, only slots that exist and are not protected may be rebound, a rebound
slot's old replica is gone, tiles are whole, an expert of at most θ tiles stays on its primary. Costs play no part; worker speeds
do: a load is tiles times the worker's tile cost, in the unit of the plan's figures. Where a given
plan meets a simple lower bound (``least_load``, or ``optimum_bound``) there is nothing to solve; otherwise OR-tools' CP-SAT
decides, or says honestly that it did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.core.speeds import least_load
from afore.scheduler.optimum_bound import least_by_reach
from afore.scheduler.optimum_model import Search
from afore.scheduler.plan import Copy, Plan, PlannerConfig

Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """What is known about the least maximum load of one target."""

    state: Literal["optimal", "open"]
    """``optimal``: ``best_tiles`` is proven the least. ``open``: time was up first; the least is in lower_tiles … best_tiles."""
    lower_tiles: int
    """No plan can have a maximum below this."""
    best_tiles: int
    """The least maximum found."""
    tiles_EN: NDArray[np.int64]
    """Tiles of expert e on worker w that reach ``best_tiles``."""
    slots_NR: NDArray[np.int32]
    """The slot table they need."""
    copies: list[Copy]
    """Its copies: (expert, worker, slot)."""
    solve_s: float
    """Seconds in the solver; 0 where the bound was met without it."""


def optimum(
    config: PlannerConfig,
    primaries: Integers | Sequence[int],
    demand_E: Integers,
    before_slots_NR: Integers,
    *,
    protected: NDArray[np.bool_] | None = None,
    plan: Plan | None = None,
    time_limit_s: float = 10.0,
) -> Optimum:
    """The least maximum load for ``demand_E`` [E] on the slot table before the plan [N, R]; ``plan`` is the warm start.

    Raises ``HostError`` where a solver is needed and OR-tools is not installed.
    """
    primaries_E = config.check_primaries(primaries)
    before_NR = np.asarray(before_slots_NR, np.int32)
    tiles_E = -(-np.asarray(demand_E, np.int64) // config.tile_tokens)
    costs_N, theta = config.costs_N, config.threshold(int(tiles_E.sum()))
    if plan is not None and plan.max_tiles == least_load(int(tiles_E.sum()), costs_N):
        return _from_plan(plan, config.tile_tokens)
    safe_NR = before_NR != NO_SUCH_SLOT
    if protected is not None:
        safe_NR &= ~protected
    clean_NR = _without_doubles(before_NR, primaries_E)
    bound = least_by_reach(
        tiles_E=tiles_E,
        primaries_E=primaries_E,
        slots_NR=clean_NR,
        safe_NR=safe_NR,
        budget=config.budget,
        compactness=theta,
        costs_N=costs_N,
    )
    if plan is not None and plan.max_tiles == bound:
        return _from_plan(plan, config.tile_tokens)
    search = Search(
        tiles_E=tiles_E,
        primaries_E=primaries_E,
        slots_NR=clean_NR,
        safe_NR=safe_NR,
        budget=config.budget,
        compactness=theta,
        costs_N=costs_N,
    )
    if plan is not None:
        search.start_from(-(-plan.assign_EN.astype(np.int64) // config.tile_tokens), plan.slots_NR)
    state, lower, tiles_EN, wanted_EN, solve_s = search.solve(bound, time_limit_s)
    best = int((tiles_EN.sum(axis=0) * costs_N).max())
    slots_NR, copies = _bind(before_NR, safe_NR, wanted_EN, primaries_E)
    return Optimum(
        state="optimal" if state or lower == best else "open",
        lower_tiles=best if state else lower,
        best_tiles=best,
        tiles_EN=tiles_EN,
        slots_NR=slots_NR,
        copies=copies,
        solve_s=solve_s,
    )


def _from_plan(plan: Plan, tile_tokens: int) -> Optimum:
    return Optimum(
        state="optimal",
        lower_tiles=plan.max_tiles,
        best_tiles=plan.max_tiles,
        tiles_EN=-(-plan.assign_EN.astype(np.int64) // tile_tokens),
        slots_NR=plan.slots_NR,
        copies=list(plan.copies),
        solve_s=0.0,
    )


def _without_doubles(slots_NR: NDArray[np.int32], primaries_E: NDArray[np.int32]) -> NDArray[np.int32]:
    """A replica where its expert already is could serve nothing more: an empty slot, as in ``Planner.adopt``."""
    clean_NR = slots_NR.copy()
    for w, row in enumerate(slots_NR.tolist()):
        for r, e in enumerate(row):
            if e >= 0 and (primaries_E[e] == w or e in row[:r]):
                clean_NR[w, r] = EMPTY
    return clean_NR


def _bind(
    before_NR: NDArray[np.int32],
    safe_NR: NDArray[np.bool_],
    wanted_EN: NDArray[np.bool_],
    primaries_E: NDArray[np.int32],
) -> tuple[NDArray[np.int32], list[Copy]]:
    """Gives each wanted replica a slot: where it is already, else a safe one whose own replica is not wanted."""
    slots_NR = before_NR.copy()
    copies: list[Copy] = []
    for w in range(slots_NR.shape[0]):
        wanted = set(np.flatnonzero(wanted_EN[:, w] & (primaries_E != w)).tolist())
        here: set[int] = set()
        free = []
        for r, e in enumerate(before_NR[w].tolist()):
            if e in wanted and e not in here:
                here.add(e)
            elif safe_NR[w, r]:
                free.append(r)
        free.sort(key=lambda r: before_NR[w, r] >= 0)
        for e, r in zip(sorted(wanted - here), free, strict=False):
            slots_NR[w, r] = e
            copies.append((e, w, r))
    return slots_NR, copies
