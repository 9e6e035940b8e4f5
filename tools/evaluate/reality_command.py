"""``python -m afore.tools.evaluate reality``: what virtual time predicts of real processes here, and how far off it is."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from afore.core.errors import ConfigError
from afore.scheduler.policies.registry import policy_kernels
from afore.scheduler.repeat import repeat
from afore.scheduler.traces import TraceReader
from afore.tools.bench.files import write_whole
from afore.tools.calibrate.fit import Fit, fit_all, profile_from
from afore.tools.calibrate.measure import TILE_TOKENS
from afore.tools.calibrate.spans import read_samples
from afore.tools.evaluate.options import count, count_or_none
from afore.tools.evaluate.profiles import CPU, open_profile
from afore.tools.evaluate.reality_fit import handovers
from afore.tools.evaluate.reality_runs import (
    REAL,
    SPANS,
    TRACE,
    VIRTUAL,
    Passed,
    Shape,
    of_size,
    passed,
    run_really,
    run_virtually,
)
from afore.tools.evaluate.store import to_bytes

LIMIT_S = 300.0

EPILOG = """examples:
  python -m afore.tools.evaluate reality                          # one attention and one FFN process, the bundled model
  python -m afore.tools.evaluate reality --cores 2 --ffn 2        # more of them
  python -m afore.tools.evaluate reality --json --out DIR

A profile of this CPU is measured, then fitted to the even steps of a recorded run. The same requests run in virtual time on the
recorded demand and that profile, and are held against the odd steps. Plans of both runs are made again from what was recorded:
demand, protected slots, costs. On a machine that has other work, times say how much of it there was.

exit status: 0 done, 1 a plan differs or a file cannot be written, 2 the request cannot be carried out as given
"""


def reality(argv: Sequence[str]) -> int:
    """The command; 0, or 1 where a plan that is made again differs. Raises ``ConfigError``, ``RoleLost``."""
    options = _parser().parse_args(argv)
    usable = len(os.sched_getaffinity(0))
    if options.cores > usable:
        raise ConfigError("--cores", f"{options.cores} of {usable} that this process may use", "give fewer")
    shape = Shape(
        attention=options.attention,
        ffn=options.ffn or max(1, options.cores),
        microbatches=options.microbatches,
        slots=options.slots,
        requests=options.requests,
        tokens=options.tokens,
        policy=options.policy,
    )
    for compile_kernel in policy_kernels(shape.policy):
        compile_kernel()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(options.out or temporary)
        real, virtual = _fresh(out / REAL), _fresh(out / VIRTUAL)
        base = open_profile(CPU, out, _say)
        _say(f"running {shape.attention} attention and {shape.ffn} FFN processes")
        # Workers inherit the cores that this process may use.
        everything = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(everything)[: options.cores])
        try:
            asyncio.run(run_really(shape, real, limit_s=options.limit_s))
        finally:
            os.sched_setaffinity(0, everything)
        recorded = read_samples(real / SPANS, TILE_TOKENS)
        fits = fit_all(recorded)
        about = f"{base.about}, then fitted to a run's even steps"
        profile = profile_from(base, fits, name="cpu-fitted", about=about, workers=shape.ffn)
        host = handovers(real / SPANS)
        _say("the same in virtual time")
        run_virtually(shape, virtual, real, profile, host)
        found = compare(passed(real), passed(virtual))
        plans = {world: _repeated(directory / TRACE) for world, directory in ((REAL, real), (VIRTUAL, virtual))}
    report = {"shape": _of(shape), "cores": options.cores, "targets": found, "spans": _spans(fits), "plans": plans}
    report["host_us"] = asdict(host)
    if options.out:
        write_whole(str(Path(options.out) / "reality.json"), to_bytes(report))
    if options.json:
        print(json.dumps(report))
    else:
        _show(report)
    return int(any(one["different"] for one in plans.values()))


def compare(measured: Sequence[Passed], predicted: Sequence[Passed]) -> dict[str, Any]:
    """Mean times of full targets: predicted, against the odd steps of what was measured; and even ones, for the noise.

    Full ones are of the size that is most frequent in both. Raises ``ConfigError`` where nothing is comparable.
    """
    sizes = Counter(one.tokens for one in measured)
    common = [(number, tokens) for tokens, number in sizes.items() if of_size(predicted, tokens)]
    if not common:
        raise ConfigError(
            "reality", "no target of the real run has as many rows as one of the virtual run", "run it again"
        )
    tokens = max(common)[1]
    even = [one.took_us for one in of_size(measured, tokens) if one.step % 2 == 0]
    odd = [one.took_us for one in of_size(measured, tokens) if one.step % 2]
    if not even or not odd:
        raise ConfigError("reality", "a half of the run has no full target", "give more --tokens")
    expected = statistics.mean(one.took_us for one in of_size(predicted, tokens))
    middle = statistics.mean(odd)
    return {
        "rows": tokens,
        "predicted": len(of_size(predicted, tokens)),
        "tested": len(odd),
        "predicted_us": expected,
        "measured_us": middle,
        "error": expected / middle - 1,
        "error_of_each": statistics.median(abs(expected - one) / one for one in odd),
        "median_us": statistics.median(odd),
        "other_half_us": statistics.mean(even),
        "noise": statistics.mean(even) / middle - 1,
        "p10_us": sorted(odd)[len(odd) // 10],
        "p90_us": sorted(odd)[len(odd) * 9 // 10],
    }


def _repeated(path: Path) -> dict[str, Any]:
    result = repeat(TraceReader(path))
    return {
        "targets": result.targets,
        "copies": result.copies,
        "different": result.different,
        "first": result.first,
    }


def _spans(fits: dict[str, Fit]) -> dict[str, Any]:
    return {
        name: {
            "fixed_us": one.line.fixed_us,
            "each_us": one.line.each_us,
            "fitted": one.fitted,
            "tested": one.tested,
            "error": one.error,
        }
        for name, one in fits.items()
    }


def _of(shape: Shape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in Shape.__dataclass_fields__}


def _fresh(directory: Path) -> Path:
    """The directory, made. Raises ``ConfigError`` where an earlier run is in it."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError("--out", f"{directory} is there already", "name another directory, or remove it") from error
    except OSError as error:
        raise ConfigError("--out", f"{directory} cannot be made: {error.strerror}", "name another directory") from error
    return directory


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(report: dict[str, Any]) -> None:
    found = report["targets"]
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table("work", "fixed µs", "each µs", "spans fitted", "tested", "error")
    for name, one in report["spans"].items():
        table.add_row(
            name,
            f"{one['fixed_us']:.1f}",
            f"{one['each_us']:.2f}",
            str(one["fitted"]),
            str(one["tested"]),
            f"{one['error']:.1%}",
        )
    console.print(table)
    lines = [
        "host, µs: " + ", ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in report["host_us"].items()),
        f"a target of {found['rows']} rows: predicted {found['predicted_us']:.0f} µs, measured {found['measured_us']:.0f} µs "
        f"(P10 {found['p10_us']:.0f}, P90 {found['p90_us']:.0f}; {found['tested']} targets): {found['error']:+.1%}",
        f"median error of each: {found['error_of_each']:.1%}; the run's other half differs from this one by {found['noise']:+.1%}",
    ]
    for world, one in report["plans"].items():
        same = one["first"] if one["different"] else "every plan is the recorded one, bit for bit"
        lines.append(f"{world}: {one['targets']} targets, {one['copies']} copies made again: {same}")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.evaluate reality",
        description="Predicted against measured time of targets on this machine, and plans made again from both runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cores", type=count, default=1, metavar="C", help="cores that the processes may use (1)")
    add("--attention", type=count, default=1, metavar="A", help="attention processes (1)")
    add("--ffn", type=count, metavar="N", help="FFN processes (as many as cores)")
    add("--microbatches", type=count, default=1, metavar="M", help="microbatches in flight (1)")
    add("--slots", type=count_or_none, default=4, metavar="R", help="redundant slots (4)")
    add("--requests", type=count, default=16, metavar="X", help="requests, all at once (16)")
    add("--tokens", type=count, default=64, metavar="X", help="of each answer (64)")
    add("--policy", default="afore", metavar="P", help="(afore)")
    add("--limit-s", type=float, default=LIMIT_S, metavar="S", help=f"for the real run ({LIMIT_S:g})")
    add("--out", metavar="DIR", help="keep spans, traces and reality.json there; it must not hold an earlier run")
    add("--json", action="store_true", help="print one JSON object")
    return parser
