"""Plans for tests: at random, as cruel as the rules of the ring allow, and by the real planner."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from afore.core.plan import CopyStart
from afore.core.slots import contiguous_primaries
from afore.scheduler.costs import Costs
from afore.scheduler.plan import PlannerConfig, ProtectedWindow
from afore.scheduler.planner import Planner
from tests.workers.ffn_parts import Shape

Shares = list[tuple[int, int, int, int]]
Copies = list[tuple[int, int, int]]
Answer = tuple[Shares, Copies, CopyStart]


class NoPlans:
    """Everything on primaries."""

    def reset(self, layer: int) -> None:
        pass

    def plan(self, layer: int, demand_E: npt.NDArray[np.int32]) -> Answer:
        return [], [], CopyStart.NOW


class RandomPlans:
    """Any slot may be filled anew at any time, also one that earlier plans still use: the workers must cope."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._random = random.Random(seed)
        self._primaries = contiguous_primaries(shape.experts, shape.ffn)
        self._places = [(worker, slot) for worker in range(shape.ffn) for slot in range(shape.slots_N[worker])]
        self._bound: list[dict[tuple[int, int], int]] = [{} for _ in range(shape.layers)]

    def reset(self, layer: int) -> None:
        self._bound[layer].clear()

    def plan(self, layer: int, demand_E: npt.NDArray[np.int32]) -> Answer:
        """Fills each slot anew with chance 0.4; gives every replica a random part of the demand, or a bit too much."""
        bound, chance = self._bound[layer], self._random
        copies: Copies = []
        for worker, slot in self._places:
            if chance.random() < 0.4:
                there = {e for (w, s), e in bound.items() if w == worker and s != slot}
                there |= {int(e) for e in np.flatnonzero(self._primaries == worker)}
                wanted = [e for e in range(demand_E.size) if demand_E[e] and e not in there]
                if wanted:
                    bound[worker, slot] = chance.choice(wanted)
                    copies.append((bound[worker, slot], worker, slot))
        shares: Shares = []
        for (worker, slot), expert in bound.items():
            if demand_E[expert] and chance.random() < 0.8:
                shares.append((expert, worker, slot, chance.randint(1, int(demand_E[expert]) + 1)))
        start = CopyStart.ARRIVAL if chance.random() < 0.2 else CopyStart.NOW
        return sorted(shares), copies, start


class PlannerPlans:
    """Algorithm 1 with its protected slots, at costs that make copies worth while."""

    def __init__(self, shape: Shape, start: CopyStart = CopyStart.NOW) -> None:
        config = PlannerConfig(
            num_experts=shape.experts,
            num_workers=shape.ffn,
            slots_per_worker=shape.slots_N,
            tile_tokens=1,
            copy_budget=shape.config().copy_budget,
        )
        primaries_E = contiguous_primaries(shape.experts, shape.ffn)
        self._planners = [Planner(config, primaries_E) for _ in range(shape.layers)]
        self._windows = [ProtectedWindow(shape.microbatches - 1) for _ in range(shape.layers)]
        self._costs = Costs(tile_us=100.0, copy_us=1.0, window_us=1000.0)
        self._start = start

    def reset(self, layer: int) -> None:
        self._planners[layer].reset()

    def plan(self, layer: int, demand_E: npt.NDArray[np.int32]) -> Answer:
        window = self._windows[layer]
        plan = self._planners[layer].plan(demand_E, protected=window.protected(), costs=self._costs)
        window.push(plan.used_NR)
        return plan.shares(), plan.copies, self._start
