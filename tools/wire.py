"""``python -m afore.tools.wire record|show|replay``: what roles wrote and said into files, and back against a scheduler alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from afore.core.errors import AforeError, ConfigError
from afore.core.target import Target
from afore.tools.ending import end_with
from afore.tools.printable import printable
from afore.transport.api import Lane
from afore.transport.wire_file import REMEDY, SUFFIX, WireFile

EPILOG = """\
example:
  python -m afore.tools.wire record /tmp/wire -- --demo
  python -m afore.tools.wire show /tmp/wire/scheduler-0.wire
  python -m afore.tools.wire replay /tmp/wire

exit status: 0 done, every plan came out the same; 1 the replay differs, or the recording lacks something;
2 something cannot be used. Files hold prompts and demand.
"""


ERROR_LETTERS = 2000
"""Of a refusal that are shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "record":
            return _record(options.directory, options.arguments)
        if options.command == "show":
            return _show(options.file, options.json)
        return _replay(options.directory, options.output, options.json)
    except AforeError as error:
        # Names in a damaged file may be anything.
        print(f"wire: {printable(str(error), ERROR_LETTERS)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.wire",
        description="Records control messages and one-sided writes with their times, and plays them back to one role alone.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="record|show|replay")
    recording = commands.add_parser(
        "record",
        help="run the launcher with --record-wire DIR",
        epilog="example: python -m afore.tools.wire record /tmp/wire -- --demo",
    )
    recording.add_argument("directory", type=Path, metavar="DIR", help="gets a file for each role")
    recording.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of afore.launch, behind --")
    showing = commands.add_parser(
        "show", help="print a file, a line a record", epilog="example: python -m afore.tools.wire show scheduler-0.wire"
    )
    showing.add_argument("file", type=Path, metavar="FILE", help=f"a role's file, *{SUFFIX}")
    replaying = commands.add_parser(
        "replay",
        help="play a recording back to a fresh scheduler, and compare its plans",
        epilog="example: python -m afore.tools.wire replay /tmp/wire --json",
    )
    replaying.add_argument("directory", type=Path, metavar="DIR", help="directory that was given to record")
    replaying.add_argument(
        "--output", type=Path, metavar="DIR", help="keep the recording of the replay there (default: nowhere)"
    )
    for command in (showing, replaying):
        command.add_argument("--json", action="store_true", help="for programs")
    return parser


def _record(directory: Path, arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "afore.launch", "--record-wire", str(directory), *arguments]
    try:
        return subprocess.call(command)
    except KeyboardInterrupt:
        return 130  # the launcher has heard it too


def _show(path: Path, as_json: bool) -> int:
    file = WireFile(path)
    first_ns: int | None = None
    for record in file.records():
        first_ns = record[1] if first_ns is None else first_ns
        try:
            line = json.dumps(_plain(record)) if as_json else printable(_line(*record))
        except RecursionError as error:
            raise ConfigError(str(path), "holds a message of too many levels to be shown", REMEDY) from error
        print(line if as_json else f"{(record[1] - first_ns) / 1e3:>14,.1f}  {line}")
    if file.torn:
        print("wire: it ends within a record: its role was killed, or still runs", file=sys.stderr)
    return 0


def _plain(value: Any) -> Any:
    """``value`` as JSON carries it: bytes, keys of inner maps too, as hex."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _line(kind: str, _: int, *rest: Any) -> str:
    if kind == "write":
        peer, lane, _, region, offset, _, nbytes, notify = rest
        bell = "" if notify is None else f", notifies {notify:#010x}"
        return f"write    {Lane(lane).name.lower():<8}{peer} region {region} at {offset}, {nbytes:,} bytes{bell}"
    if kind == "read":
        peer, lane, _, region, offset, nbytes = rest
        return f"read     {Lane(lane).name.lower():<8}{peer} region {region} at {offset}, {nbytes:,} bytes"
    if kind == "message":
        way, channel, peer, message = rest
        fields = ", ".join(f"{name}={value!r}" for name, value in message.items() if name != "@")
        return f"{'receive' if way == 'in' else 'send':<9}{message.get('@')} channel {channel} ({peer}): {fields}"
    if kind == "entry":
        return f"entry    {rest[0]}, {len(rest[1])} bytes"
    if kind in ("asked", "predicted"):
        return f"{kind:<8} {Target.from_word(rest[0])}"
    if kind == "region":
        return f"region   {rest[0]}: {', '.join(f'{key[2]} at {key[1]}' for key in rest[1])}"
    return f"{kind:<9}{', '.join(map(str, rest))}"


def _replay(directory: Path, output: Path | None, as_json: bool) -> int:
    # Only here: a role's world brings torch.
    from afore.serving.roles import RealWorld
    from afore.tools.wire_recorded import read_directory
    from afore.tools.wire_replay import replay

    recorded = read_directory(directory)
    with tempfile.TemporaryDirectory(prefix="afore-wire-") as scratch:
        found = replay(recorded, RealWorld(), output or Path(scratch))
    shown = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "entries"}
    if as_json:
        print(json.dumps({"same": found.same, **shown}))
    else:
        for line in _verdict(shown):
            print(printable(line))
    return 0 if found.same else 1


def _verdict(found: dict[str, Any]) -> Iterator[str]:
    yield f"played to a fresh scheduler-0: {found['messages']:,} messages, {found['writes']:,} one-sided writes"
    yield f"plans: {found['recorded']:,} recorded, {found['replayed']:,} replayed, {found['identical']:,} identical"
    if found["first_difference"] is not None:
        yield f"the first that differs: sequence {found['first_difference']}"
    yield from (f"problem: {problem}" for problem in found["problems"])


if __name__ == "__main__":
    end_with(main)
