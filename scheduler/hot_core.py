"""From demand vectors to a published entry in one compiled call: gather, plan, write, publish, and the target's loads.

The plain way is ``DemandBook``, ``Planner``, ``Publisher`` and ``LoadMeter``; both leave the same bytes and the same state behind,
so that any target may go either way. Letters: A attention workers, E experts, N workers, R redundant slots of the worker that has
most, S = N·R cells.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from afore.scheduler.core_layout import H_COPIES, H_SHARES, H_SLOTS, Counts, Flags, Rates, Words, compiled, parts_of
from afore.scheduler.core_numba import compile_entry, core_stamp, plan_in_place
from afore.transport.entry_core import (
    W_ATTENTION,
    W_VECTOR32,
    Integers64,
    Words32,
    Words64,
    crc32_words,
    publish_plan,
    take_vector,
    wire_stamp,
)

PUBLISHED, INCOMPLETE, COMPLETE, REFUSED, UNBOUND = 0, 1, 2, 3, 4
"""What a call found: the entry is in the ring; vectors are missing; nothing is missing but planning was not asked for; the demand
is no demand, and nothing was changed; a share's slot is not bound to its expert, and nothing was published."""

O_WAITING, O_COPIES, O_SHARES, O_PAIRS, O_MAX_PAIRS_BEFORE, O_MAX_PAIRS_AFTER = 0, 1, 2, 3, 4, 5
"""Where ``out`` keeps the vectors that are missing, and what was published."""
OUT = 6


def out_words(E: int, N: int, vector32: int) -> int:
    """Length of ``out``: what was found, then scratch: demand [E], pairs [2N], one raw vector."""
    return OUT + E + 2 * N + (vector32 + 1) // 2


class Memory(NamedTuple):
    """What a call reads and writes."""

    buffer: Words  # ``core_layout``
    scratch: Words | None  # ``plus_layout``; None: Algorithm 1 alone
    gathered: Words  # ``demand_book.Gathering.words``
    mailbox: Words32
    ring: Words64
    window: Flags  # ``ProtectedWindow.flags``
    bound: Integers64  # ``CellBindings``
    shape: Integers64  # ``entry_core``
    out: Integers64  # ``out_words``


class Call(NamedTuple):
    """What is asked."""

    target: int
    may_plan: bool
    sequence: int
    stamp_ns: int
    start: int


@compiled
def _pairs(
    demand: Counts, primary: Words, cost: Words, shares: Words, num_shares: int, pairs: Integers64, out: Integers64
) -> None:
    """Pairs · cost of the most loaded worker on primaries and as planned; ``pairs`` [2N] is scratch."""
    N = pairs.size // 2
    pairs[:] = 0
    total = 0
    for e in range(demand.size):
        total += demand[e]
        pairs[primary[e]] += demand[e]
    for w in range(N):
        pairs[N + w] = pairs[w]
    for i in range(num_shares):
        count = shares[4 * i + 3]
        pairs[N + primary[shares[4 * i]]] -= count
        pairs[N + shares[4 * i + 1]] += count
    out[O_PAIRS] = total
    before = after = 0
    for w in range(N):
        before = max(before, pairs[w] * cost[w])
        after = max(after, pairs[N + w] * cost[w])
    out[O_MAX_PAIRS_BEFORE], out[O_MAX_PAIRS_AFTER] = before, after


@compiled
def _gather(
    gathered: Words, mailbox: Words32, shape: Integers64, target: int, out: Integers64, E: int, raw: Words32
) -> int:
    """Adds what has come; the number of vectors that have not."""
    A = shape[W_ATTENTION]
    missing, demand = gathered[:A], gathered[2 * A : 2 * A + E]
    waiting = 0
    for a in range(A):
        if missing[a]:
            if take_vector(mailbox, shape, a, target, raw, demand):
                missing[a] = 0
            else:
                waiting += 1
    out[O_WAITING] = waiting
    return waiting


@compiled
def _next_layer(gathered: Words, A: int, out: Integers64) -> None:
    """Everybody with rows is awaited again."""
    waiting = 0
    for a in range(A):
        gathered[a] = 1 if gathered[A + a] > 0 else 0
        waiting += gathered[a]
    gathered[2 * A :] = 0
    out[O_WAITING] = waiting


@compiled
def _serve(memory: Memory, call: Call, rates: Rates) -> int:
    """See the module; returns the status."""
    buffer, scratch, gathered, mailbox, ring, window, bound, shape, out = memory
    target, may_plan, sequence, stamp_ns, start = call
    p = parts_of(buffer)
    E, N, R, A = p.head.size, p.load.size, p.header[H_SLOTS], shape[W_ATTENTION]
    S = N * R
    pairs_at = OUT + E
    raw_at = pairs_at + 2 * N
    raw = out[raw_at:].view(np.uint32)[: shape[W_VECTOR32]]
    if _gather(gathered, mailbox, shape, target, out, E, raw):
        return INCOMPLETE
    if not may_plan:
        return COMPLETE

    summed = gathered[2 * A : 2 * A + E]
    demand = out[OUT:pairs_at]
    for e in range(E):
        demand[e] = summed[e]
    protected = window[:S]
    protected[:] = False
    for at in range(S, window.size, S):
        for s in range(S):
            protected[s] |= window[at + s]
    if plan_in_place(buffer, scratch, demand, protected, rates) < 0.0:
        return REFUSED
    used, slots, reserved, copies, shares = p.used, p.slots, p.reserved, p.copies, p.shares
    for s in range(window.size - 1, 2 * S - 1, -1):
        window[s] = window[s - S]
    if window.size > S:
        for s in range(S):
            window[S + s] = used[s] != 0

    num_copies, num_shares = p.header[H_COPIES], p.header[H_SHARES]
    for i in range(num_shares):
        s = shares[4 * i + 1] * R + shares[4 * i + 2]
        if not reserved[s] and bound[s] != shares[4 * i]:
            return UNBOUND
    for i in range(num_copies):
        s = copies[3 * i + 1] * R + copies[3 * i + 2]
        bound[s] = slots[s]
        bound[S + s] = sequence
    crc = crc32_words(summed.view(np.uint32), 0, E, 0)
    publish_plan(
        ring, shape, sequence, stamp_ns, target, start if num_copies > 0 else 0, gathered[A : 2 * A], crc,
        copies, num_copies, shares, num_shares, bound[S:], R,
    )  # fmt: skip

    out[O_COPIES], out[O_SHARES] = num_copies, num_shares
    _pairs(demand, p.primary, p.cost, shares, num_shares, out[pairs_at:raw_at], out)
    _next_layer(gathered, A, out)
    return PUBLISHED


def _stamp() -> int:
    """Checksum of the files that hold what the entry calls."""
    return zlib.crc32(f"{core_stamp()} {wire_stamp()}".encode(), zlib.crc32(Path(__file__).read_bytes()))


def _build(stamp: int) -> Any:
    """The cached entry; ``stamp`` as in ``core_numba``."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def hot_entry(
        buffer: Words,
        scratch: Words | None,
        gathered: Words,
        mailbox: Words32,
        ring: Words64,
        window: Flags,
        bound: Integers64,
        shape: Integers64,
        out: Integers64,
        target: int,
        may_plan: bool,
        sequence: int,
        stamp_ns: int,
        start: int,
        tile_us: float,
        copy_us: float,
        window_us: float,
    ) -> int:
        if stamp < 0:
            return INCOMPLETE
        status: int = _serve(
            Memory(buffer, scratch, gathered, mailbox, ring, window, bound, shape, out),
            Call(target, may_plan, sequence, stamp_ns, start),
            Rates(tile_us, copy_us, window_us),
        )
        return status

    return hot_entry


hot_core = _build(_stamp())


def compile_hot_path(*, search: bool = False) -> None:
    """Compiles the call, or loads it from numba's cache (milliseconds), for exactly its types: see ``compile_planner``."""
    vector, flags = types.Array(types.int32, 1, "C"), types.Array(types.boolean, 1, "C")
    wide, integer, real = types.Array(types.int64, 1, "C"), types.int64, types.float64
    mailbox, ring = types.Array(types.uint32, 1, "C"), types.Array(types.uint64, 1, "C")
    arrays = vector, vector if search else types.none, vector, mailbox, ring, flags, wide, wide, wide
    compile_entry(hot_core, (*arrays, integer, types.boolean, integer, integer, integer, real, real, real))
