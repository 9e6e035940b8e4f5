"""Whether a plan keeps every rule that its readers rely on: the slots they trust, the counts they partition by.

Letters: E experts, N workers, R redundant slots of the worker that has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import PlanError
from afore.core.slots import EMPTY
from afore.core.speeds import least_load
from afore.scheduler.costs import exposed_us
from afore.scheduler.plan import Plan, PlannerConfig

Integers = NDArray[np.integer[Any]]


def validate(
    plan: Plan,
    demand_E: Integers,
    before_slots_NR: Integers,
    primaries: Integers | Sequence[int],
    config: PlannerConfig,
    protected: NDArray[np.bool_] | None = None,
) -> None:
    """Accepts a plan for ``demand_E`` made on the slot table ``before_slots_NR``, or raises ``PlanError`` with the rule it breaks.

    It does not ask whether the plan is a good one: any placement and assignment within the rules passes (paper eq. 1, 2, 4, 6, 8;
    at most one partial tile per expert, §5.2), so that hand-made plans can be checked too.
    """
    primaries_E = config.check_primaries(primaries)
    demand_E, before_NR = np.asarray(demand_E), np.asarray(before_slots_NR)
    exists_NR = config.empty_slots() == EMPTY
    assert demand_E.shape == (config.num_experts,)
    assert before_NR.shape == exists_NR.shape
    _check_shapes(plan, config, exists_NR.shape)
    _check_slots(plan, primaries_E, config, exists_NR)
    _check_copies(plan, before_NR, config, protected)
    tiles_EN = _check_assignment(plan, demand_E, primaries_E, config)
    _check_shares(plan, primaries_E)
    _check_figures(plan, tiles_EN, primaries_E, config)


def _require(holds: bool | np.bool_, rule: str) -> None:
    if not holds:
        raise PlanError(f"plan: {rule}")


def _check_shapes(plan: Plan, config: PlannerConfig, shape_NR: tuple[int, ...]) -> None:
    E, N = config.num_experts, config.num_workers
    for name, array, shape in (
        ("assign_EN", plan.assign_EN, (E, N)),
        ("slots_NR", plan.slots_NR, shape_NR),
        ("used_NR", plan.used_NR, shape_NR),
    ):
        _require(array.shape == shape, f"{name} has shape {array.shape}, not {shape}")
        kind = "b" if name == "used_NR" else "i"
        _require(array.dtype.kind == kind, f"{name} has dtype {array.dtype}")


def _check_slots(
    plan: Plan, primaries_E: NDArray[np.int32], config: PlannerConfig, exists_NR: NDArray[np.bool_]
) -> None:
    slots_NR, E = plan.slots_NR, config.num_experts
    _require(np.array_equal(slots_NR >= EMPTY, exists_NR), "slots_NR names a slot that does not exist, or hides one")
    _require(bool((slots_NR < config.num_experts).all()), "slots_NR names an expert that does not exist")
    workers, slots = np.nonzero(slots_NR >= 0)
    redundant = workers * E + slots_NR[workers, slots]
    primary = primaries_E.astype(np.int64) * E + np.arange(E)
    twice = np.flatnonzero(np.bincount(np.concatenate((redundant, primary))) > 1)
    worker, expert = divmod(int(twice[0]), E) if twice.size else (-1, -1)
    _require(twice.size == 0, f"worker {worker} holds expert {expert} twice")


def _check_copies(plan: Plan, before_NR: Integers, config: PlannerConfig, protected: NDArray[np.bool_] | None) -> None:
    _require(len(plan.copies) <= config.budget, f"{len(plan.copies)} copies exceed the budget of {config.budget}")
    N, R = plan.slots_NR.shape
    copied_NR = np.zeros((N, R), np.bool_)
    for e, w, r in plan.copies:
        _require(0 <= w < N and 0 <= r < R, f"a copy goes to slot {r} of worker {w}, which does not exist")
        _require(not copied_NR[w, r], f"slot {r} of worker {w} is copied to twice")
        _require(plan.slots_NR[w, r] == e, f"slot {r} of worker {w} is filled with expert {e} but not bound to it")
        _require(before_NR[w, r] != e, f"slot {r} of worker {w} already holds expert {e}")
        copied_NR[w, r] = True
    changed_NR = plan.slots_NR != before_NR
    _require(np.array_equal(changed_NR, copied_NR), "a slot changes its expert without a copy")
    if protected is not None:
        _require(not (copied_NR & protected).any(), "a copy goes to a protected slot")


def _check_assignment(
    plan: Plan, demand_E: Integers, primaries_E: NDArray[np.int32], config: PlannerConfig
) -> NDArray[np.int64]:
    """Checks the counts; returns tiles [E, N]."""
    E, N, M = config.num_experts, config.num_workers, config.tile_tokens
    assign_EN = plan.assign_EN.astype(np.int64)
    _require(bool((assign_EN >= 0).all()), "assign_EN has a negative count")
    wrong = np.flatnonzero(assign_EN.sum(axis=1) != demand_E)
    _require(wrong.size == 0, f"assign_EN does not add up to the demand of expert {wrong[0] if wrong.size else -1}")
    held_EN = np.zeros((E, N), np.bool_)
    held_EN[np.arange(E), primaries_E] = True
    workers, slots = np.nonzero(plan.slots_NR >= 0)
    held_EN[plan.slots_NR[workers, slots], workers] = True
    _require(not (assign_EN[~held_EN] > 0).any(), "assign_EN gives work to a worker without a replica")
    demand, primaries = demand_E.tolist(), primaries_E.tolist()
    theta = config.threshold(sum(-(-d // M) for d in demand))
    for e, (counts, home) in enumerate(zip(assign_EN.tolist(), primaries, strict=True)):
        working = [w for w, count in enumerate(counts) if count]
        if not working:
            continue
        partial = [w for w in working if counts[w] % M]
        _require(len(partial) <= 1, f"expert {e} has {len(partial)} partially filled tiles")
        due = home if counts[home] else working[-1]
        _require(not partial or partial[0] == due, f"the partial tile of expert {e} is not worker {due}'s")
        if -(-demand[e] // M) <= theta:
            _require(counts[home] == demand[e], f"expert {e} is split below the compactness threshold")
    tiles_EN: NDArray[np.int64] = -(-assign_EN // M)
    return tiles_EN


def _check_shares(plan: Plan, primaries_E: NDArray[np.int32]) -> None:
    expected = []
    used_NR = np.zeros(plan.slots_NR.shape, np.bool_)
    for w, r in np.argwhere(plan.slots_NR >= 0).tolist():
        e = int(plan.slots_NR[w, r])
        if plan.assign_EN[e, w] > 0:
            expected.append((e, w, r, int(plan.assign_EN[e, w])))
            used_NR[w, r] = True
    _require(
        plan.shares() == sorted(expected), "shares() differ from assign_EN's redundant replicas, by expert then rank"
    )
    for _e, w, r in plan.copies:
        used_NR[w, r] = True
    _require(np.array_equal(plan.used_NR, used_NR), "used_NR is not the slots with work or newly bound")


def _check_figures(
    plan: Plan, tiles_EN: NDArray[np.int64], primaries_E: NDArray[np.int32], config: PlannerConfig
) -> None:
    costs_N = config.costs_N
    base_N = np.bincount(primaries_E, weights=tiles_EN.sum(axis=1), minlength=len(costs_N)) * costs_N
    for name, value, true in (
        ("max_tiles", plan.max_tiles, int((tiles_EN.sum(axis=0) * costs_N).max())),
        ("bound_tiles", plan.bound_tiles, least_load(int(tiles_EN.sum()), costs_N)),
        ("base_max_tiles", plan.base_max_tiles, int(base_N.max())),
        ("load_unit", plan.load_unit, min(costs_N)),
    ):
        _require(value == true, f"{name} is {true}, not {value}")
    if not plan.copies:
        _require(plan.within_max_tiles == plan.max_tiles, "within_max_tiles differs from max_tiles without copies")
        _require(plan.gain_us == 0, "gain_us is not 0 without copies")
        return
    load_us = plan.costs.tile_us / plan.load_unit
    exposed = exposed_us(plan.copies, primaries_E, plan.costs)
    gain_us = load_us * plan.within_max_tiles - load_us * plan.max_tiles - exposed
    _require(plan.gain_us == gain_us, f"gain_us is {gain_us}, not {plan.gain_us}")
    _require(plan.gain_us > 0, "copies without a gain")
    _require(not plan.skipped, "copies, and a reason for none")
