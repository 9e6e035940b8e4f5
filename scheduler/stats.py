"""What a run has done so far: imbalance from plans, migration from the workers' feedback, counters for what went otherwise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from afore.core.control import PlanSeen
from afore.core.demand import DemandVector
from afore.core.metrics import ImbalanceStats, MigrationStats, shared_assignment, tile_loads, token_loads
from afore.core.plan import PlanEntry
from afore.core.slots import PrimariesVector

SKIPPED_NO_GAIN = "no move lowers the most loaded worker"


class RunStats:
    """Accumulates over one epoch's targets. All of them are decode targets: prefill runs on its own workers."""

    def __init__(self, *, num_layers: int, num_workers: int, tile_tokens: int, primaries_E: PrimariesVector) -> None:
        self._num_workers = num_workers
        self._tile_tokens = tile_tokens
        self._primaries_E = primaries_E
        self.imbalance = ImbalanceStats([primaries_E] * num_layers, num_workers, tile_tokens)
        self.migration = MigrationStats()
        self.counters: Counter[str] = Counter()
        """targets, pairs, replica_pairs, aborts, refusals, primaries_only, plan_errors, feedback_lost."""

    def planned(self, entry: PlanEntry, demand_E: DemandVector, *, skipped: str) -> PlanSeen:
        """Counts a published target; returns it in the form that watchers see."""
        assign_EN = shared_assignment(demand_E, entry.shares, self._primaries_E, self._num_workers)
        before_EN = shared_assignment(demand_E, (), self._primaries_E, self._num_workers)
        one = self.imbalance.add(entry.target.layer, demand_E, assign_EN)
        self.counters["targets"] += 1
        self.counters["pairs"] += int(demand_E.sum())
        if not entry.copies:
            self.counters[f"no_copies: {skipped}"] += 1
        tiles_before = int(tile_loads(before_EN, self._tile_tokens).max())
        tiles_after = int(tile_loads(assign_EN, self._tile_tokens).max())
        tiles = int(np.sum(-(-demand_E // self._tile_tokens)))
        return PlanSeen(
            sequence=entry.sequence,
            layer=entry.target.layer,
            microbatch=entry.target.microbatch,
            step=entry.target.step,
            tokens=sum(entry.tokens_A),
            copies=tuple((copy.expert, copy.worker, copy.slot) for copy in entry.copies),
            replicas=len(entry.shares),
            max_tiles_before=tiles_before,
            max_tiles_after=tiles_after,
            bound_tiles=-(-tiles // self._num_workers),
            token_imbalance_before=one.token_before if one else _ratio(before_EN, self._num_workers),
            token_imbalance_after=one.token_after if one else _ratio(assign_EN, self._num_workers),
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


def _ratio(assign_EN: np.ndarray[Any, np.dtype[np.int64]], num_workers: int) -> float:
    loads_N = token_loads(assign_EN)
    total = int(loads_N.sum())
    return float(loads_N.max()) * num_workers / total if total else 1.0
