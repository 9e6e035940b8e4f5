"""What the plan ring carries, decoded: one entry per target under every policy, copies ahead of a target, and aborts."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from afore.core.record import record
from afore.core.target import Phase, Target


class EntryKind(enum.IntEnum):
    """PLAN: a target in execution order. COPIES: copies only (a policy that copies ahead). ABORT: cancels ``cancels``."""

    PLAN = 1
    COPIES = 2
    ABORT = 3


class CopyStart(enum.IntEnum):
    """When a copy may start: as soon as it is read and safe, or only when its target is about to execute."""

    NOW = 0
    ARRIVAL = 1


@record
class Copy:
    """Fill redundant ``slot`` of ``worker`` with ``expert`` of ``layer``, from the expert's primary."""

    layer: int
    expert: int
    worker: int
    slot: int


@record
class Share:
    """``count`` pairs of ``expert`` run on the replica in redundant ``slot`` of ``worker``; the primary runs the rest.

    ``generation`` is the ring sequence of the entry that copied that replica: readiness belongs to (layer, slot, generation).
    """

    expert: int
    worker: int
    slot: int
    count: int
    generation: int


class PlanRules(Protocol):
    """What holds of every entry of a run, whichever worker looks: see ``PlanEntry.keeps``."""

    def kept_by(self, entry: PlanEntry) -> bool: ...


class _Looked:
    """What was looked up in an entry already: in one process, all workers look at one object. No fields: they say nothing new."""

    __slots__ = ("_copies_by_worker", "_rules", "_shares_X4", "_shares_by_worker")
    _shares_by_worker: dict[int, tuple[Share, ...]]
    _copies_by_worker: dict[int, tuple[Copy, ...]]
    _shares_X4: npt.NDArray[np.int32]
    _rules: tuple[PlanRules, bool]


@record
class PlanEntry(_Looked):
    """One entry of the plan ring; ``sequence`` is the one execution order of its epoch."""

    kind: EntryKind
    epoch: int
    sequence: int
    target: Target
    phase: Phase
    tokens_A: tuple[int, ...]
    """T_a of every attention worker; those with 0 take no part."""
    demand_crc: int
    """CRC-32 of the true summed demand, under every policy."""
    shares: tuple[Share, ...]
    """Redundant replicas' counts, by expert then worker rank; with worker, slot, expert and generation: the bindings used."""
    copies: tuple[Copy, ...]
    start: CopyStart
    cancels: int
    """The sequence an ABORT cancels; -1 otherwise."""

    def shares_of(self, worker: int) -> tuple[Share, ...]:
        """The shares of one worker, in the entry's order."""
        try:
            return self._shares_by_worker.get(worker, ())
        except AttributeError:
            self._shares_by_worker = _by_worker(self.shares)
            return self._shares_by_worker.get(worker, ())

    def copies_of(self, worker: int) -> tuple[Copy, ...]:
        """The copies into one worker's slots, in the entry's order."""
        try:
            return self._copies_by_worker.get(worker, ())
        except AttributeError:
            self._copies_by_worker = _by_worker(self.copies)
            return self._copies_by_worker.get(worker, ())

    def shares_X4(self) -> npt.NDArray[np.int32]:
        """The shares as ``shares_array`` has them, read-only."""
        try:
            return self._shares_X4
        except AttributeError:
            self._shares_X4 = shares_array(self.shares)
            self._shares_X4.setflags(write=False)
            return self._shares_X4

    def keeps(self, rules: PlanRules) -> bool:
        """Whether the entry keeps ``rules``: looked at once for rules that are equal."""
        try:
            last, kept = self._rules
        except AttributeError:
            pass
        else:
            if last == rules:
                return kept
        self._rules = (rules, rules.kept_by(self))
        return self._rules[1]


_Placed = TypeVar("_Placed", Share, Copy)


def _by_worker(placed: Sequence[_Placed]) -> dict[int, tuple[_Placed, ...]]:
    found: dict[int, list[_Placed]] = {}
    for one in placed:
        found.setdefault(one.worker, []).append(one)
    return {worker: tuple(ones) for worker, ones in found.items()}


def shares_array(shares: Sequence[Share]) -> npt.NDArray[np.int32]:
    """A plan's shares as int32 [X, 4] (expert, worker, slot, count), in the plan's order."""
    if not shares:
        return np.empty((0, 4), dtype=np.int32)
    return np.array([(share.expert, share.worker, share.slot, share.count) for share in shares], dtype=np.int32)


class Verdict(enum.IntEnum):
    """What a reader says of an entry: nothing yet, accepted, or why it is refused (then everyone runs primaries)."""

    NONE = 0
    ACCEPTED = 1
    BAD_CRC = 2
    FOREIGN_EPOCH = 3
    OUT_OF_ORDER = 4
    BINDING_DISAGREES = 5
