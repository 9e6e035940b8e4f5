"""``python -m afore.tools.evaluate plan``: my model, my traffic, N GPUs of this kind: what would AFORE give me?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from afore.core.errors import ConfigError
from afore.tools.bench.parser import Parser
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.command import check, compile_policies
from afore.tools.evaluate.model_shape import with_model
from afore.tools.evaluate.options import count, directory, seed, step_count
from afore.tools.evaluate.out import out_directory
from afore.tools.evaluate.plan_search import TRIED_ON, Offer, Wish, search, winner
from afore.tools.evaluate.profiles import open_profile, parse_override, with_overrides
from afore.tools.evaluate.progress import ProgressLine
from afore.tools.evaluate.store import results_of
from afore.tools.evaluate.workloads import WORKLOADS, prompt_lengths
from afore.tools.printable import printable

LAYERS, STEPS, WARM, REQUESTS_PER_GPU = 6, 8, 12, 64

EPILOG = """examples:
  python -m afore.tools.evaluate plan --model ./glm45air/config.json --traffic chat --profile h200 --gpus 16
  python -m afore.tools.evaluate plan --model ./qwen3moe --traffic run.trace.npz --profile a100-glm45air --gpus 12 --requests 2000
  python -m afore.tools.evaluate plan --traffic math --gpus 8 --itl-ms 200 --json

TRAFFIC is a kind of traffic (chat, web, code, math), a recording (--record of the launcher), or published routing (.npz).
Devices for prefill are not counted. A few layers are run and counted as all: a step is layers in a row.
"""


def plan(argv: Sequence[str]) -> int:
    """The command; 0. Raises ``ConfigError``, ``CheckpointError`` for what cannot be planned."""
    options = _parser().parse_args(argv)
    if options.gpus < 2:
        raise ConfigError("--gpus", f"{options.gpus} cannot be split into attention and FFN", "give 2 or more")
    if not options.itl_ms > 0:
        raise ConfigError("--itl-ms", f"{options.itl_ms:g} is no limit that could be kept", "give more than 0")
    with out_directory(Path(options.out)):
        return _planned(options)


def _planned(options: argparse.Namespace) -> int:
    out = Path(options.out)
    profile = with_overrides(open_profile(options.profile, out, _say), tuple(map(parse_override, options.overrides)))
    if options.model is not None:
        profile = with_model(profile, Path(options.model))
    workload, routing = _traffic(options.traffic)
    lengths = prompt_lengths(WORKLOADS[workload], 2000, seed=options.seed)
    wish = Wish(
        gpus=options.gpus,
        requests=options.requests or REQUESTS_PER_GPU * options.gpus,
        output_tokens=options.output_tokens,
        prompt_tokens=sum(lengths) / len(lengths),
        itl_ms=options.itl_ms,
    )
    moe = int(profile.shape.layers.value - profile.shape.dense_layers.value)
    base = Cell(
        policy="afore",
        workload=workload,
        profile=options.profile,
        routing=routing,
        prefill=1,
        layers=min(moe, options.layers),
        steps=options.steps,
        warm=WARM,
        seed=options.seed,
    )
    compile_policies([Cell(policy=policy) for policy in TRIED_ON])
    line = ProgressLine(sys.stderr, profile)

    def run(cells: Sequence[Cell]) -> Mapping[Cell, Mapping[str, Any]]:
        for cell in cells:
            check(cell, profile)
        return results_of(
            cells, out, line.began, profile=profile, jobs=options.jobs, to_run=line.to_run, finished=line.finished
        )

    offers = search(base, profile, wish, run)
    if options.json:
        print(json.dumps({"profile": profile.name, "winner": winner(offers), "offers": [o.as_dict() for o in offers]}))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(offers, wish))
    console.print(f"best: {winner(offers)}", markup=False, highlight=False)
    if offers[0].itl_p95_ms > wish.itl_ms:
        console.print(f"none keeps a P95 ITL of {wish.itl_ms:g} ms", markup=False, highlight=False)
    console.print(
        f"{wish.requests:,} requests decode at a time, {wish.prompt_tokens:.0f} + {wish.output_tokens} tokens each in the "
        f"mean; predicted from {base.layers} of {moe} layers on profile {printable(profile.name)}",
        markup=False,
        highlight=False,
    )
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _traffic(given: str) -> tuple[str, str]:
    """(workload, routing files)."""
    if given in WORKLOADS:
        return given, ""
    missing = [name for name in given.split(",") if not Path(name).is_file()]
    if missing:
        raise ConfigError(
            "--traffic", f"{missing[0]} is no file and no kind of traffic", f"of {', '.join(WORKLOADS)}, or a trace"
        )
    return "chat", given


def _table(offers: Sequence[Offer], wish: Wish) -> Table:
    table = Table("A:N", "M", "R", "policy")
    for heading in ("tokens/s", "a GPU", "P95 ITL ms", "attention GB", "FFN GB", "copies"):
        table.add_column(heading, justify="right")
    for offer in offers:
        cell = offer.cell
        late = " !" if offer.itl_p95_ms > wish.itl_ms else ""
        paid = f" +{cell.redistribute_us:g} µs" if cell.redistribute_us else ""
        table.add_row(
            f"{cell.attention}:{cell.ffn}",
            str(cell.microbatches),
            str(cell.slots),
            cell.policy + paid,
            f"{offer.tokens_per_s:,.0f}",
            f"{offer.tokens_per_s / wish.gpus:,.0f}",
            f"{offer.itl_p95_ms:.1f}{late}",
            f"{offer.memory.attention:.1f}",
            f"{offer.memory.ffn:.1f}",
            f"{offer.copies:.2f}",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m afore.tools.evaluate plan",
        description="Ratios of attention to FFN devices, M, R and policies, with predicted throughput, latency and memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", metavar="CONFIG.json", help="the model's configuration, or its directory (the profile's model)")
    add("--traffic", default="chat", metavar="TRAFFIC", help=f"{', '.join(WORKLOADS)}, or a trace's file (chat)")
    add("--profile", default="a100-glm45air", help="kind of device: a name, or FILE.yaml (a100-glm45air)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="overrides", help="another number in it")
    add("--gpus", type=count, required=True, metavar="N", help="devices for attention and FFN together")
    add("--requests", type=count, metavar="X", help=f"decoding at the same time ({REQUESTS_PER_GPU} for each device)")
    add("--output-tokens", type=count, default=256, metavar="X", help="of an answer, mean: for the cache's size (256)")
    add("--itl-ms", type=float, default=float("inf"), metavar="X", help="P95 inter-token latency to be kept")
    add("--layers", type=count, default=LAYERS, metavar="L", help=f"MoE layers that are run ({LAYERS})")
    add("--steps", type=step_count, default=STEPS, metavar="S", help=f"steps that are measured ({STEPS})")
    add("--jobs", type=count, default=1, metavar="J", help="processes (1)")
    add("--seed", type=seed, default=0, help="of demand and prompts (0)")
    add(
        "--out",
        type=directory,
        default="evaluation-plan",
        metavar="DIR",
        help="where runs are kept: asked again, it answers at once",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser
