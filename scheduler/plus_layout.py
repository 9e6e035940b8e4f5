"""Scratch of ``afore-plus``: one int32 array per planner, beside the packed buffer that it works on (letters: ``core_layout``)."""

from __future__ import annotations

from typing import NamedTuple

from afore.scheduler.core_layout import H_COPY_CAP, Parts, Words, compiled


class Scratch(NamedTuple):
    """Views of the scratch array. Only ``compiled`` functions touch it; nothing in it outlives a plan."""

    need: Words  # [E] tiles of the expert, 0 where θ keeps it whole on its primary: it may not move
    met: Words  # [E] number of the search that last looked at this expert
    give: Words  # [E] tiles of the expert on overloaded workers
    over: Words  # [E] tiles of those workers above the target
    donors: Words  # [E] the experts with such tiles
    seen: Words  # [N] 1: on the overloaded side of the cut
    queue: Words  # [N] workers in the order in which the search found them
    parent: Words  # [N] worker from which this one was reached, -1: overloaded itself
    leaves: Words  # [N] place on the parent where the tiles leave
    enters: Words  # [N] place on this worker where they enter
    old: Words  # [C] expert that the cell of a copy held before
    base_tiles: Words  # [E+S] tiles by exact flow over the replicas that were there
    base_load: Words  # [N] their loads
    kept_tiles: Words  # [E+S] tiles of the best candidate
    kept_copies: Words  # [3C] its copies
    kept_old: Words  # [C] what their cells held before
    counts: Words  # [3] copies made, copies of the candidate that was kept, number of the search


MADE, KEPT, SEARCH = 0, 1, 2


def scratch_words(E: int, N: int, R: int, C: int) -> int:
    """Length of the scratch array in words."""
    return 7 * E + 6 * N + 2 * N * R + 5 * C + 3


@compiled
def copy_words(target: Words, source: Words, count: int) -> None:
    """The first ``count`` words (numba's own copy of a slice is not for code without reference counts)."""
    for i in range(count):
        target[i] = source[i]


@compiled
def scratch_of(words: Words, p: Parts) -> Scratch:
    """The scratch array's views, sized as the buffer's."""
    E, N, S, C = p.head.size, p.load.size, p.owner.size, p.header[H_COPY_CAP]
    a = 5 * E  # five of N
    b = a + 5 * N  # old
    c = b + C  # base_tiles, base_load
    d = c + E + S + N  # kept_tiles, kept_copies, kept_old
    e = d + E + S + 4 * C
    return Scratch(
        words[:E], words[E : 2 * E], words[2 * E : 3 * E], words[3 * E : 4 * E], words[4 * E : a],
        words[a : a + N], words[a + N : a + 2 * N], words[a + 2 * N : a + 3 * N],
        words[a + 3 * N : a + 4 * N], words[a + 4 * N : b],
        words[b:c], words[c : c + E + S], words[c + E + S : d],
        words[d : d + E + S], words[d + E + S : d + E + S + 3 * C], words[d + E + S + 3 * C : e],
        words[e : e + 3],
    )  # fmt: skip
