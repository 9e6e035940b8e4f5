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

And what goes beyond it, which changes nothing where it is not used:
10. Workers of unequal speed: T_w = tiles · c_w (``afore.core.speeds``), and a move evens the two loads out as far as whole tiles do
    (``_tiles_to_even``). With c = 1 that is eq. 10. Both loads end below T_h, so that Algorithm 1's proof that it ends holds.
11. θ of a target is the greater of ``compactness`` and a part of its mean tiles a worker (``PlannerConfig.threshold``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.core.speeds import least_load
from afore.scheduler.costs import Costs, exposed_us
from afore.scheduler.plan import Copy, Plan, PlannerConfig, build_plan, why_no_copies


@dataclass
class _Candidate:
    """(P, N_t, C_t, Δ_t), and T; P is the fixed primaries and whatever the slot table names."""

    tiles: list[list[int]]
    slots: list[list[int]]
    copies: list[Copy]
    loads: list[int]

    def copy(self) -> _Candidate:
        return _Candidate(
            [row.copy() for row in self.tiles],
            [row.copy() for row in self.slots],
            self.copies.copy(),
            self.loads.copy(),
        )


class ReferencePlanner:
    """The same interface as ``Planner``, without its checks."""

    def __init__(self, config: PlannerConfig, primaries: NDArray[np.integer[Any]] | Sequence[int]) -> None:
        self._config = config
        self._primaries = [int(w) for w in primaries]
        self._primaries_E = np.array(self._primaries)
        self._E, self._N, self._M = config.num_experts, config.num_workers, config.tile_tokens
        self._cost = config.costs_N
        self._theta = config.compactness
        self.reset()

    def reset(self) -> None:
        self.adopt(self._config.empty_slots())

    def adopt(self, slots_NR: NDArray[np.integer[Any]]) -> None:
        table = slots_NR.tolist()
        self._slots: list[list[int]] = [[EMPTY if e >= 0 else e for e in row] for row in table]
        for w, row in enumerate(table):
            for r, e in enumerate(row):
                if e >= 0 and self._primaries[e] != w and e not in self._slots[w]:
                    self._slots[w][r] = e
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
        all_tiles = sum(-(-d // self._M) for d in demand)
        self._theta = self._config.threshold(all_tiles)

        # Stage 1: assignment initialization
        tiles = self._initialize(demand)
        now = _Candidate(tiles, [row.copy() for row in self._slots], [], self._loads(tiles))

        # Stage 2: rebalancing within the placement
        while (found := self._find_within(now)) is not None:
            self._move(now, *found)

        # Stage 3: rebalancing beyond the placement
        load_us = costs.tile_us / min(self._cost)
        within_max = max(now.loads)
        before_us = load_us * within_max
        best_gain_us = 0.0
        selected = now.copy()
        tried = 0
        while tried < self._config.budget and (beyond := self._find_beyond(now, unsafe)) is not None:
            e, h, c, r, q = beyond
            now.slots[c][r] = e
            now.copies.append((e, c, r))
            tried += 1
            self._move(now, e, h, c, q)
            exposed = exposed_us(now.copies, self._primaries, costs)
            gain_us = before_us - load_us * max(now.loads) - exposed
            if gain_us > best_gain_us:
                selected = now.copy()
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
                bound=least_load(all_tiles, self._cost),
                most_copies=min(self._config.budget, cells),
                tile_us=costs.tile_us,
                tried=tried,
            )
        return build_plan(
            self._config,
            self._primaries_E,
            assign_EN=np.array(self._assigned),
            slots_NR=np.array(self._slots, np.int32).reshape(self._N, -1),
            copies=selected.copies,
            gain_us=best_gain_us,
            within_max_tiles=within_max,
            skipped=skipped,
            costs=costs,
        )

    def _held(self, slots: list[list[int]]) -> list[set[int]]:
        """The experts with a replica on each worker."""
        held = [set(row) for row in slots]
        for e, w in enumerate(self._primaries):
            held[w].add(e)
        return held

    def _loads(self, tiles: list[list[int]]) -> list[int]:
        return [sum(column) * cost for column, cost in zip(zip(*tiles, strict=True), self._cost, strict=True)]

    def _move(self, now: _Candidate, e: int, h: int, c: int, q: int) -> None:
        now.tiles[e][h] -= q
        now.tiles[e][c] += q
        now.loads[h] -= q * self._cost[h]
        now.loads[c] += q * self._cost[c]

    def _initialize(self, demand: list[int]) -> list[list[int]]:
        tiles = [[0] * self._N for _ in range(self._E)]
        for e, d in enumerate(demand):
            k = -(-d // self._M)
            home = self._primaries[e]
            before = [0] if self._assigned is None else self._assigned[e]
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

    def _tiles_to_even(self, load_h: int, load_c: int, cost_h: int, cost_c: int) -> int:
        """The q ≥ 0 that minimises max(T_h - q·c_h, T_c + q·c_c), the smaller of two; 0: no move lowers the heavier worker.

        The first falls with q and the second grows, so it is the last q at which the first is not below the second, or the next.
        """
        if load_h <= load_c:
            return 0
        q = (load_h - load_c) // (cost_h + cost_c)
        return q + 1 if load_c + (q + 1) * cost_c < load_h - q * cost_h else q

    def _pairs(self, loads: list[int]) -> Iterator[tuple[int, int, int]]:
        """(h, c, most tiles to move) by decreasing load of h, then increasing load of c, ties by rank."""
        heaviest = sorted(range(self._N), key=lambda w: (-loads[w], w))
        lightest = sorted(range(self._N), key=lambda w: (loads[w], w))
        for h in heaviest:
            for c in lightest:
                if loads[h] <= loads[c]:
                    break
                most = self._tiles_to_even(loads[h], loads[c], self._cost[h], self._cost[c])
                if most > self._theta:
                    yield h, c, most

    def _find_within(self, now: _Candidate) -> tuple[int, int, int, int] | None:
        held = self._held(now.slots)
        for h, c, most in self._pairs(now.loads):
            best: tuple[int, int, int, int] | None = None
            for e in sorted(held[h] & held[c] - {EMPTY, NO_SUCH_SLOT}):
                q = min(now.tiles[e][h], most)
                if q > self._theta and (best is None or q > best[3]):
                    best = (e, h, c, q)
            if best is not None:
                return best
        return None

    def _find_beyond(self, now: _Candidate, unsafe: list[list[bool]]) -> tuple[int, int, int, int, int] | None:
        held = self._held(now.slots)
        for h, c, most in self._pairs(now.loads):
            r = self._safe_slot(now, c, unsafe)
            if r is None:
                continue
            best: tuple[int, int, int, int, int] | None = None
            for e in sorted(held[h] - held[c] - {EMPTY, NO_SUCH_SLOT}):
                q = min(now.tiles[e][h], most)
                if q > self._theta and (best is None or q > best[4]):
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
