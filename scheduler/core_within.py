"""Stages 1 and 2 of Algorithm 1: where the tiles start, and moves over existing replicas (letters and parts: ``core_layout``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.scheduler.core_layout import H_SLOTS, Parts, Words, compiled

MAX_TOKENS = 2**31 - 1  # of one target: every count and load then fits int32
EXACT_QUOTIENT = 2**52  # a float64 quotient of integers below it has the exact floor, at a fraction of idiv's time


@compiled
def _portion(k: int, part: int, whole: int) -> int:
    """⌊k·part/whole⌋."""
    product = k * part
    return int(product / whole) if product < EXACT_QUOTIENT else product // whole


@compiled
def initialize(p: Parts, demand: NDArray[np.int64], M: int, theta: int) -> int:
    """Stage 1: the carried token proportions in whole tiles, by largest remainder (ties: primary, then rank); else primaries.

    Returns all tiles, or < 0: demand refused.
    """
    primary, before, assign, tiles, load, base = p.primary, p.demand, p.assign, p.tiles, p.load, p.base
    head, after, owner, remainder = p.head, p.after, p.owner, p.remainder
    E = primary.size
    load[:] = 0
    base[:] = 0
    tiles[:] = 0
    total = 0
    tokens = np.int64(0)
    for e in range(E):
        d = demand[e]
        if d < 0:
            return -1
        if d > MAX_TOKENS - tokens:
            return -2
        tokens += d
        k = _portion(1, d + M - 1, M)
        total += k
        base[primary[e]] += k
        whole = before[e]
        if k <= theta or whole == 0 or assign[e] == whole:
            tiles[e] = k
            load[primary[e]] += k
            continue
        tiles[e] = _portion(k, assign[e], whole)
        home_remainder = k * assign[e] - tiles[e] * np.int64(whole)
        left = k - tiles[e]
        s = head[e]
        while s >= 0:
            n = _portion(k, assign[E + s], whole)
            tiles[E + s] = n
            remainder[s] = k * assign[E + s] - n * whole
            left -= n
            s = after[s]
        while left > 0:
            best, most = -1, home_remainder
            s = head[e]
            while s >= 0:
                if remainder[s] > most:
                    best, most = s, remainder[s]
                s = after[s]
            if best < 0:
                tiles[e] += 1
                home_remainder = -1
            else:
                tiles[E + best] += 1
                remainder[best] = -1
            left -= 1
        load[primary[e]] += tiles[e]
        s = head[e]
        while s >= 0:
            load[owner[s]] += tiles[E + s]
            s = after[s]
    return total


@compiled
def greatest(values: Words) -> int:
    """The greatest of counts (numba's own ``max`` of an array is not for code without reference counts)."""
    most = 0
    for i in range(values.size):
        most = max(most, int(values[i]))
    return most


@compiled
def sort_workers(rank: Words, load: Words) -> None:
    """Workers by decreasing load, ties by rank; begins from the order of the last plan."""
    for i in range(1, rank.size):
        w = rank[i]
        t = load[w]
        j = i - 1
        while j >= 0 and (load[rank[j]] < t or (load[rank[j]] == t and rank[j] > w)):
            rank[j + 1] = rank[j]
            j -= 1
        rank[j + 1] = w


@compiled
def move_load(rank: Words, load: Words, i: int, j: int, q: int) -> None:
    """q tiles go from the worker ranked i to the one ranked j > i: loads, and the two re-inserted."""
    h, c = rank[i], rank[j]
    load[h] -= q
    load[c] += q
    t = load[c]
    while j > 0 and (load[rank[j - 1]] < t or (load[rank[j - 1]] == t and rank[j - 1] > c)):
        rank[j] = rank[j - 1]
        j -= 1
    rank[j] = c
    if j == i:
        i += 1
    t = load[h]
    last = rank.size - 1
    while i < last and (load[rank[i + 1]] > t or (load[rank[i + 1]] == t and rank[i + 1] < h)):
        rank[i] = rank[i + 1]
        i += 1
    rank[i] = h


@compiled
def _learn_reach(p: Parts, h: int, theta: int) -> None:
    """reach of h: the workers that hold an expert of which h has more than θ tiles."""
    tiles, member, reach, homed, slots, homed_from = p.tiles, p.member, p.reach, p.homed, p.slots, p.homed_from
    E, R, V = homed.size, p.header[H_SLOTS], reach.size // p.load.size
    reach[h * V : h * V + V] = 0
    for at in range(homed_from[h], homed_from[h + 1]):
        if tiles[homed[at]] > theta:
            for v in range(V):
                reach[h * V + v] |= member[homed[at] * V + v]
    for s in range(h * R, h * R + R):
        if tiles[E + s] > theta:
            for v in range(V):
                reach[h * V + v] |= member[slots[s] * V + v]
    p.known[h] = 1


@compiled
def _move_within(p: Parts, h: int, c: int, half: int) -> int:
    """Moves the expert with most tiles to give from h to c (ties: lowest expert); c is in h's reach. Returns the tiles.

    It is redundant on c, or redundant on h with its primary on c: no other expert is on both.
    """
    slots, where, tiles, primary = p.slots, p.where, p.tiles, p.primary
    E, N, R = primary.size, p.load.size, p.header[H_SLOTS]
    best, most = -1, 0
    for s in range(c * R, c * R + R):
        e = slots[s]
        if e >= 0 and where[e * N + h] >= 0:
            q = min(tiles[where[e * N + h]], half)
            if q > most or (q == most and e < best):
                best, most = e, q
    for s in range(h * R, h * R + R):
        q = min(tiles[E + s], half)
        if q > 0 and primary[slots[s]] == c and (q > most or (q == most and slots[s] < best)):
            best, most = slots[s], q
    tiles[where[best * N + h]] -= most
    tiles[where[best * N + c]] += most
    return most


@compiled
def rebalance_within(p: Parts, theta: int) -> None:
    """Stage 2: moves over existing replicas until none is eligible."""
    rank, load, checked, lowered, known, reach = p.rank, p.load, p.checked, p.lowered, p.known, p.reach
    N = load.size
    V = reach.size // N
    checked[:] = -1
    lowered[:] = 0
    known[:] = 0
    moves = 0
    i = 0
    while i < N:
        h = rank[i]
        if (load[h] - load[rank[N - 1]]) >> 1 <= theta:
            return
        if not known[h]:
            _learn_reach(p, h, theta)
        moved = False
        end = N
        while not moved and end > 0:  # groups of equal load, lightest first
            low = load[rank[end - 1]]
            half = (load[h] - low) >> 1
            if half <= theta:
                break
            begin = end - 1
            while begin > 0 and load[rank[begin - 1]] == low:
                begin -= 1
            for j in range(begin, end):
                c = rank[j]
                if checked[h] < lowered[c] and (reach[h * V + (c >> 5)] >> (c & 31)) & 1:
                    move_load(rank, load, i, j, _move_within(p, h, c, half))
                    moves += 1
                    lowered[h] = moves
                    checked[c] = -1
                    known[h] = 0
                    known[c] = 0
                    moved = True
                    break
            end = begin
        if moved:
            i = 0
        else:
            checked[h] = moves
            i += 1
