"""``python -m afore.tools.plan``: explain one plan step by step, or measure planners against the certified optimum (Table 2)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from afore.core.errors import AforeError
from afore.tools.plan_table import PLANNERS, as_dict, rows, table_of
from afore.tools.plan_workload import pinned

EPILOG = """\
example:
  python -m afore.tools.plan explain demand.json --workers 8 --slots 2 --plot plan.svg
  python -m afore.tools.plan explain --trace /tmp/spans --sequence 17
  python -m afore.tools.plan table2 --traces DIR --slots 2,4,8

exit status: 0 done, 2 an input cannot be used
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        return _table2(options)
    except AforeError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.plan",
        description="Explains a plan, or compares planners with the certified optimum.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain|table2")
    table = commands.add_parser(
        "table2",
        help="optimal targets and gap to the certified optimum, on the pinned workload",
        epilog="example: python -m afore.tools.plan table2 --traces DIR --slots 2 --ep 8,16",
    )
    table.add_argument("--traces", type=Path, metavar="DIR", help="real routing; without it, demand is generated")
    table.add_argument("--ep", type=_numbers, default=[2, 4, 8, 16, 32, 64, 128], help="workers (default: 2,4,…,128)")
    table.add_argument("--slots", type=_numbers, default=[2, 4, 8], help="redundant slots a worker (default: 2,4,8)")
    table.add_argument("--policies", type=_policies, default=list(PLANNERS), help="default: afore,afore-plus")
    table.add_argument("--targets", type=int, default=200, help="default: 200")
    table.add_argument("--seed", type=int, default=2048, help="default: 2048")
    table.add_argument(
        "--in-flight", type=int, default=0, help="plans whose slots are protected: M - 1 (default: 0, none is)"
    )
    table.add_argument("--time-limit-s", type=float, default=10.0, help="solver's time for a target (default: 10)")
    table.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PLANNERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PLANNERS)}")
    return names


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
    sys.exit(main())
