"""Algorithm 1 (paper §5.2), literally and slowly: what the compiled core must equal bit for bit.

Where the text leaves a choice, this is the one taken here:
1. Carried proportions are token proportions, rounded to k_e tiles by largest remainder; ties to the primary, then by rank.
2. "Without a preceding assignment" is read per expert: no previous plan, or no previous demand → all on the primary.
3. Pairs: h by decreasing load, then c by increasing load, ties by rank, ranked anew after every move; h is any worker with work.
4. Beyond the placement c needs a safe slot: empty first (lowest index), else the least recently used whose replica has no work
   in the tentative N_t (ties: lowest index); never one in U_t, never one already bound in this phase.
5. A slot is used when it has work in the selected plan, or is bound by it.
6. Rebinding a slot ends the old replica; copies are listed per slot.
7. Copies leave from the primary: M(Δ) = copy_us × the most copies at any one source or destination port.
8. Only a strictly greater gain replaces the candidate: of equals, the one with fewer copies stays.
9. At most one partial tile per expert: the primary's if it has a tile, else the last replica's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.scheduler.costs import Costs, exposed_us
from afore.scheduler.plan import Copy, Plan, PlannerConfig, build_plan, why_no_copies


@dataclass
class _Candidate:
    """(P, N_t, C_t, Δ_t); P is the fixed primaries and whatever the slot table names."""

    tiles: list[list[int]]
    slots: list[list[int]]
    copies: list[Copy]


class ReferencePlanner:
    """The same interface as ``Planner``, without its checks."""

    def __init__(self, config: PlannerConfig, primaries: NDArray[np.integer[Any]] | Sequence[int]) -> None:
        self._config = config
        self._primaries = [int(w) for w in primaries]
        self._E, self._N, self._M = config.num_experts, config.num_workers, config.tile_tokens
        self._theta = config.compactness
        self.reset()

    def reset(self) -> None:
        self.adopt(self._config.empty_slots())

    def adopt(self, slots_NR: NDArray[np.integer[Any]]) -> None:
        self._slots: list[list[int]] = [[EMPTY if x >= 0 else int(x) for x in row] for row in slots_NR]
        for w in range(self._N):
            for r, e in enumerate(slots_NR[w]):
                if e >= 0 and w not in self._replicas(self._slots, int(e)):
                    self._slots[w][r] = int(e)
        self._last_used = [[0] * len(row) for row in self._slots]
        self._assigned: list[list[int]] | None = None
        self._now = 0

    def plan(
        self, demand_E: NDArray[np.integer[Any]], protected: NDArray[np.bool_] | None = None, costs: Costs | None = None
    ) -> Plan:
        assert costs is not None
        demand = [int(d) for d in demand_E]
        unsafe = [[False] * len(row) for row in self._slots] if protected is None else protected.tolist()
        self._now += 1

        # Stage 1: assignment initialization
        now = _Candidate(self._initialize(demand), copy.deepcopy(self._slots), [])

        # Stage 2: rebalancing within the placement
        while (found := self._find_within(now)) is not None:
            e, h, c, q = found
            now.tiles[e][h] -= q
            now.tiles[e][c] += q

        # Stage 3: rebalancing beyond the placement
        within_max = max(self._loads(now.tiles))
        before_us = costs.tile_us * within_max
        best_gain_us = 0.0
        selected = copy.deepcopy(now)
        tried = 0
        while tried < self._config.budget and (beyond := self._find_beyond(now, unsafe)) is not None:
            e, h, c, r, q = beyond
            now.slots[c][r] = e
            now.copies.append((e, c, r))
            tried += 1
            now.tiles[e][h] -= q
            now.tiles[e][c] += q
            exposed = exposed_us(now.copies, self._primaries, costs)
            gain_us = before_us - costs.tile_us * max(self._loads(now.tiles)) - exposed
            if gain_us > best_gain_us:
                selected = copy.deepcopy(now)
                best_gain_us = gain_us

        # The selected candidate becomes counts, and the state of the next call
        self._slots = selected.slots
        self._assigned = self._tokens(demand, selected.tiles)
        for w, row in enumerate(self._slots):
            for r, e in enumerate(row):
                if e >= 0 and (selected.tiles[e][w] > 0 or (e, w, r) in selected.copies):
                    self._last_used[w][r] = self._now
        skipped = ""
        if not selected.copies:
            cells = sum(len(row) for row in self._slots)
            skipped = why_no_copies(
                within_max=within_max,
                bound=-(-sum(-(-d // self._M) for d in demand) // self._N),
                most_copies=min(self._config.budget, cells),
                tile_us=costs.tile_us,
                tried=tried,
            )
        return build_plan(
            self._config,
            np.array(self._primaries),
            assign_EN=np.array(self._assigned),
            slots_NR=np.array(self._slots, np.int32).reshape(self._N, -1),
            copies=selected.copies,
            gain_us=best_gain_us,
            within_max_tiles=within_max,
            skipped=skipped,
            costs=costs,
        )

    def _replicas(self, slots: list[list[int]], e: int) -> set[int]:
        return {self._primaries[e]} | {w for w in range(self._N) if e in slots[w]}

    def _loads(self, tiles: list[list[int]]) -> list[int]:
        return [sum(tiles[e][w] for e in range(self._E)) for w in range(self._N)]

    def _initialize(self, demand: list[int]) -> list[list[int]]:
        tiles = [[0] * self._N for _ in range(self._E)]
        for e, d in enumerate(demand):
            k = -(-d // self._M)
            home = self._primaries[e]
            before = [0] * self._N if self._assigned is None else self._assigned[e]
            total = sum(before)
            if k <= self._theta or total == 0:
                tiles[e][home] = k
                continue
            for w in range(self._N):
                tiles[e][w] = k * before[w] // total
            by_remainder = sorted(range(self._N), key=lambda w: (-(k * before[w] % total), w != home, w))
            for w in by_remainder[: k - sum(tiles[e])]:
                tiles[e][w] += 1
        return tiles

    def _find_within(self, now: _Candidate) -> tuple[int, int, int, int] | None:
        loads = self._loads(now.tiles)
        for h in sorted(range(self._N), key=lambda w: (-loads[w], w)):
            for c in sorted(range(self._N), key=lambda w: (loads[w], w)):
                if loads[h] - loads[c] <= 1:
                    continue
                best: tuple[int, int, int, int] | None = None
                for e in range(self._E):
                    q = min(now.tiles[e][h], (loads[h] - loads[c]) // 2)
                    if q > self._theta and (best is None or q > best[3]) and c in self._replicas(now.slots, e):
                        best = (e, h, c, q)
                if best is not None:
                    return best
        return None

    def _find_beyond(self, now: _Candidate, unsafe: list[list[bool]]) -> tuple[int, int, int, int, int] | None:
        loads = self._loads(now.tiles)
        for h in sorted(range(self._N), key=lambda w: (-loads[w], w)):
            for c in sorted(range(self._N), key=lambda w: (loads[w], w)):
                if loads[h] - loads[c] <= 1:
                    continue
                r = self._safe_slot(now, c, unsafe)
                if r is None:
                    continue
                best: tuple[int, int, int, int, int] | None = None
                for e in range(self._E):
                    q = min(now.tiles[e][h], (loads[h] - loads[c]) // 2)
                    if q > self._theta and (best is None or q > best[4]) and c not in self._replicas(now.slots, e):
                        best = (e, h, c, r, q)
                if best is not None:
                    return best
        return None

    def _safe_slot(self, now: _Candidate, c: int, unsafe: list[list[bool]]) -> int | None:
        bound_here = {r for _e, w, r in now.copies if w == c}
        free = [
            r
            for r, e in enumerate(now.slots[c])
            if e != NO_SUCH_SLOT and not unsafe[c][r] and r not in bound_here
        ]  # fmt: skip
        empty = [r for r in free if now.slots[c][r] == EMPTY]
        if empty:
            return empty[0]
        idle = [r for r in free if now.tiles[now.slots[c][r]][c] == 0]
        return min(idle, key=lambda r: (self._last_used[c][r], r), default=None)

    def _tokens(self, demand: list[int], tiles: list[list[int]]) -> list[list[int]]:
        counts = [[n * self._M for n in row] for row in tiles]
        for e, d in enumerate(demand):
            if d > 0:
                home = self._primaries[e]
                partial = home if tiles[e][home] else max(w for w in range(self._N) if tiles[e][w])
                counts[e][partial] -= sum(counts[e]) - d
        return counts
