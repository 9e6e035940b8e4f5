"""The planner's packed buffer: one int32 array per layer that is slot table, carried state and plan.

Letters: E experts, N workers, R most redundant slots of any worker, S = N·R slot cells (cell s = worker·R + slot), C most
copies of one plan, V = ⌈N/32⌉ words of a set of workers. A *place* is where tiles of an expert can be: place e < E is e's fixed
primary, place E + s is cell s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.np import arrayobj
from numpy.typing import NDArray

Words = NDArray[np.int32]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]
# Inlined and without reference counts: a call would pass the thirty arrays of ``Parts`` on the stack, and count each of them. So
# an entry that Python calls holds none of them: it only calls one of these functions, which returns numbers.
compiled = njit(nogil=True, error_model="numpy", forceinline=True, _nrt=False)


@contextmanager
def plain_indices() -> Iterator[None]:
    """While it is entered, numba compiles array indices as they are, not as ones that may count from the end.

    No index of a core is negative, and the test for it on every access was a fifth of a plan's time. numba has no option for it,
    so the one function that adds the test is replaced, under numba's own compiler lock. In a numba that has no such function
    nothing changes but the time.
    """
    with global_compiler_lock:
        before = getattr(arrayobj, "fix_integer_index", None)
        if before is not None:
            arrayobj.fix_integer_index = _index_as_it_is
        try:
            yield
        finally:
            if before is not None:
                arrayobj.fix_integer_index = before


def _index_as_it_is(context: Any, builder: Any, index_type: Any, index: Any, size: Any) -> Any:
    return context.cast(builder, index, index_type, types.intp if index_type.signed else types.uintp)


class Rates(NamedTuple):
    """The estimates of a plan, as ``Costs``."""

    tile_us: float
    copy_us: float
    window_us: float


# Words of the header.
H_EXPERTS, H_WORKERS, H_SLOTS, H_COPY_CAP, H_TILE_TOKENS, H_COMPACTNESS = 0, 1, 2, 3, 4, 5
H_COPIES, H_SHARES, H_MAX_TILES, H_BASE_MAX_TILES, H_WITHIN_MAX_TILES, H_TOTAL_TILES, H_TRIED = 6, 7, 8, 9, 10, 11, 12
H_COMPACTNESS_SHARE, H_LEAST_COST, H_MOST_COST, H_BOUND_TILES = 13, 14, 15, 16
HEADER = 17
SHARE_PARTS = 1024
"""The share in H_COMPACTNESS_SHARE counts in these parts of 1, so that θ is the same whole number in every planner."""


class Parts(NamedTuple):
    """Views of the buffer. The first six are the plan: contiguous, ``plan_words`` from the start."""

    header: Words  # H_*
    assign: Words  # [E+S] tokens at each place: A_t, and the carried A_{t-1} of the next call
    slots: Words  # [S] expert, EMPTY or NO_SUCH_SLOT
    used: Words  # [S] 1: has work in this plan or was bound by it
    copies: Words  # [3C] (expert, worker, slot)
    shares: Words  # [4S] (expert, worker, slot, tokens) of redundant replicas, by expert, then rank
    primary: Words  # [E] worker
    demand: Words  # [E] tokens of the last plan
    head: Words  # [E] first cell of the expert's chain, -1: none
    homed: Words  # [E] experts grouped by primary worker, ascending in each group
    tiles: Words  # [E+S] tiles at each place: N_t
    age: Words  # [S] plans since the cell was last used
    owner: Words  # [S] worker
    after: Words  # [S] next cell of the chain
    remainder: Words  # [S] of the proportional split
    reserved: Words  # [S] 1: bound by this plan
    cost: Words  # [N] what a tile adds to the load of a worker; all 1 where all are equally fast
    load: Words  # [N] tiles · cost: T
    rank: Words  # [N] workers by decreasing load, then rank
    base: Words  # [N] load with everything on primaries
    checked: Words  # [N] move count at which this donor found no receiver
    lowered: Words  # [N] move count at which this worker last lost load
    known: Words  # [N] 1: this worker's reach holds
    full: Words  # [N] 1: no safe slot here now
    sent: Words  # [N] copies leaving a worker's port
    received: Words  # [N] copies entering it
    homed_from: Words  # [N+1] where a worker's group begins in homed
    where: Words  # [E·N] place of e on w, -1: none
    member: Words  # [E·V] bit w: e has a replica on w
    reach: Words  # [N·V] bit c: something that may leave this worker has a replica on c
    undo: Words  # [5C] (expert, cell, expert before, tiles, place they came from)


def plan_words(E: int, N: int, R: int, C: int) -> int:
    """Length of the leading part that is the plan, in words."""
    return HEADER + E + 7 * N * R + 3 * C


def buffer_words(E: int, N: int, R: int, C: int) -> int:
    """Length of the whole buffer in words."""
    V = (N + 31) // 32
    return plan_words(E, N, R, C) + 5 * E + 6 * N * R + 11 * N + 1 + E * N + E * V + N * V + 5 * C


@compiled
def parts_of(buffer: Words) -> Parts:
    """The buffer's views; sizes are read from its header."""
    E, N, R, C = buffer[H_EXPERTS], buffer[H_WORKERS], buffer[H_SLOTS], buffer[H_COPY_CAP]
    S, V = N * R, (N + 31) // 32
    a = HEADER + E + S  # slots, used
    b = a + 2 * S + 3 * C  # shares, then four of E
    c = b + 4 * S + 4 * E  # tiles, then five of S
    d = c + E + 6 * S  # ten of N, homed_from
    e = d + 11 * N + 1  # where
    f = e + E * N  # member
    g = f + E * V + N * V  # undo
    return Parts(
        buffer[:HEADER], buffer[HEADER:a], buffer[a : a + S], buffer[a + S : a + 2 * S], buffer[a + 2 * S : b],
        buffer[b : b + 4 * S], buffer[c - 4 * E : c - 3 * E], buffer[c - 3 * E : c - 2 * E],
        buffer[c - 2 * E : c - E], buffer[c - E : c], buffer[c : c + E + S],
        buffer[d - 5 * S : d - 4 * S], buffer[d - 4 * S : d - 3 * S], buffer[d - 3 * S : d - 2 * S],
        buffer[d - 2 * S : d - S], buffer[d - S : d],
        buffer[d : d + N], buffer[d + N : d + 2 * N], buffer[d + 2 * N : d + 3 * N], buffer[d + 3 * N : d + 4 * N],
        buffer[d + 4 * N : d + 5 * N], buffer[d + 5 * N : d + 6 * N], buffer[d + 6 * N : d + 7 * N],
        buffer[d + 7 * N : d + 8 * N], buffer[d + 8 * N : d + 9 * N], buffer[d + 9 * N : d + 10 * N], buffer[d + 10 * N : e],
        buffer[e:f], buffer[f : f + E * V], buffer[f + E * V : g], buffer[g : g + 5 * C],
    )  # fmt: skip


@compiled
def bind(p: Parts, s: int, e: int) -> None:
    """Cell s holds e from now on (EMPTY: nothing); the replica that was there is no longer one."""
    head, after, where, member, w = p.head, p.after, p.where, p.member, p.owner[s]
    E, N, V = head.size, p.load.size, member.size // head.size
    old = p.slots[s]
    if old >= 0:
        where[old * N + w] = -1
        member[old * V + (w >> 5)] &= ~(1 << (w & 31))
        at = head[old]
        if at == s:
            head[old] = after[s]
        else:
            while after[at] != s:
                at = after[at]
            after[at] = after[s]
    p.slots[s] = e
    if e >= 0:
        where[e * N + w] = E + s
        member[e * V + (w >> 5)] |= 1 << (w & 31)
        at = head[e]
        if at < 0 or at > s:
            after[s] = at
            head[e] = s
        else:
            while after[at] >= 0 and after[at] < s:
                at = after[at]
            after[s] = after[at]
            after[at] = s
