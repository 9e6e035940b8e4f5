"""What a run has done so far: imbalance from plans, migration from the workers' feedback, counters for what went otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from afore.core.control import PlanSeen
from afore.core.demand import DemandVector
from afore.core.metrics import ImbalanceStats, Loads, MigrationStats
from afore.core.plan import PlanEntry
from afore.core.slots import PrimariesVector
from afore.core.speeds import even_workers
from afore.scheduler.loads import LoadMeter

SKIPPED_NO_GAIN = "no move lowers the most loaded worker"


class RunStats:
    """Accumulates over one epoch's targets. All of them are decode targets: prefill runs on its own workers.

    ``costs_N``: what a tile costs on each worker (``afore.core.speeds``); none: all are equally fast.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_workers: int,
        tile_tokens: int,
        primaries_E: PrimariesVector,
        costs_N: Sequence[int] | None = None,
    ) -> None:
        costs_N = costs_N or (1,) * num_workers
        self._load_unit = min(costs_N)
        self._even_workers = even_workers(costs_N)
        self._meter = LoadMeter(primaries_E, num_workers, tile_tokens, costs_N)
        self.imbalance = ImbalanceStats([primaries_E] * num_layers, num_workers, tile_tokens, costs_N)
        self.migration = MigrationStats()
        self.counters: Counter[str] = Counter()
        """targets, pairs, replica_pairs, aborts, refusals, primaries_only, plan_errors, feedback_lost."""

    def planned(self, entry: PlanEntry, demand_E: DemandVector, *, skipped: str) -> Loads:
        """Counts a published target."""
        loads = self._meter.loads(demand_E, entry.shares)
        self.counted(entry.target.layer, loads, skipped="" if entry.copies else skipped)
        return loads

    def counted(self, layer: int, loads: Loads, *, skipped: str) -> None:
        """Counts a published target whose loads are known; ``skipped`` says why it has no copies, empty if it has."""
        self.imbalance.add_loads(layer, loads)
        self.counters["targets"] += 1
        self.counters["pairs"] += loads.pairs
        if skipped:
            self.counters[f"no_copies: {skipped}"] += 1

    def seen(self, entry: PlanEntry, loads: Loads, *, skipped: str) -> PlanSeen:
        """A published target in the form that watchers see."""
        one = loads.imbalance(self._even_workers)
        return PlanSeen(
            sequence=entry.sequence,
            layer=entry.target.layer,
            microbatch=entry.target.microbatch,
            step=entry.target.step,
            tokens=sum(entry.tokens_A),
            copies=tuple((copy.expert, copy.worker, copy.slot) for copy in entry.copies),
            replicas=len(entry.shares),
            max_tiles_before=loads.max_tiles_before,
            max_tiles_after=loads.max_tiles_after,
            bound_tiles=loads.bound_tiles,
            load_unit=self._load_unit,
            token_imbalance_before=one.token_before if one else 1.0,
            token_imbalance_after=one.token_after if one else 1.0,
            skipped="" if entry.copies else skipped,
        )

    def to_json(self) -> dict[str, Any]:
        """``imbalance`` and ``migration`` as in ``--json``, ``layers`` and ``counters``."""
        return {
            "imbalance": self.imbalance.to_json(),
            "migration": self.migration.to_json(),
            "layers": self.imbalance.layers_to_json(),
            "counters": dict(sorted(self.counters.items())),
        }
