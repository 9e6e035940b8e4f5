"""``bench serve --against transformers``: the same prompts, stop rule and cores, side by side, interleaved round by round."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from afore.cluster import Cluster, Token, complete
from afore.core.clock import WallClock
from afore.core.config import RunConfig
from afore.core.errors import AforeError, ConfigError
from afore.core.topology import Topology
from afore.models.checkpoint import Checkpoint
from afore.serving.door import request_limits
from afore.serving.spec import checkpoint_path
from afore.tools.bench import against_report
from afore.tools.bench.ab import FORMULAS, Outcome, compare, decode_part, turns
from afore.tools.bench.local_cluster import LocalCluster, local_cluster
from afore.tools.bench.machine import cpu_by_role, cpu_seconds, machine_facts
from afore.tools.bench.options import ServeBenchOptions, effective
from afore.tools.bench.prompts import PromptText
from afore.tools.bench.rival import IMPLEMENTATIONS, NAME, RivalProcess
from afore.tools.bench.signals import until_signalled
from afore.tools.bench.workload import output_tokens

DEFAULT_TOKENS: Final = 64
"""Of an answer, where neither the prompt nor an option says."""
THREADS: Final = (1, 2)
CLIENT: Final = "client-0"
"""This process: it submits to our clusters and takes their tokens, and so belongs to their CPU time."""
CALIBRATION_RUNS: Final = 3
"""Timed runs of each setting of transformers, after one that warms up."""
CALIBRATION_TOKENS: Final = 32
"""Most tokens of an answer there."""
HOPELESS: Final = 2.0
"""A setting whose first run is so many times slower than the best one is not run again."""


@dataclass(slots=True)
class Comparison:
    """What a comparison has found so far."""

    machine: dict[str, Any]
    calibration: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Outcome]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures must know, a line each."""
    roles: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """CPU by role of each of our topologies, over all rounds."""


def main(options: ServeBenchOptions, config: RunConfig, prompts: Sequence[PromptText]) -> int:
    """The command; returns its exit status."""
    import uvloop

    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < options.cores:
        raise ConfigError("cores", f"this process may use {len(usable)}", f"give --cores {len(usable)}")
    # Children inherit it: both sides and their client share the same cores.
    os.sched_setaffinity(0, usable[: options.cores])
    try:
        comparison, failure = Comparison(machine=machine_facts()), ""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(until_signalled(_compare(options, config, prompts, comparison)))
    except AforeError as error:
        if not comparison.rounds:
            raise
        outcome, failure = None, str(error)
    finally:
        os.sched_setaffinity(0, usable)
    if not comparison.rounds:
        print("bench: interrupted before the first round was finished", file=sys.stderr)
        return 0
    result = {
        "baseline": NAME,
        "calibration": comparison.calibration,
        "best": comparison.best,
        "rounds": len(comparison.rounds),
        "requests": options.num_prompts,
        "notes": comparison.notes,
        "interrupted": outcome is None,
        "failure": failure,
        "contestants": compare(comparison.rounds, NAME),
        "idle_cpu_s": max(found.idle_cpu_s for round_ in comparison.rounds for found in round_.values()),
        "cpu_by_role": comparison.roles,
        "machine": comparison.machine,
        "load_average_after": round(os.getloadavg()[0], 2),
        "options": {**effective(options), "api_key": None},
        "formulas": dict(FORMULAS),
    }
    if options.json:
        print(json.dumps(result))
    else:
        against_report.show(result)
    if failure:
        print(f"bench: {failure}; figures are of the rounds before", file=sys.stderr)
    return 1 if failure else 0


async def _compare(
    options: ServeBenchOptions, config: RunConfig, prompts: Sequence[PromptText], comparison: Comparison
) -> bool:
    model = str(checkpoint_path(config))
    sent = [prompts[index % len(prompts)] for index in range(options.num_prompts)]
    ids = _encode(model, [prompt.text for prompt in sent])
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        limits = request_limits(config, checkpoint.spec)
    tokens, cut = output_tokens(
        sent,
        max_tokens=options.max_tokens,
        default_tokens=DEFAULT_TOKENS,
        lengths=[*map(len, ids)],
        max_model_len=min(limits.max_model_len, limits.kv_tokens),
    )
    if cut:
        bound = f"the model's context cut --max-tokens {options.max_tokens} for {cut} of {len(sent)} prompts"
        comparison.notes.append(bound)
        _say(comparison.notes[-1])
    variants = len(IMPLEMENTATIONS) * len(THREADS[: options.cores])
    _say(
        f"first transformers alone in {variants} settings ({CALIBRATION_RUNS} timed runs each), then {options.rounds} rounds of "
        f"its best one and AFORE in {len(options.compare)} shape{'s' * (len(options.compare) > 1)}: this takes minutes"
    )
    await _calibrate(options, model, ids, tokens, comparison)
    best = comparison.best
    async with contextlib.AsyncExitStack() as stack:
        clusters: dict[str, LocalCluster] = {}
        for shape in options.compare:
            name = f"afore {shape.attention}/{shape.ffn}/{shape.microbatches}"
            _say(f"starting {name}")
            own = _shaped(config, shape, options.num_prompts)
            clusters[name] = await stack.enter_async_context(local_cluster(own, WallClock()))
        rival = await stack.enter_async_context(RivalProcess.start(model, best["threads"]))
        pids = {
            NAME: {NAME: rival.pid},
            **{name: {**local.pids, CLIENT: os.getpid()} for name, local in clusters.items()},
        }

        async def run(name: str) -> Outcome:
            if name == NAME:
                return await rival.run(best["implementation"], ids, max_tokens=tokens, ignore_eos=options.ignore_eos)
            return await run_ours(clusters[name].cluster, ids, max_tokens=tokens, ignore_eos=options.ignore_eos)

        names = (*clusters, NAME)
        for name in names:
            await run(name)
        used: dict[str, dict[str, float]] = {name: {} for name in clusters}
        for number in range(options.rounds):
            round_: dict[str, Outcome] = {}
            for name in turns(names, number):
                before = {each: cpu_seconds(found) for each, found in pids.items()}
                outcome = await run(name)
                after = {each: cpu_seconds(found) for each, found in pids.items()}
                round_[name] = _with_cpu(outcome, name, before, after)
                for process, seconds in after[name].items() if name in used else ():
                    used[name][process] = used[name].get(process, 0.0) + seconds - before[name][process]
            comparison.rounds.append({name: round_[name] for name in names})
            for name, processes in used.items():
                comparison.roles[name] = cpu_by_role(dict.fromkeys(processes, 0.0), processes)
            shown = ", ".join(f"{name} {round_[name].tokens_per_second:,.0f}" for name in names)
            _say(f"round {number + 1} of {options.rounds}: tokens/s: {shown}")
    return True


async def _calibrate(
    options: ServeBenchOptions, model: str, ids: Sequence[Sequence[int]], tokens: Sequence[int], comparison: Comparison
) -> None:
    """Every implementation with every number of threads; the best one goes into the rounds."""
    tokens = [min(most, CALIBRATION_TOKENS) for most in tokens]
    for threads in THREADS[: options.cores]:
        _say(f"loading transformers with {threads} thread{'s' * (threads > 1)}")
        async with RivalProcess.start(model, threads) as rival:
            for implementation in IMPLEMENTATIONS:
                rates: list[float] = []
                best = max((row["tokens_per_second"] for row in comparison.calibration), default=0.0)
                for _ in range(1 + CALIBRATION_RUNS):
                    found = await rival.run(implementation, ids, max_tokens=tokens, ignore_eos=options.ignore_eos)
                    rates.append(found.tokens_per_second)
                    if rates[0] < best / HOPELESS:
                        break
                # The first run warms up; it counts only where it was the only one.
                rate = median(rates[1:] or rates)
                comparison.calibration.append(
                    {"implementation": implementation, "threads": threads, "runs": len(rates[1:] or rates)}
                    | {"tokens_per_second": rate}
                )
                _say(f"transformers {implementation}, {threads} thread{'s' * (threads > 1)}: {rate:,.0f} tokens/s")
    comparison.best = max(comparison.calibration, key=lambda row: row["tokens_per_second"])


async def run_ours(
    cluster: Cluster, prompts: Sequence[str | Sequence[int]], *, max_tokens: Sequence[int], ignore_eos: bool
) -> Outcome:
    """All prompts submitted at once through the scripting API, with ``max_tokens`` of each; ends with the last token here.

    CPU is filled in by the caller.
    """
    start_ns = cluster.clock.now_ns()
    answers: list[list[Token]] = await asyncio.gather(
        *(
            complete(cluster, prompt, max_new_tokens=most, ignore_eos=ignore_eos)
            for prompt, most in zip(prompts, max_tokens, strict=True)
        )
    )
    arrivals_ns = [[token.at_ns for token in answer] for answer in answers]
    decode_tokens, decode_s = decode_part(arrivals_ns)
    return Outcome(
        wall_s=(max(times[-1] for times in arrivals_ns) - start_ns) / 1e9,
        tokens=tuple(tuple(token.id for token in answer) for answer in answers),
        decode_tokens=decode_tokens,
        decode_s=decode_s,
        cpu_s=0.0,
    )


def _with_cpu(
    outcome: Outcome, name: str, before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> Outcome:
    used_s = sum(seconds - before[name][process] for process, seconds in after[name].items())
    idle_s = sum(
        seconds - before[each][process]
        for each, found in after.items()
        if each != name
        for process, seconds in found.items()
        if process != CLIENT  # it is this process, which serves whoever's turn it is
    )
    return dataclasses.replace(outcome, cpu_s=used_s, idle_cpu_s=idle_s)


def _shaped(config: RunConfig, shape: Topology, requests: int) -> RunConfig:
    """``config`` in another shape, with room for all requests at once."""
    topology = dataclasses.replace(
        config.topology, attention=shape.attention, ffn=shape.ffn, microbatches=shape.microbatches
    )
    batch = dataclasses.replace(config.batch, max_num_seqs=max(config.batch.max_num_seqs, requests))
    return dataclasses.replace(config, topology=topology, batch=batch)


def _encode(model: str, texts: Sequence[str]) -> list[list[int]]:
    """Token ids as the door makes them."""
    from afore.models.tokenizer import Tokenizer

    tokenizer = Tokenizer(model)
    return [tokenizer.encode(text) for text in texts]


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
