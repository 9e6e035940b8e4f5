"""A plan, the planner's knobs, and the window of slots that plans in flight still use.

Letters: E experts, N workers, R redundant slots of the worker that has most.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.record import record
from afore.core.slots import NO_SUCH_SLOT
from afore.core.speeds import check_speeds, least_load, tile_costs
from afore.scheduler.core_layout import SHARE_PARTS
from afore.scheduler.costs import Costs

Copy = tuple[int, int, int]
"""(expert, worker, slot)"""

AT_BOUND = "the replicas there are reach the bound"
NONE_ALLOWED = "no copies are allowed: the budget or every worker's slots are 0"
NO_SAFE_MOVE = "no expert may move to a safe slot of a lighter worker"
NO_GAIN = "no copies would save more time than they cost"

MOST_SLOTS: Final = 1 << 24
"""Redundant slots of a layer. A planner keeps some words for each of them, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Sizes and knobs of Algorithm 1 (paper §5.2). Raises ``ConfigError`` naming the field."""

    num_experts: int
    """E: routed experts."""
    num_workers: int
    """N: FFN workers."""
    slots_per_worker: int | Sequence[int] | NDArray[np.integer[Any]] = 8
    """R: redundant slots of every worker, or one number for each; kept as an int or a tuple."""
    tile_tokens: int = 64
    """M_tile: rows of a grouped-GEMM tile."""
    copy_budget: int | None = None
    """B: most copies of one plan; none means max(8, N)."""
    compactness: int = 0
    """θ: a move must shift more than this many tiles."""
    compactness_share: float = 0.0
    """θ that grows with the batch: at least this part of the mean tiles of a worker, in whole 1/1024; 0 to 1."""
    worker_speed: float | Sequence[float] | NDArray[np.floating[Any]] = 1.0
    """Relative speed of every worker, or one number for each (``afore.core.speeds``); kept as a float or a tuple."""

    def __post_init__(self) -> None:
        for name, least in (("num_experts", 1), ("num_workers", 1), ("tile_tokens", 1), ("compactness", 0)):
            object.__setattr__(self, name, _integer(name, getattr(self, name), least))
        budget = max(8, self.num_workers) if self.copy_budget is None else self.copy_budget
        object.__setattr__(self, "copy_budget", _integer("copy_budget", budget, 0))
        slots: Any = self.slots_per_worker
        if isinstance(slots, Sequence | np.ndarray) and np.ndim(slots) == 1:
            if len(slots) != self.num_workers:
                raise ConfigError(
                    "planner.slots_per_worker",
                    f"{len(slots)} numbers for {self.num_workers} workers",
                    "give one number, or one for each worker",
                )
            slots = tuple(_integer("slots_per_worker", value, 0) for value in slots)
        else:
            slots = _integer("slots_per_worker", slots, 0)
        total = sum(slots) if isinstance(slots, tuple) else slots * self.num_workers
        if total > MOST_SLOTS:
            raise ConfigError(
                "planner.slots_per_worker",
                f"{total:,} redundant slots in a layer are over {MOST_SLOTS:,}",
                "give fewer: no worker needs an expert twice",
            )
        object.__setattr__(self, "slots_per_worker", slots)
        share = _share("compactness_share", self.compactness_share)
        object.__setattr__(self, "compactness_share", share)
        speed: Any = self.worker_speed
        if isinstance(speed, Sequence | np.ndarray) and not isinstance(speed, str) and np.ndim(speed) == 1:
            speed = check_speeds("planner.worker_speed", speed, self.num_workers)
        else:
            (speed,) = check_speeds("planner.worker_speed", (speed,), None)
        object.__setattr__(self, "worker_speed", speed)

    @property
    def slots_N(self) -> NDArray[np.int32]:
        """Redundant slots of each worker [N]."""
        return np.broadcast_to(np.asarray(self.slots_per_worker, np.int32), (self.num_workers,)).copy()

    @property
    def budget(self) -> int:
        """B as a number."""
        assert self.copy_budget is not None
        return self.copy_budget

    @property
    def costs_N(self) -> tuple[int, ...]:
        """What a tile costs on each worker, in units of load; all 1 where all are equally fast."""
        speed = self.worker_speed
        return tile_costs(speed) if isinstance(speed, tuple) else (1,) * self.num_workers

    @property
    def share_1024(self) -> int:
        """``compactness_share`` in 1/1024: what every planner multiplies by."""
        return round(self.compactness_share * SHARE_PARTS)

    def threshold(self, tiles: int) -> int:
        """θ of a target of so many tiles: max(compactness, ⌊compactness_share · tiles/N⌋)."""
        return max(self.compactness, self.share_1024 * tiles // (SHARE_PARTS * self.num_workers))

    def empty_slots(self) -> NDArray[np.int32]:
        """A slot table [N, R] without replicas: EMPTY, and NO_SUCH_SLOT beyond a worker's own."""
        slots_N = self.slots_N
        return np.where(np.arange(slots_N.max()) < slots_N[:, None], -1, NO_SUCH_SLOT).astype(np.int32)

    def check_primaries(self, primaries: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.int32]:
        """Primaries as int32 [E]; raises ``ConfigError`` for another shape or a rank that is no worker."""
        primaries_E = np.asarray(primaries)
        if primaries_E.shape != (self.num_experts,) or primaries_E.dtype.kind not in "iu":
            raise ConfigError(
                "primaries",
                f"{primaries_E.dtype} of shape {primaries_E.shape}",
                f"give the rank of each of the {self.num_experts} experts' primary",
            )
        outside = np.flatnonzero((primaries_E < 0) | (primaries_E >= self.num_workers))
        if outside.size:
            e = int(outside[0])
            raise ConfigError("primaries", f"expert {e} is on {primaries_E[e]}, no rank of {self.num_workers} workers")
        return primaries_E.astype(np.int32)


def _share(name: str, share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float | np.floating) or not 0 <= share <= 1:
        raise ConfigError(f"planner.{name}", f"{share!r} is no part of 1", "give 0 (θ does not grow) to 1")
    return float(share)


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"planner.{name}", f"{value!r} is not an integer") from None
    if not least <= number < 2**31:
        raise ConfigError(f"planner.{name}", f"{number} is not at least {least} (and below 2^31)")
    return number


@record(kw_only=True)
class Plan:
    """What Algorithm 1 answers for one target: Π = (P, A, σ, Δ) and the figures it decided by. Its arrays are its own.

    ``…_tiles`` figures are loads: tiles where all workers are equally fast, else 1/``load_unit`` of a tile of the fastest.
    """

    assign_EN: NDArray[np.int32]
    """A_t: pairs of expert e that worker w executes."""
    slots_NR: NDArray[np.int32]
    """The projected slot table after this plan: expert, -1 empty, -2 no such slot."""
    used_NR: NDArray[np.bool_]
    """Slots with work in this plan, or newly bound by it: what must not be rebound while the target can be in flight."""
    shares_X4: NDArray[np.int32]
    """(expert, worker, slot, count) of redundant replicas with work, by expert, then rank."""
    copies: list[Copy]
    """Δ_t in the order of the search: (expert, worker, slot), always from the primary."""
    gain_us: float
    """Net gain of the copies (eq. 8); 0 without."""
    max_tiles: int
    """Load of the most loaded worker."""
    bound_tiles: int
    """No assignment of whole tiles can be below: ⌈tiles/N⌉, or ``least_load`` with unequal speeds."""
    base_max_tiles: int
    """Load of the most loaded worker if everything ran on primaries."""
    within_max_tiles: int
    """Load of the most loaded worker after rebalancing over existing replicas only: A^base of eq. 8."""
    load_unit: int = 1
    """U: what one tile adds to the load of a worker of the greatest speed; a load takes ``load/U · tile_us``."""
    skipped: str
    """Why there are no copies; empty if there are."""
    costs: Costs
    """The estimates it was made with."""

    def shares(self) -> list[tuple[int, int, int, int]]:
        """(expert, worker, slot, count) of redundant replicas with work; the primary runs the rest of each expert."""
        return [(e, w, r, count) for e, w, r, count in self.shares_X4.tolist()]


def why_no_copies(*, within_max: int, bound: int, most_copies: int, tile_us: float, tried: int) -> str:
    """The reason that a plan without copies gives."""
    if within_max == bound:
        return AT_BOUND
    if most_copies == 0:
        return NONE_ALLOWED
    return NO_SAFE_MOVE if tried == 0 and tile_us > 0 else NO_GAIN


def build_plan(
    config: PlannerConfig,
    primaries_E: NDArray[np.integer[Any]],
    *,
    assign_EN: NDArray[np.integer[Any]],
    slots_NR: NDArray[np.integer[Any]],
    copies: Sequence[Copy] = (),
    gain_us: float = 0.0,
    within_max_tiles: int | None = None,
    skipped: str = "",
    costs: Costs,
) -> Plan:
    """A plan from a full assignment [E, N] and slot table [N, R]; everything that follows from them is derived."""
    M, N, costs_N = config.tile_tokens, config.num_workers, config.costs_N
    tiles_E = -(-assign_EN.sum(axis=1, dtype=np.int64) // M)
    loads_N = (-(-assign_EN.astype(np.int64) // M)).sum(axis=0) * costs_N
    base_N = np.zeros(N, np.int64)
    np.add.at(base_N, primaries_E, tiles_E)
    base_N *= costs_N
    used_NR = np.zeros(slots_NR.shape, np.bool_)
    shares: list[tuple[int, int, int, int]] = []
    for w, r in zip(*np.nonzero(slots_NR >= 0), strict=True):
        e = int(slots_NR[w, r])
        if assign_EN[e, w] > 0 and primaries_E[e] != w:
            used_NR[w, r] = True
            shares.append((e, int(w), int(r), int(assign_EN[e, w])))
    for _e, w, r in copies:
        used_NR[w, r] = True
    max_tiles = int(loads_N.max())
    return Plan(
        assign_EN=assign_EN.astype(np.int32),
        slots_NR=slots_NR.astype(np.int32),
        used_NR=used_NR,
        shares_X4=np.array(sorted(shares), np.int32).reshape(-1, 4),
        copies=list(copies),
        gain_us=gain_us,
        max_tiles=max_tiles,
        bound_tiles=least_load(int(tiles_E.sum()), costs_N),
        base_max_tiles=int(base_N.max()),
        within_max_tiles=max_tiles if within_max_tiles is None else within_max_tiles,
        load_unit=min(costs_N),
        skipped=skipped,
        costs=costs,
    )


class ProtectedWindow:
    """U_t of one layer: slots used or bound by the last ``depth`` = M - 1 plans, which is all that can still be in flight."""

    def __init__(self, depth: int) -> None:
        if depth < 0:
            raise ConfigError("depth", f"{depth} plans", "give M - 1, 0 or more")
        self._depth = depth
        self._flags: NDArray[np.bool_] | None = None

    def flags(self, shape_NR: tuple[int, int]) -> NDArray[np.bool_]:
        """Where it is kept, for compiled callers: bool [1 + depth, N, R] flat, a row of scratch, then the latest plan first."""
        if self._flags is None:
            self._flags = np.zeros((1 + self._depth, *shape_NR), np.bool_)
        return self._flags.reshape(-1)

    def protected(self) -> NDArray[np.bool_] | None:
        """Bool [N, R], or None before the first plan."""
        if self._flags is None:
            return None
        merged: NDArray[np.bool_] = np.logical_or.reduce(self._flags[1:])
        return merged

    def push(self, used_NR: NDArray[np.bool_]) -> None:
        """A target has been planned; ``used_NR`` is its plan's, all False for one on primaries."""
        self.flags(used_NR.shape)
        assert self._flags is not None
        if self._depth:
            self._flags[2:] = self._flags[1:-1]
            self._flags[1] = used_NR
