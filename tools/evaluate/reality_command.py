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
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from afore.core.errors import ConfigError
from afore.scheduler.policies.registry import check_policy, policy_kernels
from afore.tools.bench.files import write_whole
from afore.tools.bench.parser import Parser
from afore.tools.calibrate.fit import Fit, fit_all, profile_from
from afore.tools.calibrate.measure import TILE_TOKENS
from afore.tools.calibrate.spans import read_samples
from afore.tools.evaluate.options import count, count_or_none, directory
from afore.tools.evaluate.out import out_directory
from afore.tools.evaluate.profiles import CPU, open_profile
from afore.tools.evaluate.reality_fit import Host, host_alone, host_of
from afore.tools.evaluate.reality_plans import plans_again, rows_again
from afore.tools.evaluate.reality_report import show
from afore.tools.evaluate.reality_runs import REAL, SPANS, TRACE, WIRE, Shape, run_really, run_virtually
from afore.tools.evaluate.reality_ways import Way, ways
from afore.tools.evaluate.store import to_bytes
from afore.workers.device.hardware import HardwareProfile

LIMIT_S = 300.0
LEAST_TOKENS = 4
"""Of an answer: its first comes from prefill, and one more is for each half."""
JSON = "reality.json"
OWN, SHARED = "fitted", "shared"
"""Predictions: fitted on the shape's own even steps; and on the first shape's, with cores that all workers share."""

EPILOG = """examples:
  python -m afore.tools.evaluate reality                          # one attention and one FFN process, the bundled model
  python -m afore.tools.evaluate reality --shapes 1+1,1+2,2+2     # more of them
  python -m afore.tools.evaluate reality --json --out DIR

A profile of this CPU is measured, then fitted to the even steps of a recorded run: kernels by size, and the host's part of each
target. The same requests run in virtual time on the demand of the odd steps, and are held against them. Each shape is predicted
twice: from its own even steps; and from those of the first shape, as if nobody had waited for a core there, on C cores that all
workers share. Plans are made again from what the scheduler was sent: by the same role in
virtual time, and by the plain reference. On a machine that has other work, times say how much of it there was.

exit status: 0 done, 1 a plan differs or a file cannot be written, 2 the request cannot be carried out as given
"""


def reality(argv: Sequence[str]) -> int:
    """The command; 0, or 1 where a plan that is made again differs. Raises ``ConfigError``, ``RoleLost``."""
    options = _parser().parse_args(argv)
    usable = len(os.sched_getaffinity(0))
    cores = options.cores or min(2, usable)
    if cores > usable:
        raise ConfigError("--cores", f"{cores} of {usable} that this process may use", "give fewer")
    if not 0 < options.limit_s < float("inf"):
        raise ConfigError("--limit-s", f"{options.limit_s:g} is no time to wait", "give seconds, more than 0")
    shapes = [_shape(text, options) for text in options.shapes.split(",")]
    twice = [str(shape) for shape, times in Counter(shapes).items() if times > 1]
    if twice:
        raise ConfigError("--shapes", f"{twice[0]} stands there twice", "give each once")
    if options.tokens < LEAST_TOKENS:
        raise ConfigError(
            "--tokens", f"{options.tokens} make no even and odd steps to compare", f"give {LEAST_TOKENS} or more"
        )
    check_policy(options.policy)
    for shape in shapes:
        shape.config(Path("unwritten"), emulated=False)  # what it refuses is refused before anything is measured
    for compile_kernel in policy_kernels(options.policy):
        compile_kernel()
    if options.out is not None:
        with out_directory(Path(options.out), (JSON,)):
            return _held_against(options, shapes, cores, Path(options.out))
    with tempfile.TemporaryDirectory(prefix="afore-reality-") as temporary:
        return _held_against(options, shapes, cores, Path(temporary))


def _held_against(options: argparse.Namespace, shapes: Sequence[Shape], cores: int, out: Path) -> int:
    """Runs all shapes into ``out``, and shows how far predictions are off."""
    places = [_fresh(out / str(shape).replace(" ", "")) for shape in shapes]
    base = open_profile(CPU, out, _say)
    before = os.getloadavg()[0]
    first: Fitted | None = None
    found = []
    for shape, place in zip(shapes, places, strict=True):
        _say(f"running {shape} attention and FFN processes")
        fitted = _run(shape, place, base, cores, options.limit_s)
        first = first or fitted
        _say("the same in virtual time")
        found.append(_compared(shape, place, fitted, first, cores))
    report = {"cores": cores, "load": [before, os.getloadavg()[0]], "shapes": found}
    write_whole(str(out / JSON), to_bytes(report))
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return int(not all(one["same"] for shape_found in found for one in shape_found["plans"].values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A real run, and what its even steps say."""

    profile: HardwareProfile
    fits: dict[str, Fit]
    found: list[Way]
    """All targets of it."""
    rows: int
    """Of a full target."""
    host: Host
    alone: Host
    """Of the same targets, as if nobody waited for a core."""
    share: float
    """Of the cores' time, that the machine's other work left."""


def _run(shape: Shape, place: Path, base: HardwareProfile, cores: int, limit_s: float) -> Fitted:
    real = place / REAL
    real.mkdir()
    # Workers inherit the cores that this process may use.
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(everything)[:cores])
    try:
        usage = asyncio.run(run_really(shape, real, limit_s=limit_s))
    finally:
        os.sched_setaffinity(0, everything)
    recorded = read_samples(real / SPANS, TILE_TOKENS)
    fits = fit_all(recorded)
    about = f"{base.about}, then fitted to a run's even steps"
    profile = profile_from(base, fits, name="cpu-fitted", about=about, workers=shape.ffn)
    costs = replace(profile.costs(workers=shape.ffn), tile_tokens=TILE_TOKENS)
    found = ways(real / SPANS)
    rows = full(found)
    even = [way for way in found if way.tokens == rows and way.target.step % 2 == 0]
    layers = int(profile.shape.layers.value - profile.shape.dense_layers.value)
    host = host_of(even, recorded, costs, fits)
    alone = host_alone(even, usage.cpu_us(layers, shape.microbatches))
    return Fitted(profile=profile, fits=fits, found=found, rows=rows, host=host, alone=alone, share=usage.share())


def _compared(shape: Shape, place: Path, fitted: Fitted, first: Fitted, cores: int) -> dict[str, Any]:
    """Both predictions against the odd steps, and plans made again."""
    profile = replace(first.profile, planner_us=fitted.profile.planner_us)
    predicted = {}
    for name, kernels, host, shared in (
        (OWN, fitted.profile, fitted.host, None),
        (SHARED, profile, first.alone, cores),
    ):
        if shared is not None and not host.beside:
            continue
        directory = place / name
        directory.mkdir()
        run_virtually(shape, directory, place / REAL, kernels, host, tokens=fitted.rows, cores=shared)
        predicted[name] = compare(fitted.found, ways(directory / SPANS), fitted.rows)
    with tempfile.TemporaryDirectory(prefix="afore-reality-") as scratch:
        plans = plans_again(place / REAL / WIRE, Path(scratch), shape.policy)
    plans["recorded rows"] = rows_again(place / REAL / TRACE)
    plans["rows of the virtual run"] = rows_again(place / OWN / TRACE)
    return {
        "shape": {field.name: getattr(shape, field.name) for field in fields(shape)},
        "name": str(shape),
        "rows": fitted.rows,
        "measured": halves(fitted.found, fitted.rows),
        "predicted": predicted,
        "spans": _spans(fitted.fits),
        "host_us": fitted.host.means(),
        "alone_us": fitted.alone.means(),
        "core_share": fitted.share,
        "beside_us": dict(fitted.alone.beside),
        "plans": plans,
    }


def full(found: Sequence[Way]) -> int:
    """Rows of a full target: the most frequent number. Raises ``ConfigError`` where a half of the run has none of it."""
    rows = Counter(way.tokens for way in found).most_common(1)[0][0]
    if len({way.target.step % 2 for way in found if way.tokens == rows}) < 2:
        raise ConfigError("reality", "a half of the run has no full target", "give more --tokens")
    return rows


def halves(found: Sequence[Way], rows: int) -> dict[str, Any]:
    """Times of full targets, of the steps that are fitted on (even) and of those that are tested on (odd)."""
    return {
        name: _times([way for way in found if way.target.step % 2 == odd], rows)
        for odd, name in enumerate(("even", "odd"))
    }


def compare(measured: Sequence[Way], predicted: Sequence[Way], rows: int) -> dict[str, Any]:
    """Times of full targets of a virtual run, and their errors against either half of the real one: the odd one is the test."""
    times = _times(predicted, rows)
    against = halves(measured, rows)
    for half, its in against.items():
        for what in ("mean_us", "median_us"):
            times[f"{half}_{what.removesuffix('_us')}_error"] = times[what] / its[what] - 1
    return times


def _times(found: Sequence[Way], rows: int) -> dict[str, Any]:
    took = sorted(way.took for way in found if way.tokens == rows)
    if not took:
        raise ConfigError(
            "reality", f"no target of a run has {rows} rows, as full ones of the other have", "run it again"
        )
    return {
        "targets": len(took),
        "mean_us": statistics.mean(took),
        "median_us": statistics.median(took),
        "p10_us": took[len(took) // 10],
        "p90_us": took[len(took) * 9 // 10],
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


def _shape(text: str, options: argparse.Namespace) -> Shape:
    """Of ``A+N``. Raises ``ConfigError``."""
    attention, _, ffn = text.partition("+")
    if not (attention.isdecimal() and ffn.isdecimal() and int(attention) and int(ffn)):
        raise ConfigError("--shapes", f"{text!r} is none", "give A+N, such as 1+2: one attention and two FFN processes")
    return Shape(
        attention=int(attention),
        ffn=int(ffn),
        microbatches=options.microbatches,
        slots=options.slots,
        requests=options.requests,
        tokens=options.tokens,
        policy=options.policy,
    )


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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m afore.tools.evaluate reality",
        description="Predicted against measured time of targets on this machine, and plans made again from what was recorded.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shapes", default="1+1", metavar="A+N,…", help="attention and FFN processes (1+1); several, by commas")
    add("--cores", type=count, metavar="C", help="cores that the processes may use (2, or all there are)")
    add("--microbatches", type=count, default=1, metavar="M", help="microbatches in flight (1)")
    add("--slots", type=count_or_none, default=4, metavar="R", help="redundant slots (4)")
    add("--requests", type=count, default=16, metavar="X", help="requests, all at once (16)")
    add("--tokens", type=count, default=160, metavar="X", help="of each answer (160)")
    add("--policy", default="afore", metavar="P", help="(afore)")
    add("--limit-s", type=float, default=LIMIT_S, metavar="S", help=f"for each real run ({LIMIT_S:g})")
    add(
        "--out",
        type=directory,
        metavar="DIR",
        help="keep spans, traces and reality.json there; it must not hold an earlier run",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser
