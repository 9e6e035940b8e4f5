"""``python -m afore.tools.bench planner``: microseconds per plan, beside a C++ build of the same algorithm and public planners.

The core call alone: no demand is gathered and nothing is published. Every contestant plans the same targets in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from afore.core.errors import ConfigError, HostError
from afore.scheduler.costs import Costs
from afore.tools.bench.ab import turns
from afore.tools.bench.machine import machine_facts
from afore.tools.bench.planner_cores import (
    CORES,
    CXX,
    CoreSpec,
    Driven,
    Driver,
    Prepared,
    Run,
    build_driver,
    one_at_a_time,
    planner_config,
    python_run,
)
from afore.tools.bench.planner_demand import Demands, drifting
from afore.tools.bench.planner_public import PublicPlanner, check_public, find_public, measure_public
from afore.tools.bench.planner_report import PAPER_US, print_report
from afore.tools.bench.planner_traces import Recorded, read_traces

HIDDEN_US = 1e9
"""A window under which every copy hides: then only the tiles decide."""

EPILOG = """\
example:
  python -m afore.tools.bench planner                            # EP 2…128, R = 2, 4, 8, 2,048 tokens
  python -m afore.tools.bench planner --ep 8,16 --slots 8 --tokens 512,2048 --json planner.json
  python -m afore.tools.bench planner --traces routing/          # demand from recorded routing instead of a generator
  python -m afore.tools.bench planner --ep 8 --slots 8 --public  # SGLang's EPLB too, from its wheel (downloads it)

exit status: 0 measured, 2 the request could not be carried out as given
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting."""

    ep: int
    """N: FFN workers."""
    slots: int
    """R."""
    tokens: int
    """T."""


@dataclass(slots=True)
class _Contestant:
    core: CoreSpec
    prepared: Prepared
    guarded: Any
    rounds: list[Driven]


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(argv)
    for name in ("experts", "top_k", "tile_tokens", "rounds", "targets"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{getattr(options, name)} is not at least 1")
    check_public(options.public)
    rows = [
        Row(ep=ep, slots=slots, tokens=tokens)
        for tokens in options.tokens
        for slots in options.slots
        for ep in options.ep
    ]
    notes: list[str] = []
    traces = read_traces(Path(options.traces), seed=options.seed) if options.traces else None
    with tempfile.TemporaryDirectory(prefix="afore-bench-") as folder:
        driver: Driver | None = None
        try:
            driver = build_driver(Path(folder))
        except HostError as error:
            notes.append(f"no C++ build: {error}; cores are timed from Python, about a microsecond more a call")
        cores = {name: make() for name, make in CORES.items()}
        public = find_public(options.public, Path(options.wheels or folder), notes) if options.public else []
        results = [_measure(row, options, driver, cores, public, traces, notes) for row in rows]
    report = {
        "benchmark": "planner",
        "experts": options.experts if traces is None else traces.experts,
        "top_k": options.top_k,
        "tile_tokens": options.tile_tokens,
        "demand": f"drifting, seed {options.seed}" if traces is None else traces.text,
        "in_flight": options.in_flight,
        "rounds": options.rounds,
        "targets_per_round": options.targets,
        "rows": results,
        "notes": notes,
        "machine": machine_facts(),
    }
    print_report(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _measure(
    row: Row,
    options: argparse.Namespace,
    driver: Driver | None,
    cores: dict[str, CoreSpec],
    public: Sequence[PublicPlanner],
    traces: Recorded | None,
    notes: list[str],
) -> dict[str, Any]:
    """One setting: warm-up, then rounds in which everybody plans the same targets, in turn."""
    total = (options.rounds + 1) * options.targets
    demand_TE: Demands
    pairs = row.tokens * options.top_k
    if traces is not None:
        demand_TE = traces.demands(pairs=pairs, targets=total, seed=options.seed)
    else:
        demand_TE = drifting(num_experts=options.experts, pairs=pairs, targets=total, seed=options.seed)
    config, primaries_E = planner_config(demand_TE.shape[1], row.ep, row.slots, options.tile_tokens)
    costs = Costs(tile_us=20.0, copy_us=options.copy_us, window_us=options.window_us)
    contestants = {
        name: _Contestant(core, core.prepare(config, primaries_E), np.zeros(row.ep * row.slots, np.bool_), [])
        for name, core in {**cores, **({CXX: driver.core} if driver else {})}.items()
    }
    run: Run = driver.run if driver else python_run
    if options.in_flight == 0:
        run = one_at_a_time(run)
    for round_ in range(options.rounds + 1):
        part_TE = demand_TE[round_ * options.targets : (round_ + 1) * options.targets]
        for name in turns(list(contestants), round_):
            one = contestants[name]
            driven = run(one.core, one.prepared, one.guarded, part_TE, costs)
            if round_:
                one.rounds.append(driven)
    measured = demand_TE[options.targets :]
    found: dict[str, Any] = {
        "ep": row.ep,
        "slots": row.slots,
        "tokens": row.tokens,
        "paper_us": PAPER_US.get(row.ep),
        "static": _quality_of_static(measured, primaries_E, row.ep, options.tile_tokens),
        "cores": {name: _figures(one.rounds, row.ep) for name, one in contestants.items()},
        "public": measure_public(public, measured, config, notes),
    }
    if CXX in contestants and "afore" in contestants:
        ours, theirs = contestants["afore"], contestants[CXX]
        found["identical"] = bool(np.array_equal(ours.prepared.buffer, theirs.prepared.buffer)) and all(
            np.array_equal(mine.max_tiles, other.max_tiles)
            for mine, other in zip(ours.rounds, theirs.rounds, strict=True)
        )
    if CXX in contestants:
        base = contestants[CXX].rounds
        for name, one in contestants.items():
            if name != CXX:
                ratios = [
                    float(np.median(mine.nanoseconds) / np.median(other.nanoseconds))
                    for mine, other in zip(one.rounds, base, strict=True)
                ]
                found["cores"][name]["ratio"] = {
                    "median": float(np.median(ratios)),
                    "min": min(ratios),
                    "max": max(ratios),
                }
    return found


def _figures(rounds: Sequence[Driven], num_workers: int) -> dict[str, Any]:
    nanoseconds = np.concatenate([one.nanoseconds for one in rounds])
    most = np.concatenate([one.max_tiles for one in rounds])
    total = np.maximum(np.concatenate([one.total_tiles for one in rounds]), 1)
    bound = -(-total // num_workers)
    return {
        "median_us": float(np.median([np.median(one.nanoseconds) for one in rounds]) / 1e3),
        "p99_us": float(np.percentile(nanoseconds, 99) / 1e3),
        "tile_imbalance": float((most * num_workers / total).mean()),
        "at_bound": float((most == bound).mean()),
        "gap_to_bound": float((most / bound - 1).mean()),
    }


def _quality_of_static(demand_TE: Demands, primaries_E: Any, num_workers: int, tile_tokens: int) -> dict[str, float]:
    tiles_TE = -(-demand_TE // tile_tokens)
    loads = np.zeros((len(demand_TE), num_workers))
    np.add.at(loads.T, primaries_E, tiles_TE.T)
    return {"tile_imbalance": float((loads.max(axis=1) * num_workers / tiles_TE.sum(axis=1)).mean())}


def _numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError
    return values


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.bench planner",
        description="Microseconds per plan and the balance they buy, for each core, EP, R and tokens.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ep", type=_numbers, default=[2, 4, 8, 16, 32, 64, 128], metavar="N,…", help="FFN workers (2,4,…,128)")
    add("--slots", type=_numbers, default=[2, 4, 8], metavar="R,…", help="redundant slots of a worker (2,4,8)")
    add("--tokens", type=_numbers, default=[2048], metavar="T,…", help="tokens of a target (2048)")
    add("--experts", type=int, default=128, help="E of generated demand (128)")
    add("--top-k", type=int, default=8, help="K of generated demand (8)")
    add("--tile-tokens", type=int, default=64, help="M_tile (64)")
    add("--copy-us", type=float, default=130.0, help="microseconds of a copy (130)")
    add("--window-us", type=float, default=HIDDEN_US, help="window that hides copies (all of them)")
    add("--in-flight", type=int, choices=(0, 1), default=1, help="targets whose slots are guarded: M - 1 (1)")
    add("--rounds", type=int, default=12, help="interleaved rounds (12)")
    add("--targets", type=int, default=100, help="targets of a round (100)")
    add("--seed", type=int, default=1, help="of generated demand (1)")
    add(
        "--traces",
        default="",
        metavar="PATH",
        help="take demand from recorded routing, brought to the paper's skew: an .npz, or a folder with some",
    )
    add(
        "--public",
        nargs="?",
        const="sglang",
        default="",
        metavar="NAME,…",
        help="also run public planners out of their wheels, downloaded without dependencies: sglang (default), vllm (large)",
    )
    add(
        "--wheels",
        default="",
        metavar="DIR",
        help="look there for their wheels first, and keep there what is downloaded",
    )
    add("--json", default="", metavar="FILE", help="write everything there")
    return parser
