"""The search of ``afore-plus``: where Algorithm 1 stays above the bound, exact flow and copies across its cut.

It works on the planner's packed buffer (``core_layout``) and a scratch array (``plus_layout``). A candidate replaces Algorithm 1's
plan only if its most loaded worker has no more tiles and its net cost (β_tile · maximum + exposed copy time) is less: the result is
never worse in either. Copies pay against the best that flow alone reaches, which is the A^base of its gain (eq. 8).
"""

from __future__ import annotations

from afore.scheduler.core_layout import (
    H_COPIES,
    H_COPY_CAP,
    H_MAX_TILES,
    H_TILE_TOKENS,
    H_TRIED,
    H_WITHIN_MAX_TILES,
    Counts,
    Flags,
    Parts,
    Rates,
    bind,
    compiled,
)
from afore.scheduler.plus_bound import least_by_reach
from afore.scheduler.plus_copies import copy_until, take_back
from afore.scheduler.plus_flow import level
from afore.scheduler.plus_layout import KEPT, MADE, SEARCH, Scratch, copy_words

MOST_TARGETS = 8
"""Target loads that are tried where copies are exposed, so that fewer copies may cost less."""


@compiled
def _exposed(p: Parts, q: Scratch, copy_us: float, window_us: float) -> float:
    """Exposed time of the copies made (eq. 7)."""
    copies, primary, sent, received = p.copies, p.primary, p.sent, p.received
    sent[:] = 0
    received[:] = 0
    busiest = 0
    for i in range(q.counts[MADE]):
        home, c = primary[copies[3 * i]], copies[3 * i + 1]
        sent[home] += 1
        received[c] += 1
        busiest = max(busiest, sent[home], received[c])
    return max(0.0, copy_us * busiest - window_us)


@compiled
def _keep(p: Parts, q: Scratch) -> None:
    """What stands now is the best candidate."""
    made = q.counts[MADE]
    copy_words(q.kept_tiles, p.tiles, p.tiles.size)
    copy_words(q.kept_copies, p.copies, 3 * made)
    copy_words(q.kept_old, q.old, made)
    q.counts[KEPT] = made


@compiled
def _restore(p: Parts, q: Scratch) -> None:
    """The best candidate stands again; before it, nothing may."""
    copies, N = p.copies, p.load.size
    R = p.owner.size // N
    made = q.counts[KEPT]
    for i in range(made):
        copies[3 * i], copies[3 * i + 1], copies[3 * i + 2] = (
            q.kept_copies[3 * i], q.kept_copies[3 * i + 1], q.kept_copies[3 * i + 2],
        )  # fmt: skip
        s = copies[3 * i + 1] * R + copies[3 * i + 2]
        bind(p, s, copies[3 * i])
        p.reserved[s] = 1
        q.old[i] = q.kept_old[i]
    q.counts[MADE] = made
    copy_words(p.tiles, q.kept_tiles, p.tiles.size)


@compiled
def _sum_loads(p: Parts) -> None:
    """Loads from tiles: the log of Algorithm 1 undoes tiles and cells only."""
    load, primary, owner, tiles, E = p.load, p.primary, p.owner, p.tiles, p.head.size
    load[:] = 0
    for e in range(E):
        load[primary[e]] += tiles[e]
    for s in range(owner.size):
        load[owner[s]] += tiles[E + s]


@compiled
def _needs(q: Scratch, demand: Counts, M: int, theta: int) -> None:
    """Tiles of every expert that may move. A float64 quotient is exact here (``core_within.EXACT_QUOTIENT``) and much faster."""
    need, met = q.need, q.met
    for e in range(demand.size):
        k = int((demand[e] + M - 1) / M)
        need[e] = k if k > theta else 0
        met[e] = 0
    q.counts[SEARCH] = 0


@compiled
def _set_aside(p: Parts, q: Scratch) -> None:
    """Algorithm 1's plan is the first candidate; then its copies are undone from its log."""
    header, tiles, undo, E = p.header, p.tiles, p.undo, p.head.size
    made = header[H_COPIES]
    q.counts[MADE] = made
    for i in range(made):
        q.old[i] = undo[5 * i + 2]
    _keep(p, q)
    for i in range(made - 1, -1, -1):
        s = undo[5 * i + 1]
        tiles[undo[5 * i + 4]] += undo[5 * i + 3]
        tiles[E + s] -= undo[5 * i + 3]
        bind(p, s, undo[5 * i + 2])
        p.reserved[s] = 0


@compiled
def improve(
    p: Parts, q: Scratch, demand: Counts, protected: Flags, theta: int, bound: int, gain_us: float, rates: Rates
) -> float:
    """Leaves the best candidate in the buffer; returns its gain. Algorithm 1's plan is in it, with ``gain_us``."""
    tile_us, copy_us, window_us = rates
    header = p.header
    greedy_max = best_max = header[H_MAX_TILES]
    _needs(q, demand, header[H_TILE_TOKENS], theta)
    _set_aside(p, q)
    best_us = tile_us * greedy_max + _exposed(p, q, copy_us, window_us)
    q.counts[MADE] = 0
    bound = least_by_reach(p, q, protected, bound)
    if greedy_max == bound:
        _restore(p, q)
        return gain_us
    _sum_loads(p)
    within = level(p, q, bound)
    flow_us = tile_us * within
    greedy, stands = True, False  # what is best, and whether it is what the buffer holds now
    if within <= greedy_max and flow_us <= best_us:
        greedy, stands = False, True
        best_us, best_max, gain_us = flow_us, within, 0.0
    tried = 0
    if within > bound and header[H_COPY_CAP] > 0 and tile_us > 0.0:
        if stands:
            _keep(p, q)
        copy_words(q.base_tiles, p.tiles, p.tiles.size)
        copy_words(q.base_load, p.load, p.load.size)
        step = max(1, (within - bound) // MOST_TARGETS)
        for target in range(bound, within, step):
            if tile_us * target >= best_us or target > greedy_max:
                break
            take_back(p, q)
            reached = copy_until(p, q, target, min(within, greedy_max + 1), protected)
            stands = False
            tried = max(tried, q.counts[MADE])
            if reached >= within or reached > greedy_max:
                break
            exposed = _exposed(p, q, copy_us, window_us)
            kept_us = flow_us - tile_us * reached - exposed
            if tile_us * reached + exposed < best_us and kept_us > 0.0:
                greedy, stands = False, True
                best_us, best_max, gain_us = tile_us * reached + exposed, reached, kept_us
            if exposed == 0.0:
                break  # a higher target would not be cheaper
            if stands:
                _keep(p, q)
    if not stands:
        if q.counts[MADE] > 0:
            take_back(p, q)
        _restore(p, q)
    if greedy:
        return gain_us
    header[H_COPIES] = q.counts[MADE]
    header[H_MAX_TILES] = best_max
    header[H_WITHIN_MAX_TILES] = within
    header[H_TRIED] = tried
    return gain_us
