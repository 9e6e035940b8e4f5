"""``python -m afore.tools.plan``: explain one plan step by step, or measure planners against the certified optimum (Table 2)."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from afore.core.errors import AforeError, ConfigError, HostError
from afore.core.slots import PrimariesVector, contiguous_primaries
from afore.scheduler.costs import Costs
from afore.scheduler.explain import ExplainingPlanner, Explanation
from afore.scheduler.plan import Plan, PlannerConfig, ProtectedWindow
from afore.scheduler.planner import Planner
from afore.scheduler.plus_planner import PlusPlanner
from afore.tools.ending import end_with
from afore.tools.plan_explain import lines, svg, to_json
from afore.tools.plan_input import read_demand, read_table, read_trace
from afore.tools.plan_table import PLANNERS, as_dict, rows, table_of
from afore.tools.plan_workload import pinned
from afore.tools.printable import printable

EPILOG = """\
example:
  python -m afore.tools.plan explain demand.json --workers 8 --slots 2 --plot plan.svg
  python -m afore.tools.plan explain --trace /tmp/spans --sequence 17
  python -m afore.tools.plan table2 --traces DIR --slots 2,4,8

exit status: 0 done, 1 the output cannot be written, 2 an input cannot be used
"""
MOST_TARGETS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        return _table2(options) if options.command == "table2" else _explain(options)
    except AforeError as error:
        print(f"plan: {printable(str(error), most=1000)}", file=sys.stderr)
    except MemoryError as error:
        print(f"plan: sizes: {error}; give fewer workers or slots", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.plan",
        description="Explains a plan, or compares planners with the certified optimum.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain|table2")
    explain = commands.add_parser(
        "explain",
        help="loads before, each move and its gain, copies, what was not done and why",
        epilog="example: python -m afore.tools.plan explain demand.json --workers 8 --slots 2 --plot plan.svg",
    )
    explain.add_argument("demand", nargs="?", type=Path, metavar="DEMAND", help="E counts: .json, .npy or .csv")
    explain.add_argument("--trace", type=Path, metavar="DIR", help="a run recorded with --trace, instead of DEMAND")
    explain.add_argument("--sequence", type=int, metavar="S", help="the target's plan sequence in the trace")
    explain.add_argument("--workers", type=int, default=8, metavar="N", help="FFN workers (default: 8; a trace says)")
    explain.add_argument("--slots", type=int, default=8, metavar="R", help="redundant slots a worker (default: 8)")
    explain.add_argument("--table", type=Path, metavar="FILE", help="slot table before: N rows of R experts, -1 empty")
    explain.add_argument("--tile-tokens", type=int, default=64, metavar="M", help="rows of a tile (default: 64)")
    explain.add_argument("--budget", type=int, metavar="B", help="most copies (default: max(8, N))")
    explain.add_argument("--compactness", type=int, default=0, metavar="θ", help="default: 0")
    explain.add_argument(
        "--compactness-share",
        type=float,
        default=0.0,
        metavar="PART",
        help="θ by the mean tiles of a worker (default: 0)",
    )
    explain.add_argument(
        "--speeds", type=_speeds, metavar="S,S,…", help="relative speed of each worker (default: equal)"
    )
    for name, default in (("tile", 20.0), ("copy", 20.0), ("window", 1000.0)):
        explain.add_argument(f"--{name}-us", type=float, default=default, help=f"default: {default:g}; a trace says")
    explain.add_argument("--plot", type=Path, metavar="FILE.svg", help="write bars of before and after")
    explain.add_argument("--json", action="store_true", help="print one JSON object")
    table = commands.add_parser(
        "table2",
        help="optimal targets and gap to the certified optimum, on the pinned workload",
        epilog="example: python -m afore.tools.plan table2 --traces DIR --slots 2 --ep 8,16",
    )
    table.add_argument("--traces", type=Path, metavar="DIR", help="real routing; without it, demand is generated")
    table.add_argument("--ep", type=_numbers, default=[2, 4, 8, 16, 32, 64, 128], help="workers (default: 2,4,…,128)")
    table.add_argument("--slots", type=_numbers, default=[2, 4, 8], help="redundant slots a worker (default: 2,4,8)")
    table.add_argument("--policies", type=_policies, default=list(PLANNERS), help="default: afore,afore-plus")
    table.add_argument("--targets", type=_whole(1, MOST_TARGETS), default=200, help="default: 200")
    table.add_argument("--seed", type=_whole(0), default=2048, help="default: 2048")
    table.add_argument(
        "--in-flight", type=_whole(0), default=0, help="plans whose slots are protected: M - 1 (default: 0, none is)"
    )
    table.add_argument("--time-limit-s", type=_seconds, default=10.0, help="solver's time for a target (default: 10)")
    table.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A type of argument: a whole number in this range."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return number

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} are no seconds; give 0 or more")
    return seconds


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no whole numbers with commas between") from None


def _speeds(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers with commas between") from None


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PLANNERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PLANNERS)}")
    return names


def _explain(options: argparse.Namespace) -> int:
    told, plus, title = _told(options)
    if options.plot is not None:
        try:
            options.plot.write_text(svg(told), encoding="utf-8")
        except OSError as error:
            raise HostError(
                str(options.plot), f"the picture cannot be written: {error.strerror}", "give another file"
            ) from error
    if options.json:
        print(json.dumps({"target": title, **to_json(told, plus)}))
        return 0
    print(printable(title))
    print("\n".join(lines(told, plus)))
    return 0


def _told(options: argparse.Namespace) -> tuple[Explanation, Plan, str]:
    """(the explanation, what ``afore-plus`` plans from the same state, what target it is)"""
    if (options.demand is None) == (options.trace is None):
        raise ConfigError("demand", "a file or a trace is explained", "give DEMAND, or --trace DIR --sequence S")
    if options.trace is None:
        demand_E = read_demand(options.demand)
        table_NR = None if options.table is None else read_table(options.table)
        costs = Costs(tile_us=options.tile_us, copy_us=options.copy_us, window_us=options.window_us)
        planner = Planner(_config(options, demand_E.size, options.workers), _primaries(demand_E.size, options.workers))
        if table_NR is not None:
            _adopt(planner, table_NR, options.table)
        return *_both(planner, None, demand_E, None, costs), str(options.demand)
    if options.sequence is None:
        raise ConfigError("sequence", "missing", "name the target: --sequence S")
    recording = read_trace(options.trace, options.sequence)
    for problem in recording.problems:
        print(f"plan: {printable(problem, most=1000)}", file=sys.stderr)
    E, N = recording.targets[-1].demand_E.size, recording.num_workers
    planner = Planner(_config(options, E, N), _primaries(E, N))
    window = ProtectedWindow(recording.num_microbatches - 1)
    last: Plan | None = None
    *before, asked = recording.targets
    for target in before:
        try:
            last = planner.plan(target.demand_E, window.protected(), target.costs)
        except ValueError as error:
            raise ConfigError("sequence", f"{target.sequence}: {error}", "record the run again") from error
        window.push(last.used_NR)
    told, plus = _both(planner, last, asked.demand_E, window.protected(), asked.costs)
    same = "as it was published" if told.plan.shares() == asked.shares else "not as it was published"
    why = (
        ""
        if told.plan.shares() == asked.shares
        else ": the run had other knobs or another policy, or a plan was refused"
    )
    return told, plus, f"sequence {asked.sequence} ({asked.name}), {asked.policy}: {same}{why}"


def _config(options: argparse.Namespace, num_experts: int, num_workers: int) -> PlannerConfig:
    return PlannerConfig(
        num_experts=num_experts,
        num_workers=num_workers,
        slots_per_worker=options.slots,
        tile_tokens=options.tile_tokens,
        copy_budget=options.budget,
        compactness=options.compactness,
        compactness_share=options.compactness_share,
        worker_speed=options.speeds or 1.0,
    )


def _primaries(num_experts: int, num_workers: int) -> PrimariesVector:
    return contiguous_primaries(num_experts, num_workers)


def _adopt(planner: Planner, table_NR: NDArray[np.int32], path: Path) -> None:
    try:
        planner.adopt(table_NR)
    except ValueError as error:
        raise ConfigError(str(path), str(error), "give N rows of R experts, -1 for an empty slot") from error


def _both(
    planner: Planner, last: Plan | None, demand_E: NDArray[np.int64], protected: NDArray[np.bool_] | None, costs: Costs
) -> tuple[Explanation, Plan]:
    """The explanation from the planner's state, and ``afore-plus`` from the same."""
    plus = PlusPlanner(planner.config, planner.primaries_E)
    plus.buffer[:] = planner.buffer
    explaining = ExplainingPlanner(planner.config, planner.primaries_E)
    explaining.continue_from(planner, last)
    try:
        better = plus.plan(demand_E, protected, costs)
    except ValueError as error:
        raise ConfigError("demand", str(error), "give counts of pairs, 0 or more") from error
    return explaining.explain(demand_E, protected, costs), better


def _table2(options: argparse.Namespace) -> int:
    workload = pinned(options.traces, targets=options.targets, seed=options.seed)
    about = {
        "source": workload.source,
        "targets": options.targets,
        "skew_8_workers": round(workload.skew(8), 3),
        "top_8_experts": round(workload.top_part(), 3),
        "in_flight": options.in_flight,
        "time_limit_s": options.time_limit_s,
    }
    found = []
    for row in rows(
        workload,
        eps=options.ep,
        slots=options.slots,
        policies=options.policies,
        in_flight=options.in_flight,
        time_limit_s=options.time_limit_s,
    ):
        found.append(row)
        print(
            f"R={row.slots} EP={row.ep} {row.policy}: {row.optimal}/{row.targets} optimal, {row.open} open, "
            f"mean gap {row.mean_gap_percent:.3f} %, solver {row.solve_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    if options.json:
        print(json.dumps({**about, "rows": [as_dict(row) for row in found]}))
        return 0
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    Console(width=110).print(table_of(found))
    return 0


if __name__ == "__main__":
    end_with(main)
