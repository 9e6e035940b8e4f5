"""``bench virtual``: what a target of the whole runtime costs in virtual time, and what memory it takes.

The same cell runs twice, with few steps and with many: the difference is what targets cost, without the start (requests on their
way in). Ahead of both a tiny one runs, so that neither pays for imports and the loading of kernels. A run's result is a matter of
``tools.evaluate``; here only its cost counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from collections.abc import Sequence
from typing import Any

from afore.core.errors import ConfigError
from afore.tools.bench.files import check_file, write_whole
from afore.tools.bench.parser import Parser
from afore.tools.evaluate.cell import Cell, run_cell

EPILOG = """\
formula: ms a target = (CPU of the long run - CPU of the short run) / (targets of the long run - targets of the short run)
a target is one MoE layer of one step of one microbatch; CPU is that of this process, which has one thread

examples:
  python -m afore.tools.bench virtual                                  # 4 attention and 8 FFN workers, 45 layers
  python -m afore.tools.bench virtual --ffn 128 --steps 4 --json out.json
  python -m afore.tools.bench virtual --layers 6 --rows 32 --policy libra

exit status: 0 measured, 1 something failed on the way, 2 the request could not be carried out as given
"""
SHORT_STEPS = 1
TINY_FFN, TINY_ROWS, TINY_LAYERS = 8, 4, 2
_MOST = {
    "attention": 64,
    "ffn": 1024,
    "prefill": 64,
    "microbatches": 64,
    "rows": 4096,
    "layers": 1024,
    "steps": 100_000,
}


def main(argv: Sequence[str]) -> int:
    """The subcommand; returns its exit status. Raises ``ConfigError`` for what cannot run."""
    parser = Parser(
        prog="python -m afore.tools.bench virtual",
        description="CPU and memory of the runtime in virtual time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policy", default="afore", help="default: %(default)s")
    parser.add_argument("--profile", default="a100-glm45air", help="default: %(default)s")
    for name, default, about in (
        ("attention", 4, "attention workers"),
        ("ffn", 8, "FFN workers: EP"),
        ("prefill", 4, "prefill workers"),
        ("microbatches", 3, "microbatches in flight: M"),
        ("rows", 325, "requests of one attention worker in one microbatch"),
        ("layers", 0, "MoE layers; 0: those of the profile's model"),
        ("steps", 10, "steps that the long run measures"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{about} (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    given = parser.parse_args(argv)
    for name, most in _MOST.items():
        least = {"layers": 0, "steps": SHORT_STEPS + 1}.get(name, 1)
        if not least <= getattr(given, name) <= most:
            raise ConfigError(name, f"{getattr(given, name)} is not from {least} to {most}", "give another number")
    cell = Cell(warm=1, **{name: getattr(given, name) for name in ("policy", "profile", *_MOST)})
    check_file("json", given.json)
    figures = measured(cell)
    print(report(figures))
    if given.json is not None:
        write_whole(given.json, (json.dumps(figures, indent=1, sort_keys=True) + "\n").encode())
    return 0


def measured(cell: Cell) -> dict[str, Any]:
    """Figures of a cell: targets, CPU in seconds, milliseconds a target, peak resident memory in MiB."""
    loading_s, _ = _run(_tiny(cell))
    short_s, short = _run(dataclasses.replace(cell, steps=SHORT_STEPS))
    long_s, long = _run(cell)
    return {
        "cell": dataclasses.asdict(cell),
        "loading_cpu_s": round(loading_s, 3),
        "targets": long,
        "cpu_s": round(long_s, 3),
        "start_cpu_s": round(max(0.0, short_s - (long_s - short_s) / (long - short) * short), 3),
        "ms_a_target": round((long_s - short_s) / (long - short) * 1e3, 4),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def _tiny(cell: Cell) -> Cell:
    """A cell that needs all that ``cell`` needs to be loaded."""
    ffn, rows = min(cell.ffn, TINY_FFN), min(cell.rows, TINY_ROWS)
    layers = min(cell.layers or TINY_LAYERS, TINY_LAYERS)
    return dataclasses.replace(cell, steps=SHORT_STEPS, layers=layers, ffn=ffn, rows=rows)


def _run(cell: Cell) -> tuple[float, int]:
    """(CPU seconds, targets) of a run."""
    began_s = time.process_time()
    result = run_cell(cell)
    return time.process_time() - began_s, int(result["all_targets"])


def report(figures: dict[str, Any]) -> str:
    """The figures as lines."""
    cell = figures["cell"]
    shape = f"{cell['policy']}: A {cell['attention']}, EP {cell['ffn']}, M {cell['microbatches']}, {cell['rows']} rows"
    return "\n".join(
        (
            shape,
            f"  targets       {figures['targets']:>12,}",
            f"  CPU           {figures['cpu_s']:>12.2f} s, of which {figures['start_cpu_s']:.2f} s start",
            f"  loading       {figures['loading_cpu_s']:>12.2f} s ahead of it, once in a process",
            f"  a target      {figures['ms_a_target']:>12.3f} ms of CPU",
            f"  peak memory   {figures['peak_mib']:>12.1f} MiB resident",
        )
    )
