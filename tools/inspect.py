"""``python -m afore.tools.inspect ring|mailbox|inputs|regions``: what the memory of a running cluster holds, without touching it.

Segments are opened read-only and copied; nothing that runs can notice. Exit status 2, with one line, where nothing can be shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from afore.core.errors import ConfigError, TransportError
from afore.core.regular_file import open_regular
from afore.tools import hexdump
from afore.tools.ending import end_with
from afore.tools.inspect_regions import input_dump, input_json, input_lines, input_slots, region_json, region_lines
from afore.tools.inspect_views import mailbox_json, mailbox_lines, ring_json, ring_lines
from afore.tools.segments import MIRROR, Found, Listed, find, regions
from afore.transport.shm_segments import HEADER_BYTES, ROOT
from afore.transport.snapshot import mailbox_snapshot, ring_snapshot

LOOKS = 5
"""Copies taken until one has no slot that was just being written."""
CLEAR = "\x1b[H\x1b[2J"
"""What a terminal takes for an empty screen."""
_TAKES = {
    "inputs": ("path", "of", "hexdump", "attention", "microbatches"),
    "mailbox": ("path", "hexdump"),
    "regions": (),
    "ring": ("path", "of", "hexdump"),
}
"""What may be said of each."""
View = tuple[str, dict[str, object], Iterable[str], Iterable[str]]
"""(path, for programs, as text, as hexdump)."""

EPILOG = """\
example:
  python -m afore.tools.inspect regions
  python -m afore.tools.inspect ring --watch
  python -m afore.tools.inspect ring --of ffn-0              the copy of the ring that ffn-0 keeps for its node
  python -m afore.tools.inspect inputs --of ffn-0            inputs that came from attention workers of other nodes
  python -m afore.tools.inspect mailbox --run at_29600 --json

exit status: 0 shown, 2 there is nothing to show, or more than one cluster to choose from
"""


def look(found: Found, read: Callable[[bytes], Any]) -> tuple[bytes, Any]:
    """(bytes, snapshot) of a region; looks again while a slot is just being written."""
    for _ in range(LOOKS):
        with open_regular(found.path) as file:
            file.seek(found.offset)
            region = file.read()
        snapshot = read(region)
        if not snapshot.torn:
            break
    return region, snapshot


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m afore.tools.inspect",
        description="Look into a running cluster's memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        choices=("inputs", "mailbox", "regions", "ring"),
        help="the scheduler's mailbox or ring, a node's copy of inputs, or all regions that are registered",
    )
    parser.add_argument("--path", metavar="FILE", help="the segment itself")
    parser.add_argument("--run", metavar="RUN", help="run id, where several clusters run on this machine")
    parser.add_argument("--of", metavar="MEMBER", help="whose copy of the ring or of inputs, such as ffn-0")
    parser.add_argument(
        "--attention", type=int, metavar="A", help="inputs: attention workers (default: as the ring says)"
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="inputs: microbatches (default: as the mailbox says, else 2)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--hexdump", action="store_true", help="the bytes, with every field named")
    parser.add_argument(
        "--watch", type=float, nargs="?", const=0.5, metavar="SECONDS", help="again and again (default: every 0.5 s)"
    )
    parser.add_argument("--frames", type=int, metavar="COUNT", help="with --watch: end after so many")
    return parser


def main(argv: Sequence[str] | None = None, *, root: str = ROOT, now_ns: int | None = None) -> int:
    """The command. Returns the exit status: 0, or 2 after one line on standard error."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.watch is not None and not 0 <= options.watch <= 3600:
        parser.error(f"argument --watch: {options.watch:g} is not from 0 to 3600 seconds")
    _require_meant(parser, options)
    frame = 0
    while True:
        try:
            path, document, lines, dump = _view(options, root, time.monotonic_ns() if now_ns is None else now_ns)
        except (ConfigError, TransportError, OSError) as error:
            # OSError: the cluster ended between finding its segment and reading it.
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        if options.watch is not None and sys.stdout.isatty():
            print(CLEAR, end="")
        if options.json:
            indent = 2 if options.watch is None else None
            print(json.dumps({"what": options.what, "path": path, **document}, indent=indent), flush=True)
        else:
            print(path)
            for text in (*lines, *(("", *dump) if options.hexdump else ())):
                print(text)
            print("", end="", flush=True)
        frame += 1
        if options.watch is None or frame == options.frames:
            return 0
        time.sleep(options.watch)


def _require_meant(parser: _Parser, options: argparse.Namespace) -> None:
    for name in ("path", "of", "hexdump", "attention", "microbatches"):
        if getattr(options, name) not in (None, False) and name not in _TAKES[options.what]:
            takers = ", ".join(what for what, names in _TAKES.items() if name in names)
            parser.error(f"argument --{name}: {options.what} has no use for it; for {takers}")


def _view(options: argparse.Namespace, root: str, now_ns: int) -> View:
    """One look. Raises ``ConfigError`` where there is nothing to look at, ``TransportError``, ``OSError``."""
    if options.what == "regions":
        listed = list(regions(root, options.run))
        if not listed:
            where = f" of run {options.run}" if options.run is not None else ""
            raise ConfigError("regions", f"none{where} in {root}", "start a cluster")
        return root, region_json(listed), region_lines(listed), ()
    if options.what == "inputs":
        return _inputs(options, root)
    found = find(options.what, path=options.path, run=options.run, root=root, of=options.of)
    if options.what == "ring":
        region, ring = look(found, ring_snapshot)
        return found.path, ring_json(ring, now_ns), ring_lines(ring, now_ns), hexdump.ring(region, ring.header.layout)
    region, mailbox = look(found, mailbox_snapshot)
    return found.path, mailbox_json(mailbox), mailbox_lines(mailbox), hexdump.mailbox(region, mailbox.layout)


def _inputs(options: argparse.Namespace, root: str) -> View:
    """The copy of inputs that the lead of a node keeps. Its shape is said by the ring and the mailbox, where they are here."""
    listed = [one for one in regions(root, options.run) if _is_inputs(one, options.of, options.path)]
    if len(listed) != 1:
        names = ", ".join(one.path for one in listed) or "none"
        raise ConfigError(
            "inputs", f"{len(listed)} copies of inputs here: {names}", "choose with --path, --run or --of"
        )
    (one,) = listed
    num_attention, num_microbatches = options.attention, options.microbatches
    if num_attention is None:
        found = _ring_beside(one, options.of, root)
        num_attention = look(found, ring_snapshot)[1].header.layout.num_attention
    if num_microbatches is None:
        try:
            found = find("mailbox", path=None, run=one.run or None, root=root)
            num_microbatches = look(found, mailbox_snapshot)[1].layout.num_microbatches
        except ConfigError:
            num_microbatches = 2  # the default of a topology
    with open_regular(one.path) as file:
        file.seek(HEADER_BYTES)
        region = file.read(one.header.nbytes)
    slots = input_slots(region, num_attention, num_microbatches)
    return one.path, input_json(slots), input_lines(slots), input_dump(region, slots)


def _ring_beside(inputs: Listed, of: str | None, root: str) -> Found:
    """The ring that says the shape of ``inputs``: the member's copy, or on the scheduler's node, where nobody has one, its own."""
    run = inputs.run or None
    try:
        return find("ring", path=None, run=run, root=root, of=of)
    except ConfigError:
        if of is None:
            raise
        return find("ring", path=None, run=run, root=root)


def _is_inputs(listed: Listed, of: str | None, path: str | None) -> bool:
    mirror = MIRROR.fullmatch(listed.header.label)
    if mirror is None or mirror["what"] != "inputs" or path not in (None, listed.path):
        return False
    return of in (None, mirror["member"])


if __name__ == "__main__":
    end_with(main)
