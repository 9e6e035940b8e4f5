"""The command ``python -m afore.tools.evaluate``."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from afore.core.errors import AforeError, ConfigError
from afore.scheduler.policies.registry import policy_kernels
from afore.tools.bench.files import write_whole
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.demand import WORKLOADS
from afore.tools.evaluate.figures import FIGURES, Figure, Row
from afore.tools.evaluate.pictures import draw
from afore.tools.evaluate.report import page, to_json
from afore.tools.evaluate.store import results_of, to_bytes
from afore.workers.device.hardware import profile_names, read_profile

QUICK_LAYERS, QUICK_STEPS, QUICK_WARM, QUICK_ROWS = 6, 20, 5, 80


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is not there yet, writes JSON, the page and pictures; 0, or 2 for a mistake of the caller's."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(given)
    try:
        return _evaluate(options, given)
    except AforeError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2


def _evaluate(options: argparse.Namespace, given: Sequence[str]) -> int:
    profile = read_profile(options.profile)
    figures = _chosen(options.only)
    template = _template(options)
    out = Path(options.out)
    workloads = _workloads(options.workloads)
    cells = [cell for figure in figures for cell in figure.cells(template, workloads)]
    for policy in dict.fromkeys(cell.policy for cell in cells):
        for compile_kernel in policy_kernels(policy):
            compile_kernel()
    began_s = time.monotonic()

    def progress(cell: Cell, done: int, total: int) -> None:
        bar = "#" * round(20 * done / total)
        minutes = (time.monotonic() - began_s) / 60
        line = f"[{bar:<20}] {done}/{total}  {minutes:.1f} min  {cell.policy}, {cell.workload}"
        print(line, file=sys.stderr, flush=True)

    results = results_of(cells, out, progress)
    found: list[tuple[Figure, Sequence[Row]]] = [
        (figure, figure.rows(template, workloads, results)) for figure in figures
    ]
    write_whole(str(out / "evaluation.json"), to_bytes(to_json(found, template)))
    command = shlex.join(["python", "-m", "afore.tools.evaluate", *given])
    write_whole(str(out / "evaluation.md"), page(found, template, profile, command).encode())
    pictures = []
    if not options.no_pictures:
        pictures = [path for figure, rows in found for path in draw(figure, rows, out)]
    print(f"{out / 'evaluation.md'}, evaluation.json, {len(results)} cells, {len(pictures)} pictures")
    return 0


def _template(options: argparse.Namespace) -> Cell:
    quick = bool(options.quick)

    def pick(value: int | None, otherwise: int) -> int:
        return otherwise if value is None else int(value)

    return Cell(
        policy="static",
        profile=options.profile,
        attention=options.attention,
        ffn=options.ffn,
        prefill=options.prefill,
        microbatches=options.microbatches,
        slots=options.slots,
        layers=pick(options.layers, QUICK_LAYERS if quick else 0),
        rows=pick(options.rows, QUICK_ROWS if quick else 325),
        steps=pick(options.steps, QUICK_STEPS if quick else 25),
        warm=QUICK_WARM,
        collectives=options.collectives,
        seed=options.seed,
    )


def _chosen(only: str | None) -> list[Figure]:
    if only is None:
        return list(FIGURES.values())
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in FIGURES]
    if unknown or not names:
        raise ConfigError("--only", f"there is no {', '.join(unknown) or 'name'}", f"of {', '.join(FIGURES)}")
    return [figure for name, figure in FIGURES.items() if name in names]


def _workloads(names: str | None) -> list[str]:
    if names is None:
        return list(WORKLOADS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in WORKLOADS]
    if unknown or not wanted:
        raise ConfigError("--workloads", f"there is no {', '.join(unknown) or 'name'}", f"of {', '.join(WORKLOADS)}")
    return wanted


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is none of 0 to 2^63 - 1")
    return seed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.evaluate",
        description="The paper's figures in virtual time: the real roles on emulated hardware. Goes on where it was stopped.",
    )
    parser.add_argument("--only", metavar="NAMES", help=f"some of {', '.join(FIGURES)}, by commas")
    parser.add_argument("--workloads", metavar="NAMES", help=f"some of {', '.join(WORKLOADS)}, by commas")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_STEPS} steps of {QUICK_LAYERS} layers, small batches"
    )
    parser.add_argument(
        "--profile", default="a100-glm45air", help=f"hardware: {', '.join(profile_names())}, or FILE.yaml"
    )
    parser.add_argument("--out", default="evaluation", metavar="DIR", help="where results are kept")
    parser.add_argument("--attention", type=_count, default=4, metavar="A", help="attention workers")
    parser.add_argument("--ffn", type=_count, default=8, metavar="N", help="FFN workers")
    parser.add_argument("--prefill", type=_count, default=4, metavar="P", help="prefill workers")
    parser.add_argument("--microbatches", type=_count, default=3, metavar="M", help="microbatches in flight")
    parser.add_argument(
        "--slots", type=int, default=8, metavar="R", help="redundant slots of each FFN worker and layer"
    )
    parser.add_argument("--rows", type=_count, metavar="T", help="requests of an attention worker in a microbatch")
    parser.add_argument("--layers", type=_count, metavar="L", help="MoE layers; without: those of the profile's model")
    parser.add_argument("--steps", type=_count, metavar="S", help="steps that are measured")
    parser.add_argument(
        "--collectives",
        choices=("model-stream", "own-stream"),
        default="model-stream",
        help="between experts, or beside them",
    )
    parser.add_argument("--seed", type=_seed, default=0, help="of demand and prompt lengths")
    parser.add_argument("--no-pictures", action="store_true", help="no PNG and SVG (they need afore[bench])")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value
