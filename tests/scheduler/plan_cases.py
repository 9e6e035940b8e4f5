"""Planners in one line, random planning situations, and plans compared field by field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afore.scheduler.costs import Costs
from afore.scheduler.plan import Plan, PlannerConfig
from afore.scheduler.planner import Planner
from afore.scheduler.reference import ReferencePlanner
from afore.scheduler.validate import validate

FREE = Costs(tile_us=1.0, copy_us=0.0, window_us=0.0)
"""Copies cost nothing: the fewest tiles win."""

ARRAYS = ("assign_EN", "slots_NR", "used_NR", "shares_X4")
SCALARS = (
    "copies",
    "gain_us",
    "max_tiles",
    "bound_tiles",
    "base_max_tiles",
    "within_max_tiles",
    "load_unit",
    "skipped",
    "costs",
)


def make(
    primaries: Sequence[int],
    num_workers: int,
    slots: int | Sequence[int],
    *,
    budget: int | None = None,
    tile_tokens: int = 1,
    compactness: int = 0,
    compactness_share: float = 0.0,
    worker_speed: float | Sequence[float] = 1.0,
) -> Planner:
    """A planner whose E is the number of primaries."""
    config = PlannerConfig(
        num_experts=len(primaries),
        num_workers=num_workers,
        slots_per_worker=slots,
        tile_tokens=tile_tokens,
        copy_budget=budget,
        compactness=compactness,
        compactness_share=compactness_share,
        worker_speed=worker_speed,
    )
    return Planner(config, primaries)


def differences(left: Plan, right: Plan) -> list[str]:
    """Names of the fields in which two plans differ, with both values."""
    found = [
        f"{name}:\n{getattr(left, name)}\n{getattr(right, name)}"
        for name in ARRAYS
        if not np.array_equal(getattr(left, name), getattr(right, name))
        or getattr(left, name).dtype != getattr(right, name).dtype
    ]
    found += [
        f"{name}: {getattr(left, name)} {getattr(right, name)}"
        for name in SCALARS
        if getattr(left, name) != getattr(right, name)
    ]
    return found


def speeds(rng: np.random.Generator, num_workers: int) -> float | list[float]:
    """As often as not all workers are equally fast; else one or several are slower, also in odd ratios and far slower."""
    kind = rng.integers(0, 8)
    if kind < 4:
        return 1.0
    if kind == 4:
        return [0.5 if w == num_workers - 1 else 1.0 for w in range(num_workers)]
    if kind == 5:
        return rng.choice([1.0, 2.0, 3.0], num_workers).tolist()  # type: ignore[no-any-return]  # numpy infers Any
    if kind == 6:
        return rng.choice([0.03, 0.4, 1.0, 1.1], num_workers).tolist()  # type: ignore[no-any-return]
    return rng.uniform(0.3, 2.0, num_workers).tolist()  # type: ignore[no-any-return]


@dataclass
class Situation:
    """One layer with what is put to its planner."""

    config: PlannerConfig
    primaries_E: NDArray[np.int32]
    rng: np.random.Generator

    @classmethod
    def random(cls, rng: np.random.Generator) -> Situation:
        """Uneven primaries and slots, E < N, no slots, tight and wide budgets and thresholds: all occur often."""
        N = int(rng.choice([1, 2, 3, 4, 5, 8, 12, 35], p=[0.04, 0.2, 0.2, 0.2, 0.15, 0.1, 0.08, 0.03]))
        E = int(rng.integers(1, 25))
        slots = rng.integers(0, 4, N) if rng.random() < 0.4 else int(rng.choice([0, 1, 1, 2, 3, 8]))
        config = PlannerConfig(
            num_experts=E,
            num_workers=N,
            slots_per_worker=slots,
            tile_tokens=int(rng.choice([1, 3, 8, 64])),
            copy_budget=None if rng.random() < 0.3 else int(rng.integers(0, 2 * N + 2)),
            compactness=int(rng.choice([0, 0, 0, 1, 2, 5])),
            compactness_share=float(rng.choice([0.0, 0.0, 0.0, 0.1, 0.4, 1.0])),
            worker_speed=speeds(rng, N),
        )
        primaries_E = rng.integers(0, N, E).astype(np.int32)
        if rng.random() < 0.5:
            primaries_E = (np.arange(E) * N // E).astype(np.int32)
        return cls(config, primaries_E, rng)

    @classmethod
    def large(cls, rng: np.random.Generator) -> Situation:
        """Of the size of small models: more than one word of workers, slots by the hundred, speeds and θ as in ``random``."""
        N = int(rng.choice([8, 16, 33, 64]))
        E = int(rng.choice([64, 96, 128]))
        config = PlannerConfig(
            num_experts=E,
            num_workers=N,
            slots_per_worker=int(rng.choice([1, 2, 4, 8])),
            tile_tokens=int(rng.choice([8, 64])),
            compactness_share=float(rng.choice([0.0, 0.0, 0.05])),
            worker_speed=speeds(rng, N),
        )
        return cls(config, (np.arange(E) * N // E).astype(np.int32), rng)

    def demands(self, steps: int) -> Iterator[NDArray[np.int64]]:
        """Skewed demand that drifts, with idle experts, and now and then nothing at all or a jump."""
        E, rng = self.config.num_experts, self.rng
        heat_E = rng.normal(size=E) * rng.choice([0.3, 1.0, 2.5])
        tiles = int(rng.choice([3, 20, 150]))
        for _ in range(steps):
            if rng.random() < 0.1:
                heat_E = rng.permutation(heat_E)
            heat_E = heat_E + rng.normal(size=E) * 0.3
            share_E = np.exp(heat_E) * (rng.random(E) < 0.9)
            total = rng.integers(0, tiles * self.config.tile_tokens + 1)
            whole = share_E.sum()
            yield rng.multinomial(total, share_E / whole) if whole > 0 else np.zeros(E, np.int64)

    def protected(self) -> NDArray[np.bool_] | None:
        """No mask, or a random one."""
        shape = self.config.empty_slots().shape
        return None if self.rng.random() < 0.4 else self.rng.random(shape) < self.rng.choice([0.1, 0.5, 1.0])

    def costs(self) -> Costs:
        """Free copies, hidden ones, and copies whose exposure decides; also figures that are not exact in binary."""
        rng = self.rng
        return Costs(
            tile_us=float(rng.choice([0.0, 1.0, 20.0, 0.1, 3.7])),
            copy_us=float(rng.choice([0.0, 0.3, 1.0, 20.0, 70.1])),
            window_us=float(rng.choice([0.0, 0.0, 0.7, 15.0, 60.0, 1e6])),
        )

    def slots(self) -> NDArray[np.int32]:
        """A slot table that workers might report, duplicates included."""
        slots_NR = self.config.empty_slots()
        fill = (slots_NR == -1) & (self.rng.random(slots_NR.shape) < 0.7)
        slots_NR[fill] = self.rng.integers(0, self.config.num_experts, int(fill.sum()))
        return slots_NR

    @classmethod
    def crowded(cls, seed: int) -> tuple[Situation, NDArray[np.int32], NDArray[np.int64]]:
        """Every slot holds a replica and no copy is allowed: long chains of moves. Also the slot table and a demand."""
        rng = np.random.default_rng(seed)
        N = int(rng.integers(6, 10))
        E = int(rng.integers(6, 10) if seed % 4 < 2 else rng.integers(10, 20))
        R = int(rng.integers(3, 6) if seed % 2 == 0 else rng.integers(1, 4))
        config = PlannerConfig(num_experts=E, num_workers=N, slots_per_worker=R, tile_tokens=1, copy_budget=0)
        primaries_E = rng.integers(0, N, E).astype(np.int32)
        slots_NR = rng.integers(0, E, (N, R)).astype(np.int32)
        return cls(config, primaries_E, rng), slots_NR, rng.integers(0, 1000, E) * (rng.random(E) < 0.8)

    @classmethod
    def copying(cls, seed: int) -> tuple[Situation, NDArray[np.int32]]:
        """Every slot holds a replica and copies are free: long chains of copies. Also the slot table."""
        rng = np.random.default_rng(seed)
        N, E, R = int(rng.integers(3, 7)), int(rng.integers(4, 12)), int(rng.integers(1, 3))
        config = PlannerConfig(num_experts=E, num_workers=N, slots_per_worker=R, tile_tokens=1, copy_budget=20)
        primaries_E = rng.integers(0, N, E).astype(np.int32)
        return cls(config, primaries_E, rng), rng.integers(0, E, (N, R)).astype(np.int32)


def equal_plans(situation: Situation, steps: int) -> Iterator[Plan]:
    """Plans of a sequence with carried state; raises ``AssertionError`` at the first that the reference or the validator does not
    agree with.
    """
    config, primaries_E, rng = situation.config, situation.primaries_E, situation.rng
    planner, reference = Planner(config, primaries_E), ReferencePlanner(config, primaries_E)
    for step, demand_E in enumerate(situation.demands(steps)):
        if rng.random() < 0.15:
            slots_NR = situation.slots()
            planner.adopt(slots_NR)
            reference.adopt(slots_NR)
        elif rng.random() < 0.03:
            planner.reset()
            reference.reset()
        before_NR = planner.slots_NR
        protected_NR, costs = situation.protected(), situation.costs()
        plan = planner.plan(demand_E, protected_NR, costs)
        expected = reference.plan(demand_E, protected_NR, costs)
        assert not (found := differences(plan, expected)), (step, found)
        validate(plan, demand_E, before_NR, primaries_E, config, protected_NR)
        yield plan
