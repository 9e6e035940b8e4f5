"""``python -m afore.tools.inspect ring|mailbox``: what the shared memory of a running cluster holds, without touching it.

Segments are opened read-only and copied; nothing that runs can notice. Exit status 2, with one line, where nothing can be shown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from afore.core.errors import ConfigError, TransportError
from afore.core.plan import PlanEntry
from afore.tools import hexdump
from afore.tools.ending import end_with
from afore.transport.records import MAILBOX_MAGIC, RING_MAGIC
from afore.transport.shm_segments import NAME, ROOT
from afore.transport.snapshot import (
    MailboxSnapshot,
    RingSnapshot,
    SlotSnapshot,
    mailbox_snapshot,
    ring_snapshot,
)

PAGE = 4096
MAGICS = {"ring": RING_MAGIC, "mailbox": MAILBOX_MAGIC}
LOOKS = 5
"""Copies taken until one has no slot that was just being written."""


@dataclass(frozen=True, slots=True)
class Found:
    """A region in a file: behind a header of whole pages, or at its start."""

    path: str
    offset: int


def find(what: str, *, path: str | None, run: str | None, root: str) -> Found:
    """The one region to look at. Raises ``ConfigError`` when there is none, or more than one."""
    if path is not None:
        try:
            found = _locate(path, what)
        except OSError as error:
            raise ConfigError("--path", f"cannot read {path}: {error.strerror}") from error
        if found is None:
            raise ConfigError("--path", f"{path} holds no {what}", f"name the segment of a scheduler's {what}")
        return found
    candidates = []
    unreadable = ""
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        match = NAME.fullmatch(name)
        if match and what in match["label"] and run in (None, match["run"]):
            try:
                located = _locate(os.path.join(root, name), what)
            except OSError as error:
                unreadable = f"; {name} cannot be read: {error.strerror}"
                continue
            if located is not None:
                candidates.append((match["run"], located))
    where = f"of run {run} " if run is not None else ""
    if not candidates:
        raise ConfigError(
            what, f"no {what} {where}in {root}{unreadable}", "start a cluster with the shm fabric, or give --path"
        )
    if len(candidates) > 1:
        listed = ", ".join(f"{os.path.basename(found.path)} (run {name})" for name, found in candidates)
        raise ConfigError(
            what, f"{len(candidates)} {what} segments {where}in {root}: {listed}", "choose with --path or --run"
        )
    return candidates[0][1]


def _locate(path: str, what: str) -> Found | None:
    """Where the region's magic stands, at a page boundary."""
    magic = MAGICS[what].to_bytes(8, "little")
    with open(path, "rb") as file:
        for offset in range(0, os.fstat(file.fileno()).st_size, PAGE):
            file.seek(offset)
            if file.read(len(magic)) == magic:
                return Found(path, offset)
    return None


def look(found: Found, read: Callable[[bytes], Any]) -> tuple[bytes, Any]:
    """(bytes, snapshot) of a region; looks again while a slot is just being written."""
    for _ in range(LOOKS):
        with open(found.path, "rb") as file:
            file.seek(found.offset)
            region = file.read()
        snapshot = read(region)
        if not snapshot.torn:
            break
    return region, snapshot


# Ring


def ring_lines(snapshot: RingSnapshot, now_ns: int) -> Iterator[str]:
    """The ring for a terminal."""
    header, last = snapshot.header, snapshot.last_sequence
    alive = "alive" if os.path.exists(f"/proc/{header.writer_pid}") else "gone"
    latest = "nothing published" if last is None else f"last sequence {last}"
    yield f"plan ring: epoch {header.epoch}, writer pid {header.writer_pid} ({alive}), {latest}"
    layout = header.layout
    yield (
        f"{layout.num_slots} slots, {layout.num_readers} readers, {layout.num_attention} attention workers; "
        f"an entry holds {layout.max_shares} shares and {layout.max_copies} copies"
    )
    yield ""
    yield f"{'reader':<10}{'cursor':>10}{'behind':>8}  last sign of life"
    for reader in snapshot.readers:
        seen = "never" if reader.seen_ns == 0 else f"{_ago(now_ns, reader.seen_ns)} ago"
        yield f"{f'ffn-{reader.rank}':<10}{reader.cursor:>10}{reader.behind:>8}  {seen}"
    yield ""
    yield f"{'slot':>4}{'sequence':>10}  {'kind':<7}{'target':<16}{'shares':>6}{'copies':>7}  {'age':>9}  verdicts"
    for slot in snapshot.slots:
        yield _slot_line(slot, now_ns)


def _slot_line(slot: SlotSnapshot, now_ns: int) -> str:
    if slot.sequence is None:
        return f"{slot.slot:>4}{'-':>10}"
    verdicts = " ".join(verdict.name for verdict in slot.verdicts)
    head = f"{slot.slot:>4}{slot.sequence:>10}  "
    age = f"  {_ago(now_ns, slot.published_ns):>9}"
    entry = slot.entry
    if slot.problem or entry is None:
        return f"{head}{'torn' if entry is None else str(entry.target):<36}{age}  {verdicts}  ({slot.problem})"
    aborted = f" cancels {entry.cancels}" if entry.cancels >= 0 else ""
    return (
        f"{head}{entry.kind.name:<7}{entry.target!s:<16}{len(entry.shares):>6}{len(entry.copies):>7}{age}"
        f"  {verdicts}{aborted}"
    )


def _ago(now_ns: int, then_ns: int) -> str:
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


def mailbox_lines(snapshot: MailboxSnapshot, now_ns: int) -> Iterator[str]:
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


def mailbox_json(snapshot: MailboxSnapshot, now_ns: int) -> dict[str, object]:
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


EPILOG = """\
example:
  python -m afore.tools.inspect ring
  python -m afore.tools.inspect mailbox --run at_29600 --json

exit status: 0 shown, 2 there is nothing to show, or more than one cluster to choose from
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None, *, root: str = ROOT, now_ns: int | None = None) -> int:
    """The command. Returns the exit status: 0, or 2 after one line on standard error."""
    parser = _Parser(
        prog="python -m afore.tools.inspect",
        description="Look into a running cluster's shared memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=sorted(MAGICS), help="which of the scheduler's regions")
    parser.add_argument("--path", metavar="FILE", help="the segment itself")
    parser.add_argument("--run", metavar="RUN", help="run id, where several clusters run on this machine")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--hexdump", action="store_true", help="the bytes, with every field named")
    arguments = parser.parse_args(argv)
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    try:
        found = find(arguments.what, path=arguments.path, run=arguments.run, root=root)
        if arguments.what == "ring":
            region, ring = look(found, ring_snapshot)
            document, lines = ring_json(ring, now_ns), ring_lines(ring, now_ns)
            dump = hexdump.ring(region, ring.header.layout)
        else:
            region, mailbox = look(found, mailbox_snapshot)
            document, lines = mailbox_json(mailbox, now_ns), mailbox_lines(mailbox, now_ns)
            dump = hexdump.mailbox(region, mailbox.layout)
    except (ConfigError, TransportError, OSError) as error:
        # OSError: the cluster ended between finding its segment and reading it.
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"what": arguments.what, "path": found.path, **document}, indent=2))
        return 0
    print(found.path)
    for text in (*lines, *(("", *dump) if arguments.hexdump else ())):
        print(text)
    return 0


if __name__ == "__main__":
    end_with(main)
