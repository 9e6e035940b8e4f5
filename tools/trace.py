"""``python -m afore.tools.trace``: span files of a run → one Perfetto file, or a table of what took how long."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from afore.core.errors import AforeError, HostError
from afore.core.metrics import percentile
from afore.core.trace import SPANS
from afore.tools.ending import end_with
from afore.tools.printable import printable, unmarked
from afore.tools.span_table import SpanTable, build
from afore.tools.span_view import show_roles, show_target
from afore.tools.trace_files import open_directory
from afore.tools.trace_merge import merge
from afore.tools.trace_why import explain, lines, parse_target

PIPE_COLUMNS = 132
"""Of a table that goes into a file or a pipe: no column is cut or wrapped."""

EPILOG = """\
example:
  python -m afore.launch --demo --trace /tmp/spans
  python -m afore.tools.trace merge /tmp/spans -o trace.json     then open trace.json at https://ui.perfetto.dev
  python -m afore.tools.trace summary /tmp/spans --targets
  python -m afore.tools.trace why l2/m0/s17 /tmp/spans

exit status: 0 done, 2 the directory or the output cannot be used
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "merge":
            return _merge(options.directory, options.output, options.json)
        if options.command == "why":
            return _why(options.directory, options.target, options.json)
        return _summary(options.directory, options.json, options.targets)
    except AforeError as error:
        print(f"trace: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.trace",
        description="Span files of a run: merged into one Perfetto (Chrome trace) file, summarised, or one target explained.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="merge|summary|why")
    merging = commands.add_parser(
        "merge",
        help="write one Perfetto file, with Figure 7's lanes and arrows demand → plan → copy → first use",
        epilog="example: python -m afore.tools.trace merge /tmp/spans -o trace.json",
    )
    merging.add_argument(
        "-o", "--output", type=Path, default=Path("trace.json"), help="file to write (default: trace.json)"
    )
    summing = commands.add_parser(
        "summary",
        help="print count, p50, p99 and total of each span",
        epilog="example: python -m afore.tools.trace summary /tmp/spans --json",
    )
    summing.add_argument(
        "--targets", action="store_true", help="also where the time of a target goes, and the spans of each role"
    )
    explaining = commands.add_parser(
        "why",
        help="say where one target's time went, who was last, what was exposed",
        epilog="example: python -m afore.tools.trace why l2/m0/s17 /tmp/spans",
    )
    explaining.add_argument("target", metavar="TARGET", help="layer, microbatch and step, as l2/m0/s17")
    for command in (merging, summing, explaining):
        command.add_argument("directory", type=Path, metavar="DIR", help="directory that was given to --trace")
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _merge(directory: Path, output: Path, as_json: bool) -> int:
    files, problems = open_directory(directory)
    partial = output.with_name(output.name + ".partial")
    try:
        with open(partial, "w", encoding="utf-8") as out:
            summary = merge(files, out)
        os.replace(partial, output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise HostError(
            str(output), f"cannot be written: {error.strerror}", "give -o a file in a directory with room"
        ) from error
    summary.problems[:0] = problems
    if as_json:
        print(json.dumps({"output": str(output), **dataclasses.asdict(summary)}))
        return 0
    _print_problems(summary.problems)
    flows = summary.flows
    print(
        f"{printable(str(output))}: {summary.files} processes, "
        f"{summary.spans:,} spans over {summary.duration_us / 1e6:.3f} s, arrows: "
        f"{flows['demand']:,} demand → plan, {flows['copy']:,} plan → copy, {flows['use']:,} copy → first use"
        + (f" ({summary.unused_copies:,} copies were never used)" if summary.unused_copies else "")
    )
    print("open it at https://ui.perfetto.dev")
    return 0


def _summary(directory: Path, as_json: bool, targets: bool) -> int:
    files, problems = open_directory(directory)
    lengths_ns: defaultdict[str, array[int]] = defaultdict(lambda: array("Q"))  # up to twice the range of a time
    for file in files:
        backwards = 0
        for _, span in file.records():
            if span.kind == "span" and span.end_ns >= span.start_ns:
                lengths_ns[span.name].append(span.end_ns - span.start_ns)
            backwards += span.end_ns < span.start_ns
        problems += file.problems()
        if backwards:
            problems.append(f"{file.path.name}: {backwards} spans end before they start and were left out")
    rows = {name: _row(np.frombuffer(lengths_ns[name], np.uint64)) for name in SPANS if name in lengths_ns}
    table_of_targets: SpanTable | None = build(files) if targets else None
    if as_json:
        more = {"targets": dataclasses.asdict(table_of_targets)} if table_of_targets is not None else {}
        print(json.dumps({"files": len(files), "spans": rows, **more, "problems": problems}))
        return 0
    _print_problems(problems)
    if not rows:
        print(f"{printable(str(directory))}: {len(files)} processes, no spans")
        return 0
    table = Table("span", title=f"{unmarked(str(directory))}: {len(files)} processes")
    for heading in ("count", "p50 µs", "p99 µs", "total ms"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(
            name, f"{row['count']:,}", f"{row['p50_us']:,.1f}", f"{row['p99_us']:,.1f}", f"{row['total_ms']:,.2f}"
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
    console.print(table)
    if table_of_targets is not None:
        show_target(table_of_targets, console)
        show_roles(table_of_targets, console, title="spans by role")
    return 0


def _why(directory: Path, target: str, as_json: bool) -> int:
    wanted = parse_target(target)
    files, problems = open_directory(directory)
    why = explain(files, wanted)
    for file in files:
        problems += file.problems()
    if as_json:
        print(json.dumps({**dataclasses.asdict(why), "problems": problems}))
        return 0
    _print_problems(problems)
    for line in lines(why):
        print(printable(line))
    return 0


def _row(lengths_ns: np.ndarray[Any, np.dtype[np.uint64]]) -> dict[str, Any]:
    p50, p99 = percentile(lengths_ns, 50), percentile(lengths_ns, 99)
    assert p50 is not None
    assert p99 is not None
    return {
        "count": len(lengths_ns),
        "p50_us": p50 / 1e3,
        "p99_us": p99 / 1e3,
        "total_ms": float(lengths_ns.sum(dtype=np.float64)) / 1e6,
    }


def _print_problems(problems: list[str]) -> None:
    for problem in problems:
        print(f"trace: {printable(problem, most=1000)}", file=sys.stderr)


if __name__ == "__main__":
    end_with(main)
