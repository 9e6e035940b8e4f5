"""The validator accepts every plan of the planner (see also ``test_planner_reference``) and rejects every mutated one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from afore.core.errors import PlanError
from afore.scheduler.costs import Costs
from afore.scheduler.plan import Plan, PlannerConfig
from afore.scheduler.planner import Planner
from afore.scheduler.validate import validate
from tests.scheduler.plan_cases import speeds


@dataclass(frozen=True)
class Case:
    """A plan with everything that the validator compares it with."""

    plan: Plan
    demand_E: NDArray[np.int64]
    before_NR: NDArray[np.int32]
    primaries_E: NDArray[np.int32]
    config: PlannerConfig
    protected_NR: NDArray[np.bool_]

    def check(self, plan: Plan) -> None:
        validate(plan, self.demand_E, self.before_NR, self.primaries_E, self.config, self.protected_NR)


def build_cases() -> list[Case]:
    """Plans over carried state with replicas, copies and partial tiles."""
    cases = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        N = int(rng.integers(2, 6))
        E = int(rng.integers(3, 10))
        config = PlannerConfig(
            num_experts=E,
            num_workers=N,
            slots_per_worker=rng.integers(0, 3, N),
            tile_tokens=int(rng.choice([1, 4, 8])),
            copy_budget=int(rng.integers(1, 6)),
            compactness=int(rng.choice([0, 0, 1])),
            compactness_share=float(rng.choice([0.0, 0.0, 0.05])),
            worker_speed=speeds(rng, N),
        )
        primaries_E = rng.integers(0, N, E).astype(np.int32)
        planner = Planner(config, primaries_E)
        for _ in range(3):
            heat_E = np.exp(rng.normal(size=E) * 2) * (rng.random(E) < 0.9) + 0.01
            demand_E = rng.multinomial(int(rng.integers(40, 400)), heat_E / heat_E.sum())
            before_NR = planner.slots_NR
            protected_NR = rng.random(before_NR.shape) < 0.2
            plan = planner.plan(demand_E, protected_NR, Costs(tile_us=3.7, copy_us=1.3, window_us=2.0))
            cases.append(Case(plan, demand_E, before_NR, primaries_E, config, protected_NR))
    return cases


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return build_cases()


@pytest.mark.slow
def test_plans_are_accepted(cases: list[Case]) -> None:
    assert sum(bool(case.plan.copies) for case in cases) > 40
    assert sum(bool(case.plan.shares()) for case in cases) > 80
    for case in cases:
        case.check(case.plan)


# Mutations: each gives the changed plan, or None where the plan has nothing to change


def with_assign(plan: Plan, e: int, w: int, change: int) -> Plan:
    assign_EN = plan.assign_EN.copy()
    assign_EN[e, w] += change
    return replace(plan, assign_EN=assign_EN)


def with_slot(plan: Plan, at: Sequence[int], value: int) -> Plan:
    slots_NR = plan.slots_NR.copy()
    slots_NR[tuple(at)] = value
    return replace(plan, slots_NR=slots_NR)


def one_pair_more(case: Case) -> Plan | None:
    e = int(case.demand_E.argmax())
    return with_assign(case.plan, e, int(case.primaries_E[e]), 1)


def one_pair_less(case: Case) -> Plan | None:
    e, w = np.argwhere(case.plan.assign_EN > 0)[0].tolist()
    return with_assign(case.plan, e, w, -1)


def pair_moved_to_another_replica(case: Case) -> Plan | None:
    for e, w, _r, _count in case.plan.shares():
        return with_assign(with_assign(case.plan, e, w, -1), e, int(case.primaries_E[e]), 1)
    return None


def pair_moved_with_its_share(case: Case) -> Plan | None:
    """Consistent in itself: only the rule of one partial tile, at its place, speaks against it."""
    if case.config.tile_tokens == 1:
        return None
    for index, (e, w, _r, _count) in enumerate(case.plan.shares()):
        home = int(case.primaries_E[e])
        if case.plan.assign_EN[e, home] == 0:
            continue
        shares_X4 = case.plan.shares_X4.copy()
        shares_X4[index, 3] -= 1
        moved = with_assign(with_assign(case.plan, e, w, -1), e, home, 1)
        return replace(moved, shares_X4=shares_X4)
    return None


def work_without_a_replica(case: Case) -> Plan | None:
    plan = case.plan
    for e, home in enumerate(case.primaries_E.tolist()):
        count = int(plan.assign_EN[e, home])
        for w in range(case.config.num_workers):
            if count and w != home and e not in plan.slots_NR[w]:
                return with_assign(with_assign(plan, e, w, count), e, home, -count)
    return None


def negative_count(case: Case) -> Plan | None:
    e, w = np.argwhere(case.plan.assign_EN == 0)[0].tolist() if (case.plan.assign_EN == 0).any() else (0, 0)
    home = int(case.primaries_E[e])
    return with_assign(with_assign(case.plan, e, w, -3), e, home, 3) if home != w else None


def slot_emptied(case: Case) -> Plan | None:
    held = np.argwhere(case.plan.slots_NR >= 0).tolist()
    return with_slot(case.plan, held[0], -1) if held else None


def slot_rebound_without_a_copy(case: Case) -> Plan | None:
    for w, r in np.argwhere(case.plan.slots_NR == -1).tolist():
        absent = set(range(case.config.num_experts)) - set(np.flatnonzero(case.primaries_E == w).tolist())
        absent -= set(case.plan.slots_NR[w].tolist())
        if absent:
            return with_slot(case.plan, (w, r), min(absent))
    return None


def unknown_expert(case: Case) -> Plan | None:
    held = np.argwhere(case.plan.slots_NR >= 0).tolist()
    return with_slot(case.plan, held[0], case.config.num_experts) if held else None


def replica_beside_its_primary(case: Case) -> Plan | None:
    for e, w, r in case.plan.copies:
        own = np.flatnonzero(case.primaries_E == w)
        if own.size:
            copies = [(int(own[0]), w, r) if copy == (e, w, r) else copy for copy in case.plan.copies]
            return replace(with_slot(case.plan, (w, r), int(own[0])), copies=copies)
    return None


def missing_slot_appears(case: Case) -> Plan | None:
    missing = np.argwhere(case.plan.slots_NR == -2).tolist()
    return with_slot(case.plan, missing[0], -1) if missing else None


def slot_disappears(case: Case) -> Plan | None:
    empty = np.argwhere(case.plan.slots_NR == -1).tolist()
    return with_slot(case.plan, empty[0], -2) if empty else None


def copy_dropped(case: Case) -> Plan | None:
    return replace(case.plan, copies=case.plan.copies[:-1]) if case.plan.copies else None


def copy_twice(case: Case) -> Plan | None:
    return replace(case.plan, copies=[*case.plan.copies, case.plan.copies[0]]) if case.plan.copies else None


def copy_of_another_expert(case: Case) -> Plan | None:
    if not case.plan.copies:
        return None
    e, w, r = case.plan.copies[0]
    return replace(case.plan, copies=[((e + 1) % case.config.num_experts, w, r), *case.plan.copies[1:]])


def copy_to_another_slot(case: Case) -> Plan | None:
    if not case.plan.copies:
        return None
    e, w, r = case.plan.copies[0]
    return replace(case.plan, copies=[(e, w, r + 1), *case.plan.copies[1:]])


def copy_to_no_worker(case: Case) -> Plan | None:
    if not case.plan.copies:
        return None
    e, _w, r = case.plan.copies[0]
    return replace(case.plan, copies=[(e, -1, r), *case.plan.copies[1:]])


def copy_of_what_is_there(case: Case) -> Plan | None:
    copied = {(w, r) for _e, w, r in case.plan.copies}
    for w, r in np.argwhere(case.plan.slots_NR >= 0).tolist():
        if (w, r) not in copied:
            return replace(case.plan, copies=[*case.plan.copies, (int(case.plan.slots_NR[w, r]), w, r)])
    return None


def share_dropped(case: Case) -> Plan | None:
    return replace(case.plan, shares_X4=case.plan.shares_X4[1:]) if len(case.plan.shares_X4) else None


def share_one_more(case: Case) -> Plan | None:
    shares_X4 = case.plan.shares_X4.copy()
    shares_X4[:1, 3] += 1
    return replace(case.plan, shares_X4=shares_X4) if len(shares_X4) else None


def share_of_another_slot(case: Case) -> Plan | None:
    shares_X4 = case.plan.shares_X4.copy()
    shares_X4[:1, 2] += 1
    return replace(case.plan, shares_X4=shares_X4) if len(shares_X4) else None


def shares_out_of_order(case: Case) -> Plan | None:
    return replace(case.plan, shares_X4=case.plan.shares_X4[::-1]) if len(case.plan.shares_X4) > 1 else None


def used_slot_forgotten(case: Case) -> Plan | None:
    used = np.argwhere(case.plan.used_NR)
    if not len(used):
        return None
    used_NR = case.plan.used_NR.copy()
    used_NR[tuple(used[0])] = False
    return replace(case.plan, used_NR=used_NR)


def idle_slot_marked(case: Case) -> Plan | None:
    idle = np.argwhere(~case.plan.used_NR)
    if not len(idle):
        return None
    used_NR = case.plan.used_NR.copy()
    used_NR[tuple(idle[0])] = True
    return replace(case.plan, used_NR=used_NR)


def wrong_max(case: Case) -> Plan | None:
    return replace(case.plan, max_tiles=case.plan.max_tiles - 1)


def wrong_bound(case: Case) -> Plan | None:
    return replace(case.plan, bound_tiles=case.plan.bound_tiles + 1)


def wrong_base(case: Case) -> Plan | None:
    return replace(case.plan, base_max_tiles=case.plan.base_max_tiles + 1)


def wrong_within(case: Case) -> Plan | None:
    return replace(case.plan, within_max_tiles=case.plan.within_max_tiles + 1)


def wrong_gain(case: Case) -> Plan | None:
    return replace(case.plan, gain_us=float(np.nextafter(case.plan.gain_us, np.inf)))


def wrong_unit(case: Case) -> Plan | None:
    return replace(case.plan, load_unit=case.plan.load_unit + 1)


def loads_counted_in_tiles(case: Case) -> Plan | None:
    """As if all workers were equally fast."""
    tiles_N = (-(-case.plan.assign_EN // case.config.tile_tokens)).sum(axis=0)
    most = int(tiles_N.max())
    return replace(case.plan, max_tiles=most) if most != case.plan.max_tiles else None


def copies_without_gain(case: Case) -> Plan | None:
    plan = replace(case.plan, within_max_tiles=case.plan.max_tiles, costs=Costs(tile_us=3.7, copy_us=0, window_us=0))
    return replace(plan, gain_us=0.0) if plan.copies else None


def reason_beside_copies(case: Case) -> Plan | None:
    return replace(case.plan, skipped="for no reason") if case.plan.copies else None


def transposed_counts(case: Case) -> Plan | None:
    E, N = case.plan.assign_EN.shape
    return replace(case.plan, assign_EN=case.plan.assign_EN.T) if E != N else None


def counts_as_floats(case: Case) -> Plan | None:
    return replace(case.plan, assign_EN=case.plan.assign_EN.astype(np.float64))


MUTATIONS: tuple[Callable[[Case], Plan | None], ...] = (
    one_pair_more, one_pair_less, pair_moved_to_another_replica, pair_moved_with_its_share, work_without_a_replica,
    negative_count, slot_emptied, slot_rebound_without_a_copy, unknown_expert, replica_beside_its_primary,
    missing_slot_appears, slot_disappears, copy_dropped, copy_twice, copy_of_another_expert, copy_to_another_slot,
    copy_to_no_worker, copy_of_what_is_there, share_dropped, share_one_more, share_of_another_slot, shares_out_of_order,
    used_slot_forgotten, idle_slot_marked, wrong_max, wrong_bound, wrong_base, wrong_within, wrong_gain, wrong_unit,
    loads_counted_in_tiles,
    copies_without_gain, reason_beside_copies, transposed_counts, counts_as_floats,
)  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutated_plans_are_rejected(cases: list[Case], mutation: Callable[[Case], Plan | None]) -> None:
    mutated = 0
    for case in cases:
        plan = mutation(case)
        if plan is not None:
            mutated += 1
            with pytest.raises(PlanError):
                case.check(plan)
    assert mutated >= 10


@pytest.mark.slow
def test_a_plan_is_rejected_on_other_ground(cases: list[Case]) -> None:
    """The same plan against a smaller budget, a protected slot, a split threshold, or another demand."""
    split = 0
    for case in cases:
        plan, config = case.plan, case.config
        if plan.copies:
            e, w, r = plan.copies[0]
            fewer = replace(config, copy_budget=len(plan.copies) - 1)
            with pytest.raises(PlanError, match="budget"):
                validate(plan, case.demand_E, case.before_NR, case.primaries_E, fewer)
            protected_NR = np.zeros_like(case.protected_NR)
            protected_NR[w, r] = True
            with pytest.raises(PlanError, match="protected"):
                validate(plan, case.demand_E, case.before_NR, case.primaries_E, config, protected_NR)
            with pytest.raises(PlanError, match=f"already holds expert {e}"):
                validate(plan, case.demand_E, plan.slots_NR, case.primaries_E, config)
        if plan.shares():
            with pytest.raises(PlanError, match="compactness"):
                validate(plan, case.demand_E, case.before_NR, case.primaries_E, replace(config, compactness=400))
            tiles_E = -(-case.demand_E // config.tile_tokens)
            if any(tiles_E[e] <= tiles_E.sum() // config.num_workers for e, *_ in plan.shares()):
                split += 1
                grown = replace(config, compactness_share=1.0)
                with pytest.raises(PlanError, match="compactness"):
                    validate(plan, case.demand_E, case.before_NR, case.primaries_E, grown)
        with pytest.raises(PlanError, match="demand"):
            validate(plan, case.demand_E + 1, case.before_NR, case.primaries_E, config)
    assert split > 10
