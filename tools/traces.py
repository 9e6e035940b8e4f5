"""``python -m afore.tools.traces``: what is in a trace; other systems' traces in; placements for other systems out."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afore.core.errors import AforeError, ConfigError, HostError
from afore.scheduler.traces import Event, TraceReader, TraceWriter
from afore.scheduler.traces.calibrate import hot_part, hottest, normal, skew
from afore.scheduler.traces.imports import KINDS, counts_of, kind_of, open_import
from afore.scheduler.traces.placement import SYSTEMS, placement_of, written
from afore.tools.bench.files import write_whole
from afore.tools.ending import end_with
from afore.tools.printable import printable

EPILOG = """\
example:
  python -m afore.launch --demo --record run.trace.npz                        # record a run
  python -m afore.launch --demo --record run.trace.npz --record_ids true      # and its tokens' experts
  python -m afore.tools.traces info run.trace.npz
  python -m afore.tools.traces import expert_distribution_recorder_17.pt -o sglang.trace.npz --top-k 8
  python -m afore.tools.traces export run.trace.npz --to sglang --workers 4 --slots 8 -o placement.json

exit status: 0 done, 1 the output cannot be written, 2 an input cannot be used
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except HostError as error:
        print(f"traces: {printable(str(error), most=1000)}", file=sys.stderr)
        return 1
    except AforeError as error:
        print(f"traces: {printable(str(error), most=1000)}", file=sys.stderr)
        return 2


def _info(options: argparse.Namespace) -> int:
    reader = TraceReader(options.trace, partial=options.partial)
    header = reader.header
    events: Counter[str] = Counter()
    sums_LE = np.zeros((header.layers, header.experts), np.int64)
    answered = copies = with_ids = 0
    steps: set[tuple[int, int]] = set()
    tokens = 0
    for row in reader.events():
        events[row.event.name.lower()] += 1
        if row.answer is not None:
            answered += row.answer.assigned
            copies += len(row.answer.copies_X5)
        if row.event is Event.DEMAND and row.demand_E is not None:
            sums_LE[row.target.layer] += row.demand_E
            with_ids += row.ids_TK is not None
            tokens += row.tokens
            if len(steps) < 1 << 20:
                steps.add((row.target.microbatch, row.target.step))
    used_LE = sums_LE[sums_LE.sum(axis=1) > 0].astype(np.float64)
    shares = normal(used_LE)[:, None] if len(used_LE) else None
    told: dict[str, Any] = {
        "trace": str(options.trace),
        **header.to_json(),
        "rows": reader.rows,
        "cut_off": reader.cut_off,
        "events": dict(events),
        "targets": events["demand"],
        "with_ids": with_ids,
        "notes": reader.notes,
        "steps": len(steps),
        "pairs": int(sums_LE.sum()),
        "plans": answered,
        "copies": copies,
        "skew_8_workers": None if shares is None else float(skew(shares, min(8, header.experts)).mean()),
        "hottest_expert": None if shares is None else hottest(shares),
        "hot_part": None if shares is None else hot_part(shares),
    }
    if options.json:
        print(json.dumps(told))
        return 0
    print(printable(f"{options.trace}: {header.source or 'a trace'}", 2000))
    print(
        f"{told['targets']:,} targets of {told['steps']:,} steps; E {header.experts}, K {header.top_k or '?'}, L {header.layers},"
        f" M {header.microbatches}; {told['pairs']:,} pairs; {with_ids:,} targets with their tokens' experts"
    )
    if header.policy:
        print(
            printable(
                f"a run: policy {header.policy}, N {header.workers}, R {header.slots}, M_tile {header.tile_tokens}, AFORE"
                f" {header.version}; {answered:,} plans, {copies:,} copies"
            )
        )
    others = {name: count for name, count in sorted(events.items()) if name != "demand"}
    if others:
        print("other rows: " + ", ".join(f"{count:,} {name}" for name, count in others.items()))
    if shares is not None:
        print(
            f"all targets together: most loaded of {min(8, header.experts)} workers {told['skew_8_workers']:.2f} times the mean,"
            f" hottest expert {told['hottest_expert']:.1f} times, one expert in 16 has {told['hot_part']:.1%}"
        )
    if reader.cut_off:
        print("it is cut off: these are its whole chunks")
    return 0


def _keep_inputs(output: Path, inputs: Sequence[Path]) -> None:
    """Raises ``ConfigError`` where the output would take an input's place."""
    for path in inputs:
        if output.exists() and path.exists() and output.samefile(path):
            raise ConfigError("--output", f"{output} is what is read", "name another file")


def _import(options: argparse.Namespace) -> int:
    _keep_inputs(options.output, options.files)
    found = open_import(
        options.files,
        options.format,
        tokens=options.tokens,
        experts=options.experts,
        top_k=options.top_k,
        model=options.model,
    )
    with TraceWriter(options.output, found.header) as out:
        for row in found.rows:
            out.add(row)
    kind = options.format or kind_of(options.files[0])
    told = {
        "trace": str(options.output),
        "format": kind,
        "targets": out.rows,
        "digest": out.digest,
        "notes": found.notes,
    }
    if options.json:
        print(json.dumps({**told, **found.header.to_json()}))
        return 0
    header = found.header
    print(
        printable(
            f"{options.output}: {out.rows:,} targets, E {header.experts}, K {header.top_k or '?'}, L {header.layers}; {kind};"
            f" digest {out.digest}",
            2000,
        )
    )
    for note in found.notes:
        print(printable(note, 1000))
    return 0


def _export(options: argparse.Namespace) -> int:
    _keep_inputs(options.output, [options.trace])
    counts_LE = counts_of(options.trace, partial=options.partial)
    placement = placement_of(
        counts_LE, options.workers, options.slots, fixed=options.fixed_primaries, first_layer=options.dense_layers
    )
    write_whole(str(options.output), written(placement, options.to))
    told = {
        "placement": str(options.output),
        "system": options.to,
        "layers": len(placement.experts_LNS),
        "workers": placement.workers,
        "slots_of_a_worker": len(placement.experts_LNS[0][0]),
    }
    if options.json:
        print(json.dumps(told))
    else:
        print(
            printable(
                f"{options.output}: {told['layers']} layers, {told['workers']} workers of {told['slots_of_a_worker']} slots,"
                f" for {options.to}",
                1000,
            )
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.traces",
        description="Traces of targets: looked at, read from other systems' files, and made into their placements.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="info|import|export")
    info = commands.add_parser(
        "info",
        help="what a trace holds, and how skewed it is",
        epilog="example: python -m afore.tools.traces info run.trace.npz",
    )
    info.add_argument("trace", type=Path, metavar="TRACE")
    info.set_defaults(run=_info)
    importing = commands.add_parser(
        "import",
        help="read another system's trace: " + ", ".join(KINDS),
        epilog="example: python -m afore.tools.traces import expert_distribution_recorder_17.pt -o t.trace.npz --top-k 8",
    )
    importing.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a file, vLLM's one a request, or a directory"
    )
    importing.add_argument("-o", "--output", type=Path, required=True, metavar="TRACE", help="the trace to write")
    importing.add_argument("--format", choices=KINDS, help="(by suffix and content)")
    importing.add_argument("--tokens", type=_whole(1), default=256, help="of a target, where tokens are known (256)")
    importing.add_argument(
        "--experts", type=_whole(1), help="E, where tokens' experts do not say it (next power of two)"
    )
    importing.add_argument("--top-k", type=_whole(0), default=0, help="K, where counts do not say it")
    importing.add_argument("--model", default="", help="its name, for the header")
    importing.set_defaults(run=_import)
    exporting = commands.add_parser(
        "export",
        help="EPLB's placement for a trace's counts, as another system reads it: " + ", ".join(SYSTEMS),
        epilog="example: python -m afore.tools.traces export t.trace.npz --to tensorrt-llm --workers 8 --slots 4 -o eplb.yaml",
    )
    exporting.add_argument("trace", type=Path, metavar="TRACE")
    exporting.add_argument("--to", choices=SYSTEMS, required=True)
    exporting.add_argument("--workers", type=_whole(1, 4096), required=True, metavar="N", help="EP size")
    exporting.add_argument(
        "--slots", type=_whole(0, 1024), required=True, metavar="R", help="redundant slots of a worker"
    )
    exporting.add_argument("--dense-layers", type=_whole(0, 2047), default=0, help="before the first MoE layer (0)")
    exporting.add_argument("--fixed-primaries", action="store_true", help="only redundant slots are placed")
    exporting.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    exporting.set_defaults(run=_export)
    for command in (info, importing, exporting):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    for command in (info, exporting):
        command.add_argument("--partial", action="store_true", help="read the whole chunks of a trace that was cut off")
    return parser


def _whole(least: int, most: int = 1 << 20) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return number

    return parse


if __name__ == "__main__":
    end_with(main)
