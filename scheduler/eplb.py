"""EPLB's two steps, replicate and pack (DeepSeek's public algorithm), as pure functions; what is ours is said where it is.

Letters: E experts, N workers, R redundant slots of a worker, S slots of a worker where everything moves, X items to pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.slots import NO_SUCH_SLOT

Numbers = NDArray[np.integer[Any]] | NDArray[np.floating[Any]]


def replicate(load_E: Numbers, extra: int, most: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(copies of each expert [E], experts of the replicas in the order in which they were given).

    Each expert has one copy; each of ``extra`` replicas goes to the greatest load/copies, the first on ties.

    ``most``: copies that an expert can have at most (ours; with it, slots that no expert with load can use stay free).
    """
    load = np.asarray(load_E, np.float64)
    copies_E = np.ones(load.shape, np.int64)
    given: list[int] = []
    for _ in range(extra):
        each_E = load / copies_E
        if most is not None:
            each_E[copies_E >= most] = 0.0
            if not each_E.any():
                break
        given.append(int(each_E.argmax()))
        copies_E[given[-1]] += 1
    return copies_E, np.array(given, np.int64)


def pack(
    load_X: Numbers,
    room_N: Sequence[int] | NDArray[np.integer[Any]],
    *,
    base_N: Numbers | None = None,
    kinds_X: NDArray[np.integer[Any]] | None = None,
    held_KN: NDArray[np.bool_] | None = None,
) -> list[int]:
    """Worker of each item: by decreasing load (the first on ties), each to the lightest worker with room (lowest rank on ties).

    Ours: ``base_N`` is what workers have to begin with; of items of one kind (``kinds_X``) a worker takes one, and none of a kind
    that it holds already (``held_KN``). -1: there is no place for it.
    """
    load = np.asarray(load_X, np.float64)
    left_N = np.array(room_N, np.int64)
    weight_N = np.zeros(left_N.shape) if base_N is None else np.array(base_N, np.float64)
    held = None if held_KN is None else held_KN.copy()
    workers = [-1] * len(load)
    for x in np.argsort(-load, kind="stable").tolist():
        open_N = left_N > 0
        if held is not None and kinds_X is not None:
            open_N &= ~held[kinds_X[x]]
        if not open_N.any():
            continue
        w = workers[x] = int(np.where(open_N, weight_N, np.inf).argmin())
        left_N[w] -= 1
        weight_N[w] += load[x]
        if held is not None and kinds_X is not None:
            held[kinds_X[x], w] = True
    return workers


def redundant_layout(
    load_E: Numbers, primaries_E: NDArray[np.integer[Any]], slots_N: NDArray[np.integer[Any]]
) -> list[list[int]]:
    """Experts of the redundant slots of each worker, primaries fixed (ours: the runtime's rule). Slots may stay free.

    Replicas weigh load/copies, primaries too; none goes where its expert is already.
    """
    N = len(slots_N)
    copies_E, expert_X = replicate(load_E, int(slots_N.sum()), most=N)
    each_E = np.asarray(load_E, np.float64) / copies_E
    base_N = np.bincount(primaries_E, weights=each_E, minlength=N)
    held_EN = primaries_E[:, None] == np.arange(N)[None, :]
    workers_X = pack(each_E[expert_X], slots_N, base_N=base_N, kinds_X=expert_X, held_KN=held_EN)
    held_N: list[list[int]] = [[] for _ in range(N)]
    for e, w in zip(expert_X.tolist(), workers_X, strict=True):
        if w >= 0:
            held_N[w].append(e)
    return held_N


def full_layout(
    load_E: Numbers, sizes_N: NDArray[np.integer[Any]], *, groups: int = 1, nodes: int = 1
) -> list[list[int]]:
    """Experts of all slots of each worker, every one movable: ``sizes_N`` slots each, at least E in all.

    Hierarchical where ``nodes`` divides ``groups`` (groups of E/groups experts go to nodes of N/nodes workers first), else global.
    Raises ``ConfigError`` where the slots are too few, groups do not divide the experts, or nodes not the workers.
    """
    load, E, N = np.asarray(load_E, np.float64), len(load_E), len(sizes_N)
    if int(np.sum(sizes_N)) < E:
        raise ConfigError("sizes_N", f"{int(np.sum(sizes_N))} slots cannot hold {E} experts", "give more slots")
    if nodes < 2 or groups % nodes:
        return _packed(load, np.arange(E), np.asarray(sizes_N))
    if E % groups or N % nodes:
        raise ConfigError(
            "policy_options.eplb",
            f"{groups} groups of {E} experts, {nodes} nodes of {N} workers",
            "let groups divide the experts and nodes the workers",
        )
    group_load = load.reshape(groups, E // groups).sum(axis=1)
    node_of_group = np.array(pack(group_load, [groups // nodes] * nodes))
    node_of_E = np.repeat(node_of_group, E // groups)
    held_N: list[list[int]] = []
    for node in range(nodes):
        workers = slice(node * (N // nodes), (node + 1) * (N // nodes))
        experts = np.flatnonzero(node_of_E == node)
        held_N.extend(_packed(load[experts], experts, np.asarray(sizes_N)[workers]))
    return held_N


def moves(before_NS: NDArray[np.integer[Any]], held_N: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """The layout [N, S] that holds ``held_N`` with the fewest changes: what a worker keeps stays in its slot.

    ``before_NS`` has -1 in empty slots and -2 where a worker has none.
    """
    after_NS = np.array(before_NS, np.int32)
    for w, experts in enumerate(held_N):
        wanted = list(experts)
        free = []
        for s, there in enumerate(after_NS[w].tolist()):
            if there in wanted:
                wanted.remove(there)
            elif there != NO_SUCH_SLOT:
                free.append(s)
        for s, e in zip(free, wanted, strict=False):
            after_NS[w, s] = e
    return after_NS


def _packed(load_X: NDArray[np.float64], experts_X: NDArray[np.int64], sizes_N: NDArray[Any]) -> list[list[int]]:
    """Replicate and pack among these workers and experts."""
    if int(sizes_N.sum()) < len(experts_X):
        raise ConfigError("sizes_N", "a node has fewer slots than its groups have experts", "give more slots")
    copies_X, more_Y = replicate(load_X, int(sizes_N.sum()) - len(experts_X))
    # Equal loads are packed in this order: every expert once, then replicas as they were given.
    item_Y = np.concatenate((np.arange(len(experts_X)), more_Y))
    workers_Y = pack((load_X / copies_X)[item_Y], sizes_N)
    held_N: list[list[int]] = [[] for _ in range(len(sizes_N))]
    for x, w in zip(item_Y.tolist(), workers_Y, strict=True):
        held_N[w].append(int(experts_X[x]))
    return held_N
