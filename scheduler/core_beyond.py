"""Stage 3 of Algorithm 1: new replicas, kept up to the candidate of the greatest net gain (letters and parts: ``core_layout``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.scheduler.core_layout import (
    H_COPIES,
    H_COPY_CAP,
    H_LEAST_COST,
    H_MAX_TILES,
    H_MOST_COST,
    H_SLOTS,
    H_TRIED,
    Parts,
    bind,
    compiled,
)
from afore.scheduler.core_within import move_load, to_even


@compiled
def _safe_slot(p: Parts, c: int, protected: NDArray[np.bool_]) -> int:
    """An empty cell of c, else the longest unused whose replica has no work; never protected or reserved; -1: none."""
    slots, tiles, age, reserved = p.slots, p.tiles, p.age, p.reserved
    E, R = p.head.size, p.header[H_SLOTS]
    best, oldest = -1, -1
    for s in range(c * R, c * R + R):
        if slots[s] == NO_SUCH_SLOT or protected[s] or reserved[s]:
            continue
        if slots[s] == EMPTY:
            return s
        if tiles[E + s] == 0 and age[s] > oldest:
            best, oldest = s, age[s]
    return best


@compiled
def _best_beyond(p: Parts, h: int, c: int, half: int, theta: int) -> tuple[int, int]:
    """The expert not on c with most tiles to give from h (ties: lowest expert), and how many; expert < 0: none."""
    homed, slots, where, tiles, homed_from = p.homed, p.slots, p.where, p.tiles, p.homed_from
    E, N, R = homed.size, p.load.size, p.header[H_SLOTS]
    best, most = -1, theta
    for at in range(homed_from[h], homed_from[h + 1]):
        e = homed[at]
        q = min(tiles[e], half)
        if q > most and where[e * N + c] < 0:
            best, most = e, q
    for s in range(h * R, h * R + R):
        q = min(tiles[E + s], half)
        if q > theta and where[slots[s] * N + c] < 0 and (q > most or (q == most and slots[s] < best)):
            best, most = slots[s], q
    return best, most


@compiled
def _find_beyond(p: Parts, protected: NDArray[np.bool_], theta: int) -> tuple[int, int, int, int, int]:
    """First pair in order that admits a move to a new replica: (rank of h, rank of c, expert, cell, tiles)."""
    rank, load, cost, full = p.rank, p.load, p.cost, p.full
    least, uneven = p.header[H_LEAST_COST], p.header[H_MOST_COST] > 1
    N = load.size
    for i in range(N):
        h = rank[i]
        spread = load[h] - load[rank[N - 1]]
        if (to_even(spread, least, least) if uneven else spread >> 1) <= theta:
            break
        end = N
        while end > 0:
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
                if full[c]:
                    continue
                if uneven:
                    half = to_even(difference, cost[h], cost[c])
                    if half <= theta:
                        continue
                s = _safe_slot(p, c, protected)
                if s < 0:
                    full[c] = 1
                    continue
                e, q = _best_beyond(p, h, c, half, theta)
                if e >= 0:
                    return i, j, e, s, q
            end = begin
    return -1, -1, -1, -1, 0


@compiled
def rebalance_beyond(
    p: Parts, protected: NDArray[np.bool_], theta: int, bound: int, tile_us: float, copy_us: float, window_us: float
) -> float:
    """Stage 3: new replicas while they may pay; leaves the candidate of the greatest net gain (eq. 8), which it returns.

    ``tile_us`` is what a load of 1 takes.
    """
    rank, load, cost, tiles, full, copies = p.rank, p.load, p.cost, p.tiles, p.full, p.copies
    reserved, sent, received, undo, header = p.reserved, p.sent, p.received, p.undo, p.header
    E, N, R, C = p.head.size, load.size, header[H_SLOTS], header[H_COPY_CAP]
    reserved[:] = 0
    full[:] = 0
    sent[:] = 0
    received[:] = 0
    header[H_MAX_TILES] = load[rank[0]]
    before_us = tile_us * load[rank[0]]
    exposed_us, best_us = 0.0, 0.0
    busiest, made, kept = 0, 0, 0
    while made < C and (before_us - tile_us * bound) - exposed_us > best_us:
        i, j, e, s, q = _find_beyond(p, protected, theta)
        if e < 0:
            break
        h, c, home = rank[i], rank[j], p.primary[e]
        place = p.where[e * N + h]
        undo[5 * made], undo[5 * made + 1], undo[5 * made + 2] = e, s, p.slots[s]
        undo[5 * made + 3], undo[5 * made + 4] = q, place
        copies[3 * made], copies[3 * made + 1], copies[3 * made + 2] = e, c, s - c * R
        made += 1
        bind(p, s, e)
        reserved[s] = 1
        tiles[place] -= q
        tiles[E + s] = q
        full[h] = 0
        move_load(rank, load, cost, i, j, q)
        sent[home] += 1
        received[c] += 1
        busiest = max(busiest, sent[home], received[c])
        exposed_us = max(0.0, copy_us * busiest - window_us)
        gain_us = (before_us - tile_us * load[rank[0]]) - exposed_us
        if gain_us > best_us:
            best_us = gain_us
            kept = made
            header[H_MAX_TILES] = load[rank[0]]
    header[H_TRIED] = made
    while made > kept:
        made -= 1
        s = undo[5 * made + 1]
        tiles[undo[5 * made + 4]] += undo[5 * made + 3]
        tiles[E + s] = 0
        reserved[s] = 0
        bind(p, s, undo[5 * made + 2])
    header[H_COPIES] = kept
    return best_us
