"""What a ring or a mailbox holds, as text and for programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict

from afore.core.plan import PlanEntry
from afore.transport.snapshot import MailboxSnapshot, ReaderSnapshot, RingSnapshot, SlotSnapshot

# Ring


def ring_lines(snapshot: RingSnapshot, now_ns: int) -> Iterator[str]:
    """The ring for a terminal."""
    header, last = snapshot.header, snapshot.last_sequence
    alive = "alive" if os.path.exists(f"/proc/{header.writer_pid}") else "gone"
    latest = "nothing published" if last is None else f"last sequence {last}"
    newest = next((slot for slot in snapshot.slots if slot.sequence == last and last is not None), None)
    if newest is not None:
        entry = newest.entry
        what = "torn" if entry is None else f"{entry.kind.name} of {entry.target}"
        latest += f" ({what}, {ago(now_ns, newest.published_ns)} ago)" if newest.published_ns else f" ({what})"
    yield f"plan ring: epoch {header.epoch}, writer pid {header.writer_pid} ({alive}), {latest}"
    layout = header.layout
    yield (
        f"{layout.num_slots} slots, {layout.num_readers} readers, {layout.num_attention} attention workers; "
        f"an entry holds {layout.max_shares} shares and {layout.max_copies} copies"
    )
    yield ""
    yield f"{'reader':<10}{'cursor':>10}{'behind':>8}  last sign of life"
    for reader in snapshot.readers:
        yield f"{f'ffn-{reader.rank}':<10}{reader.cursor:>10}{reader.behind:>8}  {_sign_of_life(reader, now_ns)}"
    yield ""
    yield f"{'slot':>4}{'sequence':>10}  {'kind':<7}{'target':<16}{'shares':>6}{'copies':>7}  {'age':>9}  verdicts"
    for slot in snapshot.slots:
        yield _slot_line(slot, now_ns)


def _sign_of_life(reader: ReaderSnapshot, now_ns: int) -> str:
    if reader.seen_ns:
        return f"{ago(now_ns, reader.seen_ns)} ago"
    # A reader of another node writes its cursor here, and its lease into the copy of its own node.
    return "never" if reader.cursor == 0 else "on its own node; it reads"


def _slot_line(slot: SlotSnapshot, now_ns: int) -> str:
    if slot.sequence is None:
        return f"{slot.slot:>4}{'-':>10}"
    verdicts = " ".join(verdict.name for verdict in slot.verdicts)
    head = f"{slot.slot:>4}{slot.sequence:>10}  "
    # An entry of a node's copy comes without the time of its publication.
    age = f"  {ago(now_ns, slot.published_ns) if slot.published_ns else '-':>9}"
    entry = slot.entry
    if slot.problem or entry is None:
        return f"{head}{'torn' if entry is None else str(entry.target):<36}{age}  {verdicts}  ({slot.problem})"
    aborted = f" cancels {entry.cancels}" if entry.cancels >= 0 else ""
    return (
        f"{head}{entry.kind.name:<7}{entry.target!s:<16}{len(entry.shares):>6}{len(entry.copies):>7}{age}"
        f"  {verdicts}{aborted}"
    )


def ago(now_ns: int, then_ns: int) -> str:
    age_us = (now_ns - then_ns) / 1e3
    if then_ns == 0 or age_us < 0:
        return "?"  # another clock: virtual time, or a segment of an earlier boot
    return f"{age_us / 1e6:.1f} s" if age_us >= 1e6 else f"{age_us / 1e3:.1f} ms"


def ring_json(snapshot: RingSnapshot, now_ns: int) -> dict[str, object]:
    """The ring for programs."""
    return {
        "epoch": snapshot.header.epoch,
        "writer_pid": snapshot.header.writer_pid,
        "last_sequence": snapshot.last_sequence,
        "layout": asdict(snapshot.header.layout),
        "readers": [
            {
                "rank": reader.rank,
                "cursor": reader.cursor,
                "behind": reader.behind,
                "lease_age_ns": None if reader.seen_ns == 0 else now_ns - reader.seen_ns,
            }
            for reader in snapshot.readers
        ],
        "slots": [
            {
                "slot": slot.slot,
                "sequence": slot.sequence,
                "problem": slot.problem,
                "published_ns": slot.published_ns,
                "verdicts": [verdict.name for verdict in slot.verdicts],
                "entry": None if slot.entry is None else _entry_json(slot.entry),
            }
            for slot in snapshot.slots
        ],
    }


def _entry_json(entry: PlanEntry) -> dict[str, object]:
    return {
        **asdict(entry),
        "kind": entry.kind.name,
        "phase": entry.phase.name,
        "start": entry.start.name,
        "target": str(entry.target),
    }


# Mailbox


def mailbox_lines(snapshot: MailboxSnapshot) -> Iterator[str]:
    """The mailbox for a terminal."""
    layout = snapshot.layout
    yield (
        f"mailbox: epoch {snapshot.epoch}, {layout.num_attention} attention workers, "
        f"{layout.num_microbatches} microbatches, {layout.num_experts} experts"
    )
    yield ""
    yield f"{'source':<14}{'microbatch':>10}  {'last target':<16}{'phase':<9}{'pairs':>8}  state"
    for slot in snapshot.slots:
        seen = slot.seen
        target, phase = (str(seen.target), seen.phase.name) if seen.target and seen.phase is not None else ("-", "-")
        total = "-" if seen.target is None else str(seen.total)
        source = f"attention-{slot.attention}"
        yield f"{source:<14}{slot.microbatch:>10}  {target:<16}{phase:<9}{total:>8}  {seen.state.value}"


def mailbox_json(snapshot: MailboxSnapshot) -> dict[str, object]:
    """The mailbox for programs."""
    return {
        "epoch": snapshot.epoch,
        "layout": asdict(snapshot.layout),
        "slots": [
            {
                "attention": slot.attention,
                "microbatch": slot.microbatch,
                "state": slot.seen.state.value,
                "epoch": slot.seen.epoch,
                "target": None if slot.seen.target is None else str(slot.seen.target),
                "source": slot.seen.source,
                "phase": None if slot.seen.phase is None else slot.seen.phase.name,
                "total": slot.seen.total,
            }
            for slot in snapshot.slots
        ],
    }
