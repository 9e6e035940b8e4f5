"""Why Algorithm 1 planned as it did: the literal reference, watched step by step.

``ExplainingPlanner`` is ``ReferencePlanner`` with eyes: it changes nothing, so what it tells is what the compiled core does, which
equals the reference bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.scheduler.core_layout import parts_of
from afore.scheduler.costs import Costs, exposed_us
from afore.scheduler.plan import Copy, Plan, PlannerConfig
from afore.scheduler.planner import Planner
from afore.scheduler.reference import ReferencePlanner, _Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Tiles of an expert from one worker to another, over a replica that was there, or over one that this step copies."""

    expert: int
    source: int
    destination: int
    tiles: int
    slot: int = -1
    """Slot that the copy fills; -1: the replica was there."""
    replaced: int = EMPTY
    """Expert that the slot held; -1: it was empty."""
    max_before: int
    """Load of the most loaded worker before and after."""
    max_after: int
    saved_us: float = 0.0
    """Compute that all copies so far save against none (eq. 8's first term)."""
    exposed_us: float = 0.0
    """Copy time that shows (eq. 7)."""
    kept: bool = True
    """Whether it is in the plan; copies after the candidate of the greatest net gain are not."""

    @property
    def net_us(self) -> float:
        """Net gain of all copies so far (eq. 8)."""
        return self.saved_us - self.exposed_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One plan and the way to it. Loads are by worker [N], in the plan's unit (``Plan.load_unit``): tiles at equal speeds."""

    plan: Plan
    tiles_E: list[int]
    costs_N: tuple[int, ...]
    """What a tile adds to each worker's load."""
    base_N: list[int]
    """Everything on primaries."""
    start_N: list[int]
    """After stage 1: the carried proportions."""
    within_N: list[int]
    """After stage 2: moves over replicas that were there."""
    final_N: list[int]
    moves: list[Move]
    """Stage 2, in order."""
    copies: list[Move]
    """Stage 3, in order, those not kept included."""
    rejected: list[str]
    """What was not done, and why."""


@dataclass
class _Seen:
    """What a plan in the making has shown."""

    start_N: list[int] = field(default_factory=list)
    moves: list[tuple[int, int, int, int]] = field(default_factory=list)
    within_maxima: list[int] = field(default_factory=list)
    within_N: list[int] = field(default_factory=list)
    beyond: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    beyond_maxima: list[int] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)


class ExplainingPlanner(ReferencePlanner):
    """The reference, and an ``Explanation`` of its last plan."""

    def __init__(self, config: PlannerConfig, primaries: NDArray[np.integer[Any]] | Sequence[int]) -> None:
        self._seen = _Seen()
        super().__init__(config, primaries)

    def continue_from(self, planner: Planner, last: Plan | None) -> None:
        """Takes the compiled planner's state: slots, ages, and its last plan's assignment (None: it has planned nothing)."""
        parts = parts_of.py_func(planner.buffer)
        self.adopt(planner.slots_NR)
        if last is not None:
            self._assigned = last.assign_EN.tolist()
        self._now = int(parts.age.max(initial=0)) + 1
        self._last_used = (self._now - parts.age.reshape(self._N, -1)).tolist()

    def explain(
        self, demand_E: NDArray[np.integer[Any]], protected: NDArray[np.bool_] | None, costs: Costs
    ) -> Explanation:
        """Plans the next target, as ``plan``, and tells how."""
        self._seen = seen = _Seen()
        plan = self.plan(demand_E, protected, costs)
        M = self._config.tile_tokens
        loads_N = (-(-plan.assign_EN.astype(np.int64) // M)).sum(axis=0) * self._cost
        base_N = [0] * self._N
        tiles_E = [-(-int(d) // M) for d in demand_E]
        for e, k in enumerate(tiles_E):
            base_N[self._primaries[e]] += k * self._cost[self._primaries[e]]
        moves = [
            Move(expert=e, source=h, destination=c, tiles=q, max_before=before, max_after=after)
            for (e, h, c, q), before, after in zip(seen.moves, seen.within_maxima, seen.within_maxima[1:], strict=False)
        ]
        copies = self._copies(plan, costs)
        return Explanation(
            plan=plan,
            tiles_E=tiles_E,
            costs_N=self._cost,
            base_N=base_N,
            start_N=seen.start_N,
            within_N=seen.within_N,
            final_N=loads_N.tolist(),
            moves=moves,
            copies=copies,
            rejected=self._rejections(plan, copies),
        )

    # Eyes: each looks, and answers what the reference answers

    def _initialize(self, demand: list[int]) -> list[list[int]]:
        tiles = super()._initialize(demand)
        self._seen.start_N = self._loads(tiles)
        return tiles

    def _find_within(self, now: _Candidate) -> tuple[int, int, int, int] | None:
        found = super()._find_within(now)
        loads = now.loads.copy()
        self._seen.within_maxima.append(max(loads))
        if found is None:
            self._seen.within_N = loads
        else:
            self._seen.moves.append(found)
        return found

    def _find_beyond(self, now: _Candidate, unsafe: list[list[bool]]) -> tuple[int, int, int, int, int] | None:
        found = super()._find_beyond(now, unsafe)
        loads = now.loads
        self._seen.beyond_maxima.append(max(loads))
        self._look_at_refusals(now, unsafe, loads, found)
        if found is not None:
            self._seen.beyond.append(found)
            self._seen.replaced.append(now.slots[found[2]][found[3]])
        return found

    def _look_at_refusals(
        self,
        now: _Candidate,
        unsafe: list[list[bool]],
        loads: list[int],
        found: tuple[int, int, int, int, int] | None,
    ) -> None:
        """Pairs that came before the one found, and what spoke against each."""
        for h in sorted(range(self._N), key=lambda w: (-loads[w], w)):
            for c in sorted(range(self._N), key=lambda w: (loads[w], w)):
                if found is not None and (h, c) == (found[1], found[2]):
                    return
                if self._tiles_to_even(loads[h], loads[c], self._cost[h], self._cost[c]) == 0:
                    continue
                if self._safe_slot(now, c, unsafe) is None:
                    self._seen.refusals[f"ffn-{c} takes no copy: {self._why_unsafe(now, c, unsafe)}"] += 1
                else:
                    self._seen.refusals[
                        f"ffn-{h} has nothing for ffn-{c}: its experts are there already, or would move at most "
                        f"{self._theta} tiles"
                    ] += 1

    def _why_unsafe(self, now: _Candidate, c: int, unsafe: list[list[bool]]) -> str:
        reasons: Counter[str] = Counter()
        bound_here = {r for _e, w, r in now.copies if w == c}
        for r, e in enumerate(now.slots[c]):
            if e == NO_SUCH_SLOT:
                continue
            if unsafe[c][r]:
                reasons["protected by plans in flight"] += 1
            elif r in bound_here:
                reasons["filled by this plan"] += 1
            else:
                reasons["with work in this plan"] += 1
        return (
            ", ".join(f"{n} {'slot' if n == 1 else 'slots'} {why}" for why, n in reasons.items()) or "it has no slots"
        )

    # What was seen, in order

    def _copies(self, plan: Plan, costs: Costs) -> list[Move]:
        seen = self._seen
        within_max, load_us = max(seen.within_N), costs.tile_us / plan.load_unit
        # The last maximum is missing where the budget ended the search: nothing was looked for any more.
        maxima = seen.beyond_maxima
        loads = list(seen.within_N)
        made: list[Copy] = []
        moves = []
        for i, ((e, h, c, r, q), replaced) in enumerate(zip(seen.beyond, seen.replaced, strict=True)):
            loads[h] -= q * self._cost[h]
            loads[c] += q * self._cost[c]
            made.append((e, c, r))
            after = max(loads)
            moves.append(
                Move(
                    expert=e,
                    source=h,
                    destination=c,
                    tiles=q,
                    slot=r,
                    replaced=replaced,
                    max_before=maxima[i],
                    max_after=after,
                    saved_us=load_us * within_max - load_us * after,
                    exposed_us=exposed_us(made, self._primaries, costs),
                    kept=len(made) <= len(plan.copies),
                )
            )
        return moves

    def _rejections(self, plan: Plan, copies: list[Move]) -> list[str]:
        rejected = []
        dropped = [copy for copy in copies if not copy.kept]
        if dropped:
            best = max(copy.net_us for copy in dropped)
            kept = f"the {len(plan.copies)} kept gain {plan.gain_us:.1f} µs" if plan.copies else "not above 0"
            rejected.append(
                f"{len(dropped)} more copies were tried and taken back: the best net gain with them is {best:.1f} µs, {kept}"
            )
        if plan.max_tiles > plan.bound_tiles and len(copies) == self._config.budget:
            rejected.append(f"further copies: the budget of {self._config.budget} is used up")
        if plan.skipped:
            rejected.append(f"copies: {plan.skipped}")
        if plan.max_tiles > plan.bound_tiles or not plan.copies:
            rejected.extend(reason for reason, _times in self._seen.refusals.most_common(8))
        return rejected
