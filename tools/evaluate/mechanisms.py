"""``python -m afore.tools.evaluate.mechanisms``: what each mechanism beyond the paper brings, alone and together, beside baselines.

Cells of few layers, for a model of as few: the head, which every step passes once, and the dense layers are cut with them, or a
short model would be all sampling. Every policy meets the same demand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from afore.core.errors import AforeError, ConfigError, HostError
from afore.tools.bench.files import write_whole
from afore.tools.ending import end_with
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.command import check, compile_policies
from afore.tools.evaluate.history import warm_for
from afore.tools.evaluate.options import count, count_or_none
from afore.tools.evaluate.profiles import open_profile
from afore.tools.evaluate.store import results_of, to_bytes
from afore.tools.evaluate.workloads import WORKLOADS

FEWER = ("batch.least_microbatches", 2)

VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "static": {"policy": "static"},
        "eplb-redistribute": {"policy": "eplb-redistribute"},
        "harmoeny": {"policy": "harmoeny"},
        "harmoeny@100": {"policy": "harmoeny", "redistribute_us": 100.0},
        "lina": {"policy": "lina"},
        "libra": {"policy": "libra"},
        "libra@100": {"policy": "libra", "redistribute_us": 100.0},
        "afore": {"policy": "afore"},
        "afore-plus, U_t of M-1 plans": {
            "policy": "afore-plus",
            "options": (("policy_options.afore_plus.protected_plans", None),),
        },
        "afore-plus": {"policy": "afore-plus"},
        "afore-ahead": {"policy": "afore-ahead"},
        "afore, own-stream": {"policy": "afore", "collectives": "own-stream"},
        "afore, fewer microbatches": {"policy": "afore", "options": (FEWER,)},
        "static, own-stream, fewer": {"policy": "static", "collectives": "own-stream", "options": (FEWER,)},
        "eplb-redistribute, own-stream, fewer": {
            "policy": "eplb-redistribute",
            "collectives": "own-stream",
            "options": (FEWER,),
        },
        "libra, own-stream, fewer": {"policy": "libra", "collectives": "own-stream", "options": (FEWER,)},
        "all": {"policy": "afore-ahead", "collectives": "own-stream", "options": (FEWER,)},
    }
)
"""Name → what differs from the template."""


def cells(template: Cell, names: Sequence[str], least: int = 2) -> dict[str, Cell]:
    """Each variant's cell; where M is not above the fewest microbatches, fewer cannot run and the option is left out."""
    found = {}
    for name in names:
        cell = replace(template, **VARIANTS[name])
        if cell.microbatches <= least:
            cell = replace(cell, options=tuple(option for option in cell.options if option != FEWER))
        found[name] = cell
    return found


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: throughput over the first row's, latency, imbalance, copies and what they showed."""
    lines = [
        "| | tokens/s | over the first | P95 ITL, ms | tile imbalance (bound) | copies a target | exposed, µs a target |",
        "|---|---|---|---|---|---|---|",
    ]
    first = next(iter(rows.values()))["tokens_per_s"]
    for name, result in rows.items():
        tile, copies = result["imbalance"]["tile"], result["copies"]
        targets = max(1, result["targets"])
        made = copies["copies"] + result["counters"].get("copies_ahead", 0)
        exposed = copies["exposed_us"]["mean"] * copies["targets"] / targets
        lines.append(
            f"| {name} | {result['tokens_per_s']:,.0f} | {result['tokens_per_s'] / first - 1:+.1%} "
            f"| {result['itl_p95_ms']:.1f} | {tile['after']:.3f} ({tile['bound']:.3f}) "
            f"| {made / targets:.2f} | {exposed:.1f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one table for each workload; 0, or 2 for a mistake of the caller's."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except HostError:
        raise
    except AforeError as error:
        print(f"mechanisms: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    names = _known(options.only, VARIANTS, "--only")
    workloads = _known(options.workloads, WORKLOADS, "--workloads")
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(str(out), f"cannot be made: {error.strerror}", "give another --out") from error
    profile = open_profile(options.profile, out, lambda text: print(text, file=sys.stderr, flush=True))
    template = Cell(
        policy="static",
        profile=options.profile,
        layers=options.layers,
        microbatches=options.microbatches,
        slots=options.slots,
        warm=warm_for(options.steps) if options.warm is None else options.warm,
        steps=options.steps,
    )
    # Every cell that will be run, before any is.
    for cell in cells(template, names).values():
        check(cell, profile)
    compile_policies(list(cells(template, names).values()))

    def progress(cell: Cell, done: int, total: int) -> None:
        print(f"{done}/{total}  {cell.policy}, {cell.workload}", file=sys.stderr, flush=True)

    for workload in workloads:
        wanted = cells(replace(template, workload=workload), names)
        results = results_of(list(wanted.values()), out, progress, profile=profile)
        print(f"\n{workload}, M = {options.microbatches}, R = {options.slots}, {options.layers} layers:\n", flush=True)
        print("\n".join(table({name: results[cell] for name, cell in wanted.items()})), flush=True)
    write_whole(str(out / "mechanisms.json"), to_bytes({name: dict(VARIANTS[name]) for name in names}))
    return 0


def _known(text: str | None, known: Mapping[str, Any], option: str) -> list[str]:
    if text is None:
        return list(known)
    wanted = [name.strip() for name in text.split(";" if known is VARIANTS else ",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError(option, f"there is no {'; '.join(unknown) or 'name'}", f"of {'; '.join(known)}")
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.evaluate.mechanisms",
        description="What each mechanism beyond the paper brings, in virtual time. Goes on where it was stopped.",
    )
    parser.add_argument("--only", metavar="NAMES", help=f"some of {'; '.join(VARIANTS)}, by semicolons")
    parser.add_argument(
        "--workloads", metavar="NAMES", default="chat", help=f"some of {', '.join(WORKLOADS)}, by commas"
    )
    parser.add_argument("--profile", default="a100-glm45air", help="hardware, as python -m afore.tools.evaluate")
    parser.add_argument("--out", default="mechanisms", metavar="DIR", help="where results are kept")
    parser.add_argument(
        "--layers", type=count, default=6, metavar="L", help="MoE layers of the model that is cut to them"
    )
    parser.add_argument("--microbatches", type=count, default=3, metavar="M", help="most microbatches in flight")
    parser.add_argument(
        "--slots", type=count_or_none, default=8, metavar="R", help="redundant slots of each FFN worker and layer"
    )
    parser.add_argument(
        "--warm", type=count, metavar="S", help="steps before anything is measured (as many as EPLB needs for --steps)"
    )
    parser.add_argument("--steps", type=count, default=7, metavar="S", help="steps that are measured")
    return parser


if __name__ == "__main__":
    end_with(main)
