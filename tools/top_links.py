"""The links of a cluster as ``top`` finds them in shared memory: what was written last, and what waits. Read-only, one look.

Mailbox and inputs are read before replies and ring, so that what is said to wait waited at that moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from afore.core.errors import ConfigError, TransportError
from afore.core.plan import EntryKind
from afore.core.regular_file import open_regular
from afore.core.target import Target
from afore.core.topology import ATTENTION, FFN, SCHEDULER, member_name
from afore.tools.exchange_slots import Shape, Slots, find_shape, read_mirror, read_slots
from afore.tools.segments import MIRROR, Listed, find, named_regions
from afore.transport.mailbox import VectorState
from afore.transport.snapshot import MailboxSnapshot, RingSnapshot, mailbox_snapshot, ring_snapshot

LOOKS: Final = 3
"""Copies taken until one has no slot that was just being written."""
_EXCHANGE: Final = "-exchange"
_PREFIX: Final = "afore-"
Targets = tuple[Target | None, ...]
"""By microbatch."""
Snapshot = TypeVar("Snapshot", RingSnapshot, MailboxSnapshot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two roles."""

    carries: str
    """``demand``, ``plans``, ``inputs`` or ``replies``."""
    source: str
    sink: str
    elsewhere: str = ""
    """The role that is on another node, where that is why nothing is known."""
    targets: Targets | None = None
    """Last written, by microbatch (plans: the newest alone); none where it cannot be read."""
    waiting: tuple[Target, ...] = ()
    """Those of them that the other side still owes something for."""
    waits: int | None = None
    """Demand: vectors without a plan. Plans: entries that the reader has not moved past. Inputs: replies that are missing. Replies:
    those of this worker that are missing.
    """
    written: int | None = None
    """Writes so far, where they are numbered."""
    seen_ns: int = 0
    """The reader's last sign of life; 0: nothing says it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A look at everything: the ring, and the links."""

    ring: RingSnapshot | None
    links: tuple[Link, ...]


class LinkReader:
    """Looks at one run again and again; remembers shapes that it has found."""

    def __init__(self, directory: Path) -> None:
        self._root = str(directory.parent)
        self._run = directory.name.removeprefix(_PREFIX)
        self._shapes: dict[tuple[str, int], Shape] = {}

    def look(self, serving: bool, here: Collection[str]) -> Seen:
        """``serving``: every role is up somewhere; ``here``: the roles whose processes are on this machine."""
        mailbox = _look("mailbox", mailbox_snapshot, self._run, self._root)
        # For its shape and epoch; what has been planned is read last.
        early = self._ring()
        slots_A: dict[int, Slots] = {}
        mirrored_A: dict[int, Targets] = {}
        if early is not None and mailbox is not None and mailbox.epoch == early.header.epoch:
            shape = (mailbox.layout.num_microbatches, early.header.layout.num_readers, early.header.epoch)
            for attention in range(early.header.layout.num_attention):
                slots = self._exchange(member_name(ATTENTION, attention), *shape)
                if slots is not None:
                    slots_A[attention] = slots
            mirrored_A = self._mirrored(mailbox, early.header.epoch, early.header.layout.num_attention)
        ring = self._ring()
        if ring is None:
            return Seen(None, ())
        if early is None or early.header.epoch != ring.header.epoch:
            mailbox, slots_A, mirrored_A = None, {}, {}
        return Seen(ring, links(ring, mailbox, slots_A, mirrored_A, set(here) if serving else None))

    def _ring(self) -> RingSnapshot | None:
        return _look("ring", ring_snapshot, self._run, self._root)

    def _mirrored(self, mailbox: MailboxSnapshot, epoch: int, num_attention: int) -> dict[int, Targets]:
        """What this node's copy of inputs has published, by attention worker; empty where there is none."""
        with contextlib.suppress(OSError):
            for one in self._living(lambda label: (match := MIRROR.fullmatch(label)) and match["what"] == "inputs"):
                with open_regular(one.path) as file:
                    return read_mirror(
                        file, one.header.nbytes, num_attention, mailbox.layout.num_microbatches, epoch
                    )  # fmt: skip
        return {}

    def _exchange(self, member: str, num_microbatches: int, num_ffn: int, epoch: int) -> Slots | None:
        with contextlib.suppress(OSError):
            for one in self._living(lambda label: label == member + _EXCHANGE):
                with open_regular(one.path) as file:
                    known = self._shapes.get((one.path, epoch))
                    if known is None:
                        known = find_shape(file, one.header.nbytes, num_microbatches, num_ffn, epoch)
                    if known is not None:
                        self._shapes[one.path, epoch] = known
                        return read_slots(file, known, epoch)
        return None

    def _living(self, wanted: Callable[[str], object]) -> Iterator[Listed]:
        for one in named_regions(self._root, self._run):
            if wanted(one.header.label) and one.alive and not one.revoked:
                yield one


def _look(what: str, read: Callable[[bytes], Snapshot], run: str, root: str) -> Snapshot | None:
    snapshot = None
    with contextlib.suppress(ConfigError, TransportError, OSError):
        found = find(what, path=None, run=run, root=root)
        for _ in range(LOOKS):
            with open_regular(found.path) as file:
                file.seek(found.offset)
                snapshot = read(file.read())
            if not snapshot.torn:
                break
    return snapshot


def links(
    ring: RingSnapshot,
    mailbox: MailboxSnapshot | None,
    slots_A: Mapping[int, Slots],
    mirrored_A: Mapping[int, Targets],
    here: Collection[str] | None,
) -> tuple[Link, ...]:
    """Every link, from what could be read. ``here``: the roles on this machine; none: that says nothing yet. Pure."""
    attention_A = [member_name(ATTENTION, a) for a in range(ring.header.layout.num_attention)]
    ffn_N = [member_name(FFN, w) for w in range(ring.header.layout.num_readers)]
    away = Away(here)
    return (
        *(_demand(a, name, mailbox, _beyond(ring, slots_A), away) for a, name in enumerate(attention_A)),
        *(_plans(ring, w, name, away) for w, name in enumerate(ffn_N)),
        *(_inputs(name, slots_A.get(a), mirrored_A.get(a), away) for a, name in enumerate(attention_A)),
        *(
            _replies(w, worker, name, slots_A.get(a), away)
            for w, worker in enumerate(ffn_N)
            for a, name in enumerate(attention_A)
        ),
    )


@dataclass(frozen=True, slots=True)
class Away:
    """Who is on another node."""

    here: Collection[str] | None

    def __call__(self, role: str) -> str:
        """``role`` where it is on another node, else nothing."""
        return role if self.here is not None and role not in self.here else ""


def _demand(
    attention: int, name: str, mailbox: MailboxSnapshot | None, beyond: Mapping[int, Target], away: Away
) -> Link:
    if mailbox is None:
        return Link(carries="demand", source=name, sink=SCHEDULER, elsewhere=away(member_name(SCHEDULER, 0)))
    mine = [slot.seen for slot in mailbox.slots if slot.attention == attention]
    targets = tuple(seen.target if seen.state is VectorState.OK else None for seen in mine)
    waiting = tuple(t for t in targets if t is not None and not _reached(beyond.get(t.microbatch), t))
    return Link(carries="demand", source=name, sink=SCHEDULER, targets=targets, waiting=waiting, waits=len(waiting))


def _plans(ring: RingSnapshot, worker: int, name: str, away: Away) -> Link:
    newest = next((slot.entry for slot in ring.slots if slot.sequence == ring.last_sequence and slot.entry), None)
    reader = ring.readers[worker]
    return Link(
        carries="plans",
        source=SCHEDULER,
        sink=name,
        # A reader of another node has its cursor here, and its sign of life there.
        elsewhere="" if reader.seen_ns else away(name),
        targets=(None if newest is None else newest.target,),
        waits=reader.behind,
        written=0 if ring.last_sequence is None else ring.last_sequence + 1,
        seen_ns=reader.seen_ns,
    )


def _inputs(name: str, slots: Slots | None, mirrored: Targets | None, away: Away) -> Link:
    if slots is None:
        # From another node they come into a copy here; the replies are there, so who is missing is not known.
        elsewhere = away(name) if mirrored is None else ""
        return Link(carries="inputs", source=name, sink=FFN, elsewhere=elsewhere, targets=mirrored)
    owed_N = [_owed(slots, worker) for worker in range(len(slots.replies_MN[0]))]
    waiting = tuple(t for t in slots.inputs_M if t is not None and any(t in owed for owed in owed_N))
    return Link(
        carries="inputs",
        source=name,
        sink=FFN,
        targets=slots.inputs_M,
        waiting=waiting,
        waits=sum(map(len, owed_N)),
    )


def _replies(worker: int, worker_name: str, name: str, slots: Slots | None, away: Away) -> Link:
    if slots is None:
        return Link(carries="replies", source=worker_name, sink=name, elsewhere=away(name))
    waiting = _owed(slots, worker)
    targets = tuple(replies_N[worker] for replies_N in slots.replies_MN)
    return Link(carries="replies", source=worker_name, sink=name, targets=targets, waiting=waiting, waits=len(waiting))


def _owed(slots: Slots, worker: int) -> tuple[Target, ...]:
    """Targets whose inputs are there and which this worker has not replied to."""
    return tuple(
        target
        for target, replies_N in zip(slots.inputs_M, slots.replies_MN, strict=True)
        if target is not None and not _reached(replies_N[worker], target)
    )


def _beyond(ring: RingSnapshot, slots_A: Mapping[int, Slots]) -> dict[int, Target]:
    """By microbatch, the furthest target that is known to have been planned: the ring has it, or somebody replied to it."""
    planned = [slot.entry.target for slot in ring.slots if slot.entry and slot.entry.kind is not EntryKind.COPIES]
    for slots in slots_A.values():
        planned.extend(target for replies_N in slots.replies_MN for target in replies_N if target is not None)
    furthest: dict[int, Target] = {}
    for target in planned:
        if not _reached(furthest.get(target.microbatch), target):
            furthest[target.microbatch] = target
    return furthest


def _reached(at: Target | None, target: Target) -> bool:
    return at is not None and (at.step, at.layer) >= (target.step, target.layer)
