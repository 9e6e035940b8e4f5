"""What the files of a recorded run say about its scheduler: what it did, in its own order, and what others wrote to it."""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afore.core.control import OpenEpoch
from afore.core.errors import ConfigError
from afore.core.messages import from_wire
from afore.core.record import record
from afore.core.topology import ATTENTION, FFN, SCHEDULER, member_name
from afore.transport.records import DEMAND_HEADER, FEEDBACK
from afore.transport.routed_names import is_routed
from afore.transport.wire_file import SUFFIX, WireFile

MEMBER = member_name(SCHEDULER, 0)
_TARGET, _SOURCE = DEMAND_HEADER.names.index("target"), DEMAND_HEADER.names.index("source")
_NUMBER, _WORKER = FEEDBACK.names.index("number"), FEEDBACK.names.index("worker")


@record
class Write:
    """One one-sided write into a region of the scheduler."""

    t_ns: int
    writer: str
    lane: int
    label: str
    """Of the region."""
    offset: int
    data: bytes
    notify: int | None


@dataclass(slots=True)
class Recorded:
    """A recording, sorted by what a replay does with it."""

    address: str
    did: list[tuple[str, int, Any]] = field(default_factory=list)
    """(kind, t_ns, what) in the scheduler's order: ``in`` and ``out`` (a message), ``asked`` and ``predicted`` (a target word),
    ``heard`` (records of each worker)."""
    entries: dict[int, bytes] = field(default_factory=dict)
    """By sequence."""
    vectors: dict[int, list[Write]] = field(default_factory=lambda: defaultdict(list))
    """Demand, by target word."""
    predictions: dict[int, list[Write]] = field(default_factory=lambda: defaultdict(list))
    """Predicted demand, likewise."""
    feedback: dict[int, dict[int, Write]] = field(default_factory=lambda: defaultdict(dict))
    """By worker and number."""
    others: deque[Write] = field(default_factory=deque)
    """What else was written, by time."""
    problems: list[str] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """Control messages, both ways."""
        return sum(kind in ("in", "out") for kind, _, _ in self.did)

    @property
    def writes(self) -> int:
        """One-sided writes."""
        return sum(map(len, (*self.vectors.values(), *self.predictions.values(), *self.feedback.values(), self.others)))

    def demand(self, target: int, t_ns: int) -> list[Write]:
        """The vectors that the target was planned on at ``t_ns``: the last of each source (an aborted step is announced anew)."""
        return _last_of_each(self.vectors[target], t_ns)

    def predicted(self, target: int, t_ns: int) -> list[Write]:
        """The predictions of the target that were taken at ``t_ns``."""
        return _last_of_each(self.predictions[target], t_ns)


def _last_of_each(vectors: list[Write], t_ns: int) -> list[Write]:
    last = {DEMAND_HEADER.unpack_from(one.data)[_SOURCE]: one for one in vectors if one.t_ns <= t_ns}
    return [last[source] for source in sorted(last)]


def read_directory(directory: Path) -> Recorded:
    """Gathers what went to the scheduler. Raises ``ConfigError`` where its own file is missing or cannot be used."""
    paths = sorted(directory.glob(f"*{SUFFIX}")) if directory.is_dir() else []
    by_member: dict[str, WireFile] = {}
    for file in map(WireFile, paths):
        if file.member in by_member:
            both = f"{by_member[file.member].path.name} and {file.path.name}"
            raise ConfigError(str(directory), f"{both} are both of {file.member}", "keep one run in a directory")
        by_member[file.member] = file
    if MEMBER not in by_member:
        names = ", ".join(by_member) or "none"
        raise ConfigError(
            str(directory), f"has no recording of {MEMBER} (of: {names})", "record with --record-wire DIR"
        )
    own = by_member[MEMBER]
    if is_routed(own.address):
        raise ConfigError(str(directory), "was recorded on several nodes", "replay takes a cluster of one node")
    try:
        return _gathered(own, by_member)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ConfigError(str(directory), f"holds a damaged record: {error}", "record the run again") from error


def _gathered(own: WireFile, by_member: Mapping[str, WireFile]) -> Recorded:
    found = Recorded(own.address)
    ended = False
    labels: dict[tuple[str, int], str] = {}
    for kind, t_ns, *rest in own.records():
        if kind == "region":
            label, keys = rest
            labels.update({(address, region): label for _, address, region, _, _ in keys})
        elif kind == "message":
            way, _, _, message = rest
            found.did.append((way, t_ns, message))
        elif kind in ("asked", "predicted", "heard"):
            found.did.append((kind, t_ns, rest[0]))
        elif kind == "entry":
            found.entries[rest[0]] = rest[1]
        elif kind == "end":
            ended = True
        if kind == "end" and rest[1]:
            found.problems.append(f"{own.path.name}: {rest[1]} records were dropped")
    if not ended and not own.torn:
        found.problems.append(f"{own.path.name}: has no end; what came last may be missing")
    found.problems += [
        f"{member} was a member, and has no file" for member in _members(found) if member not in by_member
    ]
    writes: list[Write] = []
    for file in by_member.values():
        for kind, t_ns, *rest in file.records():
            if kind == "write":
                _, lane, address, region, offset, data, _, notify = rest
                label = labels.get((address, region))
                if label is not None and data is not None:
                    writes.append(Write(t_ns, file.member, lane, label, offset, data, notify))
        if file.torn:
            found.problems.append(f"{file.path.name}: ends within a record; what its role wrote last is missing")
    for write in sorted(writes, key=lambda write: write.t_ns):
        _sort_in(found, write)
    return found


def _members(found: Recorded) -> list[str]:
    """Those of the epoch that was served, but for the door, which writes nothing into a scheduler's memory."""
    opened = [from_wire(what) for kind, _, what in found.did if kind == "in" and what.get("@") == "OpenEpoch"]
    members = opened[-1].members if opened and isinstance(opened[-1], OpenEpoch) else ()
    return [member_name(one.role, one.rank) for one in members if one.role in (ATTENTION, FFN)]


def _sort_in(found: Recorded, write: Write) -> None:
    if write.label in ("mailbox", "predictions") and len(write.data) >= DEMAND_HEADER.nbytes:
        vectors = found.vectors if write.label == "mailbox" else found.predictions
        vectors[DEMAND_HEADER.unpack_from(write.data)[_TARGET]].append(write)
    elif write.label == "feedback" and len(write.data) >= FEEDBACK.nbytes:
        fields = FEEDBACK.unpack_from(write.data)
        found.feedback[fields[_WORKER]][fields[_NUMBER]] = write
    else:
        found.others.append(write)
