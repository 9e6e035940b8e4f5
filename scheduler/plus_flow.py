"""Exact flow of tiles over the replicas there are: every worker down to a target load, or the cut that forbids it.

Nodes are workers; an expert with tiles on one worker and a replica on another is an arc between them. Augmenting paths start at
overloaded workers and end at workers below the target. Where none is left, ``Scratch.seen`` is the overloaded side of a minimum
cut: whatever has tiles there has all its replicas there.
"""

from __future__ import annotations

from afore.scheduler.core_layout import Parts, compiled
from afore.scheduler.plus_layout import SEARCH, Scratch


@compiled
def _augment(p: Parts, q: Scratch, c: int, target: int) -> int:
    """Moves what fits along the path that found c; returns how many tiles (0: an earlier path took an arc of it)."""
    tiles, load, parent, leaves, enters = p.tiles, p.load, q.parent, q.leaves, q.enters
    most: int = target - load[c]
    w = c
    while parent[w] >= 0:
        most = min(most, tiles[leaves[w]])
        w = parent[w]
    most = min(most, load[w] - target)
    if most <= 0:
        return 0
    load[w] -= most
    load[c] += most
    w = c
    while parent[w] >= 0:
        tiles[leaves[w]] -= most
        tiles[enters[w]] += most
        w = parent[w]
    return most


@compiled
def drain(p: Parts, q: Scratch, target: int) -> bool:
    """Every worker to at most ``target`` tiles, if the replicas allow it; else as near as they do, and the cut in ``seen``."""
    head, after, owner, slots, tiles, load = p.head, p.after, p.owner, p.slots, p.tiles, p.load
    primary, homed, homed_from = p.primary, p.homed, p.homed_from
    need, met, seen, queue, parent, leaves, enters = q.need, q.met, q.seen, q.queue, q.parent, q.leaves, q.enters
    E, N = head.size, load.size
    R = owner.size // N
    excess = 0
    for w in range(N):
        excess += max(0, load[w] - target)
    while excess > 0:
        q.counts[SEARCH] += 1
        search = q.counts[SEARCH]
        tail = 0
        for w in range(N):
            seen[w] = 0
            if load[w] > target:
                seen[w] = 1
                parent[w] = -1
                queue[tail] = w
                tail += 1
        moved = 0
        at = 0
        while at < tail and moved < excess:
            h = queue[at]
            at += 1
            first = homed_from[h]
            own = homed_from[h + 1] - first
            for i in range(own + R):
                if i < own:
                    e = homed[first + i]
                    place = e
                else:
                    place = E + h * R + i - own
                    e = slots[place - E]
                    if e < 0:
                        continue
                if tiles[place] == 0 or need[e] == 0 or met[e] == search:
                    continue
                met[e] = search
                c, enter, s = primary[e], e, head[e]
                while True:
                    if not seen[c]:
                        parent[c] = h
                        leaves[c] = place
                        enters[c] = enter
                        if load[c] < target:
                            moved += _augment(p, q, c, target)
                        if load[c] >= target:
                            seen[c] = 1
                            queue[tail] = c
                            tail += 1
                        elif tiles[place] == 0:
                            met[e] = 0  # may be looked at again from another worker
                            break
                    if s < 0:
                        break
                    c, enter, s = owner[s], E + s, after[s]
        if moved == 0:
            return False
        excess -= moved
    return True


@compiled
def level(p: Parts, q: Scratch, bound: int) -> int:
    """The least maximum that the replicas there are allow, reached; from ``bound`` upward over the cuts (Newton's method)."""
    target = bound
    while not drain(p, q, target):
        target = least_above(p, q, target)
    return target


@compiled
def least_above(p: Parts, q: Scratch, target: int) -> int:
    """What the overloaded side of the cut needs at least, as nothing can leave it."""
    load, seen = p.load, q.seen
    inside, tiles = 0, 0
    for w in range(load.size):
        if seen[w]:
            inside += 1
            tiles += load[w]
    return max(target + 1, (tiles + inside - 1) // inside)
