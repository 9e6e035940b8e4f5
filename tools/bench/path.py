"""``python -m afore.tools.bench path``: from demand to plan in the running service, part by part.

Real processes serve the bundled prompts; every role records its spans; what is shown are differences of their times.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from afore.core.clock import WallClock
from afore.core.config import RunConfig
from afore.core.topology import SCHEDULER
from afore.tools.bench import path_report
from afore.tools.bench.ab import Outcome, turns
from afore.tools.bench.against import run_ours
from afore.tools.bench.figures_report import conclude
from afore.tools.bench.local_cluster import LocalCluster, local_cluster
from afore.tools.bench.machine import cpu_by_role, cpu_seconds, machine_facts
from afore.tools.bench.path_options import PathOptions, parse
from afore.tools.bench.path_parts import PARTS, TOTALS, collect, summarise
from afore.tools.bench.plot import check_plot
from afore.tools.bench.prompts import PromptText, read_prompts
from afore.tools.bench.signals import until_signalled
from afore.tools.trace_files import open_directory

DEFAULT_TOKENS: Final = 64
"""Of an answer, where neither the prompt nor an option says."""
UNOBSERVED: Final = " without spans"
"""What the name of a policy's second cluster ends with."""


@dataclass(slots=True)
class _Side:
    """One cluster and what it did, round by round."""

    name: str
    policy: str
    local: LocalCluster
    directory: Path | None
    """Its span files; none: it records nothing."""
    windows: list[tuple[int, int]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    scheduler_cpu_s: list[float] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options, config = parse(argv)
    if options.plot is not None:
        check_plot(options.plot)
    prompts = read_prompts(options.prompts)
    import uvloop

    report: dict[str, Any] = {
        "benchmark": "path",
        "rounds": options.rounds,
        "requests": options.num_prompts,
        "topologies": [],
        "notes": [],
        "interrupted": False,
        "formulas": {**dict(PARTS), **dict(TOTALS)},
        "machine": machine_facts(),
        "options": dataclasses.asdict(options),
    }
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(until_signalled(_measure_all(options, config, prompts, report)))
    report["interrupted"] = outcome is None
    report["load_average_after"] = round(os.getloadavg()[0], 2)
    return conclude(
        report, show=path_report.show, draw=path_report.draw, json_path=options.json, plot_path=options.plot
    )


async def _measure_all(
    options: PathOptions, config: RunConfig, prompts: Sequence[PromptText], report: dict[str, Any]
) -> bool:
    for A, N, M in options.topology:
        topology = dataclasses.replace(config.topology, attention=A, ffn=N, microbatches=M)
        batch = dataclasses.replace(config.batch, max_num_seqs=max(config.batch.max_num_seqs, options.num_prompts))
        shaped = dataclasses.replace(config, topology=topology, batch=batch)
        await _measure(f"{A}/{N}/{M}", options, shaped, prompts, report)
    return True


async def _measure(
    shape: str, options: PathOptions, config: RunConfig, prompts: Sequence[PromptText], report: dict[str, Any]
) -> None:
    """All policies in one topology; an interrupted run reports the rounds that all have finished."""
    sides: dict[str, _Side] = {}
    with tempfile.TemporaryDirectory(prefix="afore-bench-") as folder:
        try:
            await _rounds(options, config, prompts, Path(folder), sides)
        finally:
            # Roles have written what they keep, for they have ended.
            finished = min((len(side.outcomes) for side in sides.values()), default=0)
            for side in sides.values():
                del side.outcomes[finished:], side.windows[finished:], side.scheduler_cpu_s[finished:]
            if finished:
                figures = {name: _figures(side, report["notes"]) for name, side in sides.items()}
                report["topologies"].append({"topology": shape, "rounds": finished, "sides": figures, **_cost(sides)})


async def _rounds(
    options: PathOptions, config: RunConfig, prompts: Sequence[PromptText], folder: Path, sides: dict[str, _Side]
) -> None:
    """Clusters side by side, only one of them at work at a time; fills ``sides`` once all have warmed up."""
    sent = [prompts[index % len(prompts)] for index in range(options.num_prompts)]
    tokens = [options.max_tokens or prompt.max_tokens or DEFAULT_TOKENS for prompt in sent]
    contestants = [(policy, policy, True) for policy in options.policies]
    if options.observed_cost:
        last = options.policies[-1]
        contestants.append((f"{last}{UNOBSERVED}", last, False))
    async with contextlib.AsyncExitStack() as stack:
        started = []
        for number, (name, policy, observed) in enumerate(contestants):
            _say(f"starting {name}, {config.topology.describe()}")
            directory = folder / str(number) if observed else None
            own = dataclasses.replace(config, policy=policy, trace=None if directory is None else str(directory))
            local = await stack.enter_async_context(local_cluster(own, WallClock()))
            await _run(_Side(name, policy, local, directory), sent, tokens)
            started.append(_Side(name, policy, local, directory))
        sides.update({side.name: side for side in started})
        for number in range(options.rounds):
            for name in turns(list(sides), number):
                await _run(sides[name], sent, tokens)
            rates = ", ".join(f"{name} {side.outcomes[-1].tokens_per_second:,.0f}" for name, side in sides.items())
            _say(f"round {number + 1} of {options.rounds}: tokens/s: {rates}")


async def _run(side: _Side, sent: Sequence[PromptText], tokens: Sequence[int]) -> None:
    cluster, pids = side.local.cluster, side.local.pids
    before = cpu_seconds(pids)
    begin_ns = cluster.clock.now_ns()
    outcome = await run_ours(cluster, [prompt.text for prompt in sent], max_tokens=tokens, ignore_eos=False)
    side.windows.append((begin_ns, cluster.clock.now_ns()))
    used = cpu_by_role(before, cpu_seconds(pids))
    side.scheduler_cpu_s.append(used[SCHEDULER]["cpu_s"])
    side.outcomes.append(dataclasses.replace(outcome, cpu_s=sum(row["cpu_s"] for row in used.values())))


def _figures(side: _Side, notes: list[str]) -> dict[str, Any]:
    tokens = sum(outcome.count for outcome in side.outcomes)
    found: dict[str, Any] = {
        "policy": side.policy,
        "tokens_per_second": median(outcome.tokens_per_second for outcome in side.outcomes),
        "cpu_s_per_1000_tokens": sum(outcome.cpu_s for outcome in side.outcomes) / tokens * 1000,
        "scheduler_cpu_s_per_1000_tokens": sum(side.scheduler_cpu_s) / tokens * 1000,
    }
    if side.directory is None:
        return found
    files, problems = open_directory(side.directory)
    ways, incomplete = collect(files, side.windows)
    problems += [problem for file in files for problem in file.problems()]
    if incomplete:
        problems.append(f"{incomplete} targets are not whole in the spans and were left out")
    notes += [f"{side.name}: {problem}" for problem in problems]
    rounds = [[way for way in ways if begin <= way.published <= end] for begin, end in side.windows]
    by_round = [summarise(part) for part in rounds if part]
    found["targets"] = len(ways)
    found["figures"] = summarise(ways)
    for name, figure in found["figures"].items():
        figure["rounds_p50_us"] = [one[name]["p50_us"] for one in by_round if one[name]["n"]]
    return found


def _cost(sides: dict[str, _Side]) -> dict[str, Any]:
    """What recording costs: the same policy with and without spans, round by round."""
    bare = next((side for side in sides.values() if side.directory is None), None)
    if bare is None:
        return {}
    observed = sides[bare.policy]
    pairs = list(zip(observed.outcomes, bare.outcomes, strict=True))
    speed = [mine.tokens_per_second / other.tokens_per_second for mine, other in pairs]
    cpu = [(mine.cpu_s / mine.count) / (other.cpu_s / other.count) for mine, other in pairs]
    return {
        "observation": {
            "policy": bare.policy,
            "tokens_per_second": {"median": median(speed), "min": min(speed), "max": max(speed)},
            "cpu": {"median": median(cpu), "min": min(cpu), "max": max(cpu)},
        }
    }


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
