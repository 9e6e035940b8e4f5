"""A policy of your own in a cluster of real processes, FFN workers with different numbers of slots, and spans as they happen.

    python docs/examples/custom_policy.py
    PYTHONPATH=docs/examples python -m afore.launch --demo --policy custom_policy:RelieveBusiest

A policy is a class that answers events with actions. It runs in the scheduler's process, so it is named by module and class.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from afore import Cluster, Topology
from afore.cluster import complete_all
from afore.core.target import Target
from afore.models.bundle import bundled_prompts
from afore.scheduler.policies.base import Action, Assign, Copies, Demand, PolicyContext, Quiet

NOTHING_TO_MOVE = "no move would even the loads out"
ALREADY_THERE = "the replica is there already"


class RelieveBusiest(Quiet):
    """The hottest expert of the most loaded worker also runs on the lightest one, as far as that evens the two out."""

    name = "relieve-busiest"

    def __init__(self, context: PolicyContext) -> None:
        self._primaries_E = context.primaries_E
        self._slots_N = context.planner.slots_N
        self._bound_L: list[dict[tuple[int, int], int]] = [{} for _ in range(context.num_layers)]
        """(worker, slot) → expert: what the slots hold once all published copies have landed."""
        self._next_slot_N = np.zeros_like(self._slots_N)

    def on_demand(self, target: Target, demand_E: Demand, now_us: float) -> list[Action]:
        load_N = np.bincount(self._primaries_E, weights=demand_E, minlength=len(self._slots_N))
        busiest = int(load_N.argmax())
        lightest = int(np.where(self._slots_N > 0, load_N, np.inf).argmin())
        expert = int(np.where(self._primaries_E == busiest, demand_E, -1).argmax())
        count = int(min(demand_E[expert], (load_N[busiest] - load_N[lightest]) // 2))
        if self._slots_N[lightest] == 0 or count == 0:
            return [Assign(target, (), skipped=NOTHING_TO_MOVE)]
        bound = self._bound_L[target.layer]
        for (worker, slot), there in bound.items():
            if (worker, there) == (lightest, expert):
                return [Assign(target, ((expert, lightest, slot, count),), skipped=ALREADY_THERE)]
        slot = int(self._next_slot_N[lightest])
        self._next_slot_N[lightest] = (slot + 1) % self._slots_N[lightest]
        bound[lightest, slot] = expert
        return [Copies(target.layer, ((expert, lightest, slot),)), Assign(target, ((expert, lightest, slot, count),))]

    def reset_layer(self, layer: int) -> None:
        self._bound_L[layer].clear()


async def main() -> None:
    topology = Topology(attention=1, ffn=3, redundant_slots_per_worker=(4, 2, 0))
    async with Cluster.start(topology, policy="custom_policy:RelieveBusiest") as cluster:
        spans: Counter[tuple[str, str]] = Counter()
        watching = asyncio.create_task(count_spans(cluster, spans))
        prompts = [prompt.prompt for prompt in bundled_prompts()[:8]]
        answers = await complete_all(cluster, prompts, max_new_tokens=16)
        while not spans["ffn-0", "experts"]:  # spans are sent a few times a second
            await cluster.clock.sleep_us(10_000)
        watching.cancel()
        stats = await cluster.stats()
    for process in sorted({process for process, _ in spans}):
        counts = ", ".join(f"{name} {count}" for (where, name), count in sorted(spans.items()) if where == process)
        print(f"{process:<12} {counts}")
    token, counters = stats["imbalance"]["token"], stats["counters"]
    print(f"policy {stats['policy']}: {sum(map(len, answers))} tokens, {stats['migration']['copies']} expert copies")
    print(f"token imbalance: {token['before']:.2f} before, {token['after']:.2f} after")
    print(f"pairs on replicas: {counters['replica_pairs']} of {counters['pairs']}")


async def count_spans(cluster: Cluster, spans: Counter[tuple[str, str]]) -> None:
    """Counts what every role does, by process and name of the span."""
    async for span in cluster.spans():
        if span.kind == "span":
            spans[span.process, span.name] += 1


if __name__ == "__main__":
    asyncio.run(main())
