"""``libra``: replicas fetched for the next layer's predicted demand, then tokens moved over them by true demand.

Sees: the next layer's gate applied to this layer's hidden states, by which copies are chosen; true demand, by which pairs are.
Copies start: at once, a layer ahead of their target. They are not kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.core.policy_options import LibraOptions
from afore.core.target import Target
from afore.scheduler.plan import Copy
from afore.scheduler.policies.base import Action, Copies, Demand, PolicyContext, Predictor
from afore.scheduler.policies.slotted import Replicas, Slotted

AHEAD = "libra: its copies went ahead of it"
NOT_PREDICTED = "libra: nothing was predicted for it"


class Libra(Slotted):
    """R is the total: each target fills its part of it, so that those in the making never wait for one another's slots."""

    name: str = "libra"
    wants_predictions: Predictor | None = "next-gate"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.options: LibraOptions = context.options.libra
        parts = max(self.options.buffers, context.num_microbatches)
        slots_N = context.planner.slots_N
        self._part_N = np.minimum(slots_N, np.maximum(1, slots_N // parts))

    def on_prediction(self, target: Target, predicted_E: Demand, now_us: float) -> list[Action]:
        copies, replicas = self._choose(target.layer, np.asarray(predicted_E, np.int64))
        self.place(target, replicas)
        return [Copies(target.layer, tuple(copies))] if copies else []

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        replicas = self.placed(target)
        if replicas is None:
            return [self.assign(target, {}, NOT_PREDICTED)]
        pairs_EN = redistribute(np.asarray(demand_E, np.int64), self._primaries_E, replicas, self._N)
        counts = {(e, w): (slot, int(pairs_EN[e, w])) for (e, w), slot in replicas.items()}
        return [self.assign(target, counts, AHEAD)]

    def _choose(self, layer: int, predicted_E: NDArray[np.int64]) -> tuple[list[Copy], dict[tuple[int, int], int]]:
        """Hottest expert of the most loaded worker → least loaded worker that may take it, as if its tokens moved there."""
        slots = self._slots_L[layer]
        pairs_EN, load_N, mean = _on_primaries(predicted_E, self._primaries_E, self._N)
        open_NR = slots.safe_NR()
        room_N = self._part_N.copy()
        copies: list[Copy] = []
        replicas: dict[tuple[int, int], int] = {}
        stuck_N = np.zeros(self._N, np.bool_)
        while int(np.where(stuck_N, 0, load_N).max()) > mean:
            source = int(np.where(stuck_N, 0, load_N).argmax())
            placed = False
            for expert in np.argsort(-pairs_EN[:, source], kind="stable").tolist():
                if pairs_EN[expert, source] == 0:
                    break
                eligible_N = (room_N > 0) & (load_N < mean)
                eligible_N[self._primaries_E[expert]] = False
                eligible_N[[w for e, w in replicas if e == expert]] = False
                for worker in np.argsort(np.where(eligible_N, load_N, np.iinfo(np.int64).max), kind="stable").tolist():
                    if not eligible_N[worker]:
                        break
                    slot = slots.find(expert, worker) if self.options.reuse else -1
                    if slot < 0:
                        slot = slots.choose(worker, open_NR)
                        if slot < 0:
                            continue
                        copies.append((expert, worker, slot))
                        slots.bind(copies[-1:])
                    open_NR[worker, slot] = False
                    room_N[worker] -= 1
                    replicas[expert, worker] = slot
                    _move(pairs_EN, load_N, expert, source, worker, mean)
                    placed = True
                    break
                if placed:
                    break
            stuck_N[source] = not placed
        return copies, replicas


def redistribute(
    demand_E: NDArray[np.int64], primaries_E: NDArray[np.int32], replicas: Replicas, num_workers: int
) -> NDArray[np.int64]:
    """Pairs [E, N]: while a worker exceeds the mean (rounded up), its hottest replicated expert gives min(excess, spare) to the
    lightest worker that holds it. An expert none of whose holders has room is passed over for the next hottest."""
    pairs_EN, load_N, mean = _on_primaries(demand_E, primaries_E, num_workers)
    holders: dict[int, list[int]] = {}
    for e, w in sorted(replicas):
        holders.setdefault(e, [int(primaries_E[e])]).append(w)
    replicated = np.array(sorted(holders), np.int64)
    stuck_N = np.zeros(num_workers, np.bool_)
    while int(np.where(stuck_N, 0, load_N).max()) > mean:
        source = int(np.where(stuck_N, 0, load_N).argmax())
        stuck_N[source] = True
        for expert in replicated[np.argsort(-pairs_EN[replicated, source], kind="stable")].tolist():
            if pairs_EN[expert, source] == 0:
                break
            lightest = min((w for w in holders[expert] if w != source), key=lambda w: (int(load_N[w]), w))
            if load_N[lightest] < mean:
                _move(pairs_EN, load_N, expert, source, lightest, mean)
                stuck_N[source] = False
                break
    return pairs_EN


def _on_primaries(
    demand_E: NDArray[np.int64], primaries_E: NDArray[np.int32], num_workers: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """(pairs [E, N], loads [N], mean rounded up)."""
    pairs_EN = np.zeros((len(demand_E), num_workers), np.int64)
    pairs_EN[np.arange(len(demand_E)), primaries_E] = demand_E
    return pairs_EN, pairs_EN.sum(axis=0), -(-int(demand_E.sum()) // num_workers)


def _move(
    pairs_EN: NDArray[np.int64], load_N: NDArray[np.int64], expert: int, source: int, destination: int, mean: int
) -> None:
    """As many as the source has too many, the destination has room for, and the expert has here."""
    count = min(int(load_N[source]) - mean, mean - int(load_N[destination]), int(pairs_EN[expert, source]))
    pairs_EN[expert, source] -= count
    pairs_EN[expert, destination] += count
    load_N[source] -= count
    load_N[destination] += count
