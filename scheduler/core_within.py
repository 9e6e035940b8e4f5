"""Stages 1 and 2 of Algorithm 1: where the tiles start, and moves over existing replicas (letters and parts: ``core_layout``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.scheduler.core_layout import (
    H_COMPACTNESS,
    H_COMPACTNESS_SHARE,
    H_LEAST_COST,
    H_MOST_COST,
    H_SLOTS,
    SHARE_PARTS,
    Parts,
    Words,
    compiled,
)

MAX_TOKENS = 2**31 - 1  # of one target, over the greatest tile cost: every count and load then fits int32
EXACT_QUOTIENT = 2**52  # a float64 quotient of integers below it has the exact floor, at a fraction of idiv's time


@compiled
def _portion(k: int, part: int, whole: int) -> int:
    """⌊k·part/whole⌋."""
    product = k * part
    return int(product / whole) if product < EXACT_QUOTIENT else product // whole


@compiled
def threshold(p: Parts, demand: NDArray[np.int64], M: int) -> int:
    """θ of a target, ``PlannerConfig.threshold``: known before stage 1, because that keeps small experts whole."""
    theta, share = int(p.header[H_COMPACTNESS]), int(p.header[H_COMPACTNESS_SHARE])
    if share == 0:
        return theta
    total = 0
    for e in range(demand.size):
        total += (int(demand[e]) + M - 1) // M
    return max(theta, share * total // (SHARE_PARTS * p.load.size))


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
    if p.header[H_MOST_COST] > 1:
        if tokens > MAX_TOKENS // p.header[H_MOST_COST]:
            return -2
        cost = p.cost
        for w in range(load.size):
            load[w] *= cost[w]
            base[w] *= cost[w]
    return total


@compiled
def least_load(p: Parts, total: int) -> int:
    """No assignment of ``total`` whole tiles has a lower maximum: the least T with Σ_w ⌊T/c_w⌋ ≥ total (⌈total/N⌉ if equal)."""
    cost, N = p.cost, p.load.size
    if p.header[H_MOST_COST] == 1:
        return (total + N - 1) // N
    inverse = 0.0
    for w in range(N):
        inverse += 1.0 / cost[w]
    # T lies between tiles that could be cut at will and one wasted tile for each worker; the whole numbers around them hold it.
    low, high = int(total / inverse) - 2, int((total + N) / inverse) + 2
    while high - low > 1:
        middle = (low + high) >> 1
        whole = 0
        if middle > 0:
            for w in range(N):
                whole += middle // int(cost[w])
        if whole >= total:
            high = middle
        else:
            low = middle
    return max(high, 0)


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
def to_even(difference: int, cost_h: int, cost_c: int) -> int:
    """How many tiles even out a worker of the load ``difference`` more than another (≥ 0): the q that minimises the greater of the
    two loads T_h - q·c_h and T_c + q·c_c, the smaller one of two; 0: none lowers T_h.

    With q = ⌊D/(c_h + c_c)⌋ the donor is the greater one, with one tile more the receiver, which is less if D mod (c_h + c_c)
    exceeds c_c: together, ⌊(D + c_h - 1)/(c_h + c_c)⌋. With equal speeds ⌊D/2⌋. It grows with D and falls with c_c.
    """
    return (difference + cost_h - 1) // (cost_h + cost_c)


@compiled
def move_load(rank: Words, load: Words, cost: Words, i: int, j: int, q: int) -> None:
    """q tiles go from the worker ranked i to the one ranked j > i: loads, and the two re-inserted. Both end below T_h."""
    h, c = rank[i], rank[j]
    load[h] -= q * cost[h]
    load[c] += q * cost[c]
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
    """Stage 2: moves over existing replicas until none is eligible.

    Each move lowers the load vector, sorted from the greatest, lexicographically: two loads give way to two that are both below the
    greater of them. So it ends, at any speeds. With unequal ones a heavier receiver may still get more tiles than a lighter one;
    the search breaks off where not even a receiver of the least cost would get enough.
    """
    rank, load, cost, checked, lowered, known = p.rank, p.load, p.cost, p.checked, p.lowered, p.known
    reach, least, uneven = p.reach, p.header[H_LEAST_COST], p.header[H_MOST_COST] > 1
    N = load.size
    V = reach.size // N
    checked[:] = -1
    lowered[:] = 0
    known[:] = 0
    moves = 0
    i = 0
    while i < N:
        h = rank[i]
        spread = load[h] - load[rank[N - 1]]
        if (to_even(spread, least, least) if uneven else spread >> 1) <= theta:
            return
        if not known[h]:
            _learn_reach(p, h, theta)
        moved = False
        end = N
        while not moved and end > 0:  # groups of equal load, lightest first
            low = load[rank[end - 1]]
            difference = load[h] - low
            half = to_even(difference, cost[h], least) if uneven else difference >> 1
            if half <= theta:
                break
            begin = end - 1
            while begin > 0 and load[rank[begin - 1]] == low:
                begin -= 1
            for j in range(begin, end):
                c = rank[j]
                if checked[h] < lowered[c] and (reach[h * V + (c >> 5)] >> (c & 31)) & 1:
                    if uneven:
                        half = to_even(difference, cost[h], cost[c])
                        if half <= theta:
                            continue
                    move_load(rank, load, cost, i, j, _move_within(p, h, c, half))
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
