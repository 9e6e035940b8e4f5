"""What the plan ring carries, decoded: one entry per target under every policy, copies ahead of a target, and aborts."""

from __future__ import annotations

import enum

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


@record
class PlanEntry:
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


class Verdict(enum.IntEnum):
    """What a reader says of an entry: nothing yet, accepted, or why it is refused (then everyone runs primaries)."""

    NONE = 0
    ACCEPTED = 1
    BAD_CRC = 2
    FOREIGN_EPOCH = 3
    OUT_OF_ORDER = 4
    BINDING_DISAGREES = 5
