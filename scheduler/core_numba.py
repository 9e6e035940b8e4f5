"""Algorithm 1 (paper §5.2) as one compiled call over one packed int32 buffer (letters and parts: ``core_layout``).

Everything equals ``reference.py`` bit for bit; what makes it fast changes no result:
- an expert's replicas are a chain of cells in rank order, ``where`` names its place on a worker, ``member`` where it is at all;
- workers stay sorted: a move re-inserts only its two;
- a donor looks at a receiver only if something it holds is there (``reach``), and after it found none only at workers whose
  load fell since (towards all others it can only have become worse);
- moves beyond the placement are undone from a log instead of saved as copies;
- the search ends when no continuation can beat the best gain: no maximum is below ``least_load``, and exposure only grows.

Compiled functions take arrays out of ``Parts`` once, before any loop: in a loop each access would cost two atomic counts.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.scheduler.core_beyond import rebalance_beyond
from afore.scheduler.core_layout import (
    H_BASE_MAX_TILES,
    H_BOUND_TILES,
    H_LEAST_COST,
    H_MAX_TILES,
    H_MOST_COST,
    H_SHARES,
    H_SLOTS,
    H_TILE_TOKENS,
    H_TOTAL_TILES,
    H_WITHIN_MAX_TILES,
    Counts,
    Flags,
    Parts,
    Rates,
    Words,
    bind,
    compiled,
    parts_of,
    plain_indices,
)
from afore.scheduler.core_within import greatest, initialize, least_load, rebalance_within, sort_workers, threshold
from afore.scheduler.plus_core import improve
from afore.scheduler.plus_layout import scratch_of

MAX_AGE = 2**31 - 1


@compiled
def _record(p: Parts, demand: Counts, M: int) -> None:
    """Tiles become tokens (the one partial tile on the primary if it has work, else on the last replica); ages advance."""
    head, after, tiles, assign, before, owner = p.head, p.after, p.tiles, p.assign, p.demand, p.owner
    shares, reserved, used, age = p.shares, p.reserved, p.used, p.age
    E, R = head.size, p.header[H_SLOTS]
    at = 0
    for e in range(E):
        left = demand[e]
        before[e] = left
        last = -1
        s = head[e]
        while s >= 0:
            n = tiles[E + s] * np.int64(M)
            assign[E + s] = n
            if n > 0:
                shares[at], shares[at + 1], shares[at + 2], shares[at + 3] = e, owner[s], s - owner[s] * R, n
                at += 4
                last = s
                left -= n
            s = after[s]
        if left < 0:  # the primary has no tile: the last replica's is the partial one
            assign[E + last] += left
            shares[at - 1] += left
            left = 0
        assign[e] = left
    p.header[H_SHARES] = at // 4
    for s in range(owner.size):
        if tiles[E + s] > 0 or reserved[s]:
            used[s] = 1
            age[s] = 0
        else:
            used[s] = 0
            if age[s] < MAX_AGE:
                age[s] += 1


@compiled
def plan_in_place(buffer: Words, scratch: Words | None, demand: Counts, protected: Flags, rates: Rates) -> float:
    """One plan, in place: carried state in, plan and next state out. ``demand`` [E], ``protected`` [S]. Returns its gain in µs.

    With ``scratch`` (``plus_layout``) it is ``afore-plus``'s; None is Algorithm 1's, compiled without the search. ``rates.tile_us``
    is a tile's time on a worker of the greatest speed. -1: the demand has a negative count; -2: more than MAX_TOKENS over the
    greatest tile cost in all. Then nothing that is carried has changed.
    """
    p = parts_of(buffer)
    M = p.header[H_TILE_TOKENS]
    theta = threshold(p, demand, M)
    total = initialize(p, demand, M, theta)
    if total < 0:
        return float(total)
    p.header[H_TOTAL_TILES] = total
    p.header[H_BASE_MAX_TILES] = greatest(p.base)
    sort_workers(p.rank, p.load)
    rebalance_within(p, theta)
    p.header[H_WITHIN_MAX_TILES] = p.load[p.rank[0]]
    bound = least_load(p, total)
    p.header[H_BOUND_TILES] = bound
    load_us = rates.tile_us / p.header[H_LEAST_COST]
    gain_us: float = rebalance_beyond(p, protected, theta, bound, load_us, rates.copy_us, rates.window_us)
    # The flow counts every worker's tile alike: with unequal speeds Algorithm 1's plan stands.
    if scratch is not None and p.header[H_MAX_TILES] > bound and p.header[H_MOST_COST] == 1:
        gain_us = improve(p, scratch_of(scratch, p), demand, protected, theta, bound, gain_us, rates)
    _record(p, demand, M)
    return gain_us


@compiled
def _adopt(buffer: Words, slots: Words) -> None:
    """Rebuilds the slot table from ``slots`` [S]; the carried assignment and all ages are forgotten."""
    p = parts_of(buffer)
    E, N, V = p.head.size, p.load.size, p.member.size // p.head.size
    p.assign[:] = 0
    p.demand[:] = 0
    p.tiles[:] = 0
    p.used[:] = 0
    p.age[:] = 0
    p.where[:] = -1
    p.head[:] = -1
    p.member[:] = 0
    for w in range(N):
        p.rank[w] = w
    for e in range(E):
        w = p.primary[e]
        p.where[e * N + w] = e
        p.member[e * V + w // 32] |= 1 << (w % 32)
    for s in range(p.slots.size):
        if p.slots[s] != NO_SUCH_SLOT:
            p.slots[s] = EMPTY
            e = slots[s]
            if e >= 0 and p.where[e * N + p.owner[s]] < 0:
                bind(p, s, e)


def core_stamp() -> int:
    """Checksum of the files that hold what a compiled caller of ``plan_in_place`` contains."""
    checksum = 0
    for path in sorted([*Path(__file__).parent.glob("core_*.py"), *Path(__file__).parent.glob("plus_*.py")]):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


def _build(stamp: int) -> tuple[Any, Any]:
    """The cached entries. numba's cache key has an entry's own file and closure, not its callees' files: hence ``stamp``."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def plan_entry(
        buffer: Words,
        scratch: Words | None,
        demand: Counts,
        protected: Flags,
        tile_us: float,
        copy_us: float,
        window_us: float,
    ) -> float:
        if stamp < 0:
            return np.nan
        gain_us: float = plan_in_place(buffer, scratch, demand, protected, Rates(tile_us, copy_us, window_us))
        return gain_us

    @njit(nogil=True, error_model="numpy", cache=True)
    def adopt_entry(buffer: Words, slots: Words) -> None:
        if stamp >= 0:
            _adopt(buffer, slots)

    return plan_entry, adopt_entry


plan_core, adopt_core = _build(core_stamp())


def compile_planner(*, search: bool = False) -> None:
    """Compiles the core, or loads it from numba's cache (milliseconds); with ``search``, ``afore-plus``'s instead of ``afore``'s.

    Call it in a preload, before processes fork. Afterwards an array of another type or layout is an error instead of a silent
    second compilation in a worker.
    """
    words, flags, real = types.Array(types.int32, 1, "C"), types.Array(types.boolean, 1, "C"), types.float64
    compile_entry(adopt_core, (words, words))
    scratch = words if search else types.none
    compile_entry(plan_core, (words, scratch, types.Array(types.int64, 1, "C"), flags, real, real, real))


def compile_entry(entry: Any, signature: tuple[types.Type, ...]) -> None:
    """Compiles a cached entry for a signature, or loads it, unless it is there; other ones it refuses."""
    if signature not in entry.signatures:
        entry.disable_compile(False)
        with plain_indices():
            entry.compile(signature)
        entry.disable_compile()
