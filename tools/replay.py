"""``python -m afore.tools.replay``: what would each policy have done on this traffic? No GPU, no cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from afore.core.errors import AforeError, ConfigError, HostError
from afore.core.policy_options import EplbOptions, HarmoenyOptions, LibraOptions, LinaOptions, PolicyOptions
from afore.scheduler.costs import Costs
from afore.scheduler.policies.eplb_full import EplbFull
from afore.scheduler.policies.registry import POLICIES, check_policy, policy_kernels
from afore.scheduler.repeat import repeat
from afore.scheduler.traces import Shape, TraceReader
from afore.tools.bench.files import write_whole
from afore.tools.ending import end_with
from afore.tools.printable import printable
from afore.tools.replay_drive import EACH, replay
from afore.tools.replay_input import Source, open_source
from afore.tools.replay_measure import Setting
from afore.tools.replay_plot import draw
from afore.tools.replay_report import COLUMNS, row_of, table_of

EVERY = (*POLICIES, EplbFull.name)
COLUMNS_OF_A_PIPE = 150
"""Of a table that goes into a file or a pipe."""

EPILOG = """\
TRACE is a recording (--record of the launcher), an imported trace (python -m afore.tools.traces import), or routing as it
was published: an .npz with ids [tokens, layers, K] or <domain>_cnt [chunks, layers, E]; several with commas are mixed.

example:
  python -m afore.tools.replay run.trace.npz --policy all --ep 8 --json replay.json --out pictures
  python -m afore.tools.replay intent.npz,summary.npz counts.npz --ep 2,4,8,16,32,64,128 --slots 2,4,8 --targets 200
  python -m afore.tools.replay counts.npz --skew paper --policy afore,eplb --optimum 1
  python -m afore.tools.replay run.trace.npz --verify      # does the run's policy answer again as it did?

exit status: 0 done, 1 the output cannot be written, or --verify found another plan, 2 an input cannot be used
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        return _verify(options) if options.verify else _replay(options)
    except HostError as error:
        print(f"replay: {printable(str(error), most=1000)}", file=sys.stderr)
        return 1
    except AforeError as error:
        print(f"replay: {printable(str(error), most=1000)}", file=sys.stderr)
        return 2


def _verify(options: argparse.Namespace) -> int:
    status, found = 0, []
    for name in options.traces:
        reader = TraceReader(name, partial=options.partial, ids=False)
        result = repeat(reader)
        status |= result.different > 0
        found.append({"trace": name, "policy": reader.header.policy, "targets": result.targets, "copies": result.copies,
                      "different": result.different, "first": result.first})  # fmt: skip
        if options.json != "-":
            same = (
                f"{result.different:,} answers differ; {result.first}"
                if result.different
                else "every answer is the recorded one"
            )
            print(
                printable(
                    f"{name}: {reader.header.policy}, {result.targets:,} targets, {result.copies:,} copies: {same}",
                    1000,
                )
            )
    _write_json(options.json, found)
    return status


def _replay(options: argparse.Namespace) -> int:
    for policy in options.policy:
        if policy != EplbFull.name:
            check_policy(policy)
            policy_kernels(policy)[0]()  # the planner's: no plan waits for the compiler
    console = Console(width=None if sys.stdout.isatty() else COLUMNS_OF_A_PIPE, stderr=options.json == "-")
    shape = Shape(
        microbatches=options.microbatches,
        tokens=options.tokens,
        layers=options.layers,
        seed=options.seed,
        skew=options.skew,
    )
    reports = []
    for number, name in enumerate(options.traces):
        source = open_source(name, shape, targets=options.targets, warmup=options.warmup, partial=options.partial)
        reports.append(_one(options, console, source, f"trace{number}" if len(options.traces) > 1 else "replay"))
    for column, meaning in COLUMNS.items():
        console.print(f"{column}: {meaning}", markup=False, highlight=False, style="dim")
    _write_json(options.json, reports)
    return 0


def _one(options: argparse.Namespace, console: Console, source: Source, prefix: str) -> dict[str, Any]:
    """One trace, every EP and R."""
    tile = options.tile or source.header.tile_tokens or 64
    costs = Costs(tile_us=options.tile_us, copy_us=options.copy_us, window_us=options.window_us)
    policies = PolicyOptions(
        eplb=_eplb(options.eplb_mode, source),
        harmoeny=HarmoenyOptions(min_tokens=options.harmoeny_tokens),
        lina=LinaOptions(replan=options.lina_replan),
        libra=LibraOptions(),
    )
    report: dict[str, Any] = {
        "trace": source.name,
        "source": source.header.source,
        "targets": source.measured,
        "warmup": source.warmup,
        "experts": source.header.experts,
        "top_k": source.header.top_k,
        "layers": source.header.layers,
        "microbatches": source.header.microbatches,
        "tile_tokens": tile,
        "costs": {"tile_us": costs.tile_us, "copy_us": costs.copy_us, "window_us": costs.window_us},
        "expert_bytes": options.expert_bytes,
        "accuracy": options.accuracy,
        "runs": [],
    }
    console.print(f"{printable(source.name)}: {printable(source.header.source, 2000)}", highlight=False, markup=False)
    console.print(
        f"{source.measured:,} targets after {source.warmup:,} that only warm up; E {source.header.experts}, K"
        f" {source.header.top_k}, L {source.header.layers}, M {source.header.microbatches}, M_tile {tile}; a tile"
        f" {costs.tile_us:g} µs, a copy {costs.copy_us:g} µs, W {costs.window_us:g} µs; EPLB window"
        f" {policies.eplb.window_steps}, interval {policies.eplb.interval_steps} steps, {policies.eplb.mode}; predictions that"
        f" tokens do not give: accuracy {options.accuracy:g}",
        highlight=False,
    )
    settings = [(ep, slots) for slots in options.slots for ep in options.ep]
    total = len(settings) * len(options.policy) * source.targets
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("replay", total=total)
        for ep, slots in settings:
            rows = []
            for policy in options.policy:
                progress.update(task, description=f"EP {ep}, R = {slots}: {printable(policy, 40)}")
                setting = Setting(
                    policy=policy,
                    workers=ep,
                    slots=slots,
                    tile_tokens=tile,
                    costs=costs,
                    options=policies,
                    accuracy=options.accuracy,
                    seed=options.seed,
                    optimum_limit_s=options.optimum if policy in options.optimum_of else None,
                )
                found = replay(source, setting, lambda: progress.advance(task, EACH))
                rows.append(row_of(setting, found, options.expert_bytes))
            report["runs"].append({"ep": ep, "slots": slots, "rows": rows})
            console.print(table_of(f"EP {ep}, R = {slots}", rows))
    if options.out is not None:
        _draw(report, options.out, prefix)
    return report


def _eplb(mode: Literal["async", "stop"], source: Source) -> EplbOptions:
    """Scaled to the trace: up to ten rebalancings, of which each has time to pass through all layers, one a step."""
    layers = source.header.layers
    rebalances = max(1, min(10, source.steps // (2 * layers) - 1))
    return EplbOptions(mode=mode).scaled(source.steps, rebalances)


def _draw(report: dict[str, Any], folder: Path, prefix: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(str(folder), f"it cannot be made: {error.strerror}", "name another directory") from error
    try:
        for path in draw(report["runs"], folder, prefix):
            print(f"wrote {path}", file=sys.stderr)
    except HostError as error:
        if error.resource != "matplotlib":
            raise
        print(f"replay: no pictures: {error}", file=sys.stderr)


def _write_json(path: str, value: Any) -> None:
    if path == "-":
        print(json.dumps(value))
    elif path:
        write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.replay",
        description="Replays traces through policies, and compares balance, copies and planning time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE")
    add(
        "--policy",
        type=_policies,
        default=list(EVERY),
        metavar="P,…",
        help=f"all, or some of {', '.join(EVERY)}, module:Class (all)",
    )
    add(
        "--ep", type=_wholes(1, 4096), default=[2, 4, 8, 16, 32, 64, 128], metavar="N,…", help="FFN workers (2,4,…,128)"
    )
    add("--slots", type=_wholes(0, 1024), default=[8], metavar="R,…", help="redundant slots of a worker (8)")
    add("--tile", type=_whole(1), metavar="M", help="rows of a tile (the trace's, else 64)")
    add("--targets", type=_whole(1), metavar="X", help="measured targets (all of a trace; 200 of a workload)")
    add("--warmup", type=_whole(0), default=800, metavar="X", help="targets before them (800)")
    add("--tile-us", type=_number(), default=20.0, help="microseconds of a tile (20)")
    add("--copy-us", type=_number(), default=130.0, help="microseconds of an expert copy (130)")
    add("--window-us", type=_number(), default=1000.0, help="W: what hides copies that start with their target (1000)")
    add(
        "--expert-bytes",
        type=_number(),
        default=3 * 4096 * 1408 * 2,
        help="bytes of an expert (34.6 MB: GLM-4.5-Air's, bf16)",
    )
    add("--accuracy", type=_number(1.0), default=0.85, help="of predictions that tokens do not give (0.85)")
    add("--eplb-mode", choices=("async", "stop"), default="async", help="(async)")
    add("--harmoeny-tokens", type=_whole(1), metavar="Q", help="HarMoEny's q (its rule)")
    add("--lina-replan", action="store_true", help="Lina's phase 2")
    add("--tokens", type=_whole(1), default=2048, help="of a made workload: T of a microbatch (2048)")
    add("--microbatches", type=_whole(1), default=2, help="of a made workload: M (2)")
    add("--layers", type=_whole(1), default=8, help="of a made workload: so many, from the middle (8)")
    add("--skew", choices=("real", "paper"), default="real", help="of a made workload (real)")
    add("--seed", type=_whole(0), default=1, help="of workloads and predictions (1)")
    add("--optimum", type=_number(), metavar="SECONDS", help="also the certified optimum, with so long for a target")
    add(
        "--optimum-of",
        type=_policies,
        default=["afore", "afore-plus"],
        metavar="P,…",
        help="for these (afore,afore-plus)",
    )
    add("--partial", action="store_true", help="read the whole chunks of a trace that was cut off")
    add("--verify", action="store_true", help="repeat a recorded run's own plans, bit for bit")
    add("--json", default="", metavar="FILE", help="write everything there; - prints it")
    add("--out", type=Path, metavar="DIR", help="write pictures there (extra afore[bench])")
    return parser


def _policies(text: str) -> list[str]:
    if text == "all":
        return list(EVERY)
    names = text.split(",")
    for name in names:
        try:
            if name != EplbFull.name:
                check_policy(name)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return number

    return parse


def _wholes(least: int, most: int) -> Callable[[str], list[int]]:
    one = _whole(least, most)
    return lambda text: [one(part) for part in text.split(",")]


def _number(most: float = 1e15) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to {most:g}")
        return number

    return parse


if __name__ == "__main__":
    end_with(main)
