"""New replicas across the cut that exact flow leaves, until a target load is met (``plus_flow``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.core.slots import EMPTY, NO_SUCH_SLOT
from afore.scheduler.core_layout import H_COPY_CAP, Parts, bind, compiled
from afore.scheduler.plus_flow import drain, least_above
from afore.scheduler.plus_layout import MADE, Scratch, copy_words


@compiled
def _weigh(p: Parts, q: Scratch, target: int) -> int:
    """Lists the experts with tiles on overloaded workers: ``give`` tiles there, which are ``over`` the target. Returns how many."""
    homed, homed_from, slots, tiles, load = p.homed, p.homed_from, p.slots, p.tiles, p.load
    need, give, over, donors = q.need, q.give, q.over, q.donors
    E, N = homed.size, load.size
    R = slots.size // N
    give[:] = 0
    found = 0
    for w in range(N):
        above = load[w] - target
        if above <= 0:
            continue
        first = homed_from[w]
        own = homed_from[w + 1] - first
        for i in range(own + R):
            place = homed[first + i] if i < own else E + w * R + i - own
            if tiles[place] == 0:
                continue
            e = place if i < own else slots[place - E]
            if need[e] == 0:
                continue
            if give[e] == 0:
                over[e] = 0
                donors[found] = e
                found += 1
            give[e] += tiles[place]
            over[e] += above
    return found


@compiled
def _cell(p: Parts, c: int, protected: NDArray[np.bool_]) -> tuple[int, int]:
    """The cell of c that costs least to rebind, and the tiles that its replica has now (-1: no cell may be)."""
    slots, tiles, age, reserved, E = p.slots, p.tiles, p.age, p.reserved, p.head.size
    R = slots.size // p.load.size
    best, least, oldest = -1, 0, -1
    for s in range(c * R, c * R + R):
        if slots[s] == NO_SUCH_SLOT or protected[s] or reserved[s]:
            continue
        if slots[s] == EMPTY:
            return s, 0
        n = tiles[E + s]
        if best < 0 or n < least or (n == least and age[s] > oldest):
            best, least, oldest = s, n, age[s]
    return best, least


@compiled
def _choose(p: Parts, q: Scratch, target: int, protected: NDArray[np.bool_]) -> tuple[int, int, int]:
    """(expert, worker, cell) of the copy that lets most tiles over the cut; expert < 0: none lets any.

    Among equal ones the receiver with most room, and the expert that has most to give.

    The tiles that a rebound cell gives up come back over the cut, so they count as loss, and as tiles to move.
    """
    load, seen, give, over, donors, where = p.load, q.seen, q.give, q.over, q.donors, p.where
    N = load.size
    found = _weigh(p, q, target)
    best, receiver, cell, value, room = -1, -1, -1, 0, 0
    for c in range(N):
        space = target - load[c]
        if seen[c] or space <= 0:
            continue
        s, held = _cell(p, c, protected)
        if s < 0:
            continue
        for i in range(found):
            e = donors[i]
            worth = min(give[e], over[e] + held, space + held) - held
            if worth < value or worth <= 0 or where[e * N + c] >= 0:
                continue
            if worth == value and (space - held < room or (space - held == room and give[e] <= give[best])):
                continue
            best, receiver, cell, value, room = e, c, s, worth, space - held
    return best, receiver, cell


@compiled
def _evict(p: Parts, s: int) -> None:
    """The tiles of cell s go to the least loaded other worker that has its expert."""
    head, after, owner, tiles, load, E = p.head, p.after, p.owner, p.tiles, p.load, p.head.size
    e, n = p.slots[s], tiles[E + s]
    to, place = p.primary[e], e
    at = head[e]
    while at >= 0:
        if at != s and load[owner[at]] < load[to]:
            to, place = owner[at], E + at
        at = after[at]
    tiles[E + s] = 0
    tiles[place] += n
    load[owner[s]] -= n
    load[to] += n


@compiled
def copy_until(p: Parts, q: Scratch, target: int, stop: int, protected: NDArray[np.bool_]) -> int:
    """Copies until no worker has more than ``target`` tiles, or more where that cannot be reached; gives up at ``stop``.

    Returns the maximum that was reached; ``stop`` or more: none below. Copies that got no work are taken back.
    """
    copies, old, reserved, slots, tiles, E = p.copies, q.old, p.reserved, p.slots, p.tiles, p.head.size
    R, C = p.owner.size // p.load.size, p.header[H_COPY_CAP]
    made = q.counts[MADE]
    while not drain(p, q, target):
        e = -1
        if made < C:
            e, c, s = _choose(p, q, target, protected)
        if e < 0:
            target = least_above(p, q, target)
            if target >= stop:
                break
            continue
        if slots[s] >= 0 and tiles[E + s] > 0:
            _evict(p, s)
        old[made] = slots[s]
        copies[3 * made], copies[3 * made + 1], copies[3 * made + 2] = e, c, s - c * R
        bind(p, s, e)
        reserved[s] = 1
        made += 1
    q.counts[MADE] = made
    _take_back_idle(p, q)
    return target


@compiled
def _take_back_idle(p: Parts, q: Scratch) -> None:
    """Copies without work are none: their cells hold again what they held, unless that has come to their worker otherwise."""
    copies, old, tiles, where, E, N = p.copies, q.old, p.tiles, p.where, p.head.size, p.load.size
    R = p.owner.size // N
    made = 0
    for i in range(q.counts[MADE]):
        e, c, r = copies[3 * i], copies[3 * i + 1], copies[3 * i + 2]
        s = c * R + r
        if tiles[E + s] == 0 and (old[i] < 0 or where[old[i] * N + c] < 0):
            bind(p, s, old[i])
            p.reserved[s] = 0
            continue
        copies[3 * made], copies[3 * made + 1], copies[3 * made + 2], old[made] = e, c, r, old[i]
        made += 1
    q.counts[MADE] = made


@compiled
def take_back(p: Parts, q: Scratch) -> None:
    """Every copy made is undone, and the tiles stand as before any was tried."""
    copies, old, R = p.copies, q.old, p.owner.size // p.load.size
    for i in range(q.counts[MADE] - 1, -1, -1):
        s = copies[3 * i + 1] * R + copies[3 * i + 2]
        bind(p, s, old[i])
        p.reserved[s] = 0
    q.counts[MADE] = 0
    copy_words(p.tiles, q.base_tiles, p.tiles.size)
    copy_words(p.load, q.base_load, p.load.size)
