"""``python -m afore.tools.bench serve``: load on a server, and what its clients saw."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from afore.core.clock import WallClock
from afore.core.config import RunConfig
from afore.core.errors import AforeError, ConfigError, RoleLost
from afore.serving.demo import check_writable
from afore.tools.bench.arrivals import Arrival, check_schedule, check_sizes, draw_arrivals_s, read_arrivals
from afore.tools.bench.load import Load
from afore.tools.bench.local_cluster import LocalCluster, local_cluster
from afore.tools.bench.machine import cpu_by_role, cpu_seconds, machine_facts
from afore.tools.bench.openai_client import OpenAIClient, ServerFacts
from afore.tools.bench.options import ServeBenchOptions, parse
from afore.tools.bench.outcome import Run, conclude
from afore.tools.bench.plot import check_plot
from afore.tools.bench.prompts import PromptText, read_prompts
from afore.tools.bench.signals import until_signalled
from afore.tools.bench.workload import Workload, from_rate, from_trace
from afore.tools.span_table import build
from afore.tools.trace_files import open_directory

DEFAULT_TOKENS = 64
"""Of an answer, where neither the prompt nor an option says."""


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options, config = parse(argv)
    for name in ("out", "plot"):
        if (path := getattr(options, name)) is not None:
            _check_writable(name, path)
    if options.plot is not None:
        check_plot(options.plot)
    # Before the loop, where Ctrl-C ends a pipe that nobody writes to; and before a cluster is started for nothing.
    prompts = read_prompts(options.prompts)
    arrivals = _arrivals(options)
    if options.against:
        from afore.tools.bench import against

        return against.main(options, config, prompts)
    import uvloop

    run = Run(machine=machine_facts())
    with contextlib.ExitStack() as stack:
        directory = None
        if options.spans:
            directory = config.trace or stack.enter_context(tempfile.TemporaryDirectory(prefix="afore-bench-"))
            config = dataclasses.replace(config, trace=directory)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(until_signalled(_measure(options, config, prompts, arrivals, run)))
        run.interrupted = outcome is None
        if directory is not None and run.records:
            _read_spans(Path(directory), run)
    return conclude(options, config, run)


def _arrivals(options: ServeBenchOptions) -> tuple[Arrival, ...] | None:
    """Those of the trace. Raises ``ConfigError`` where times, drawn or read, are beyond what can be waited for."""
    if options.arrivals is None:
        if not options.against:
            drawn_s = draw_arrivals_s(
                options.num_prompts, options.request_rate, burstiness=options.burstiness, seed=options.seed
            )
            check_schedule("request-rate", drawn_s[-1])
        return None
    arrivals = read_arrivals(options.arrivals, options.num_prompts)
    check_schedule("time-scale", arrivals[-1].at_s * options.time_scale)
    return arrivals


def _read_spans(directory: Path, run: Run) -> None:
    """What was measured is worth more than its spans: where they cannot be read, a note says so."""
    try:
        files, problems = open_directory(directory)
        run.spans = build(files, since_ns=run.began_ns, until_ns=run.ended_ns)
        run.notes += [problem for file in files for problem in file.problems()] + problems
    except (AforeError, OSError) as error:
        run.notes.append(f"no spans: {error}")


async def _measure(
    options: ServeBenchOptions,
    config: RunConfig,
    prompts: Sequence[PromptText],
    arrivals: Sequence[Arrival] | None,
    run: Run,
) -> bool:
    clock = WallClock()
    try:
        async with (
            _server(options, config, clock) as (url, local),
            OpenAIClient.connect(
                url,
                clock,
                api_key=options.api_key or config.serve.api_key,
                endpoint=options.endpoint,
                ignore_eos=options.ignore_eos or options.arrivals is not None,
            ) as client,
        ):
            run.server = await client.describe()
            workload = await _workload(options, prompts, arrivals, client, run.server)
            run.notes += workload.notes
            await _warm_up(client, workload, clock, options.warmup)
            print(f"sending {len(workload.planned)} requests to {client.url} …", file=sys.stderr, flush=True)
            await _under_load(options, workload, client, local, clock, run)
    except RoleLost as lost:
        # Leaving a cluster that has lost a role raises it; the run has noticed already, or it came too early to measure.
        if not run.records:
            raise
        run.died = run.died or str(lost)
    return True


@contextlib.asynccontextmanager
async def _server(
    options: ServeBenchOptions, config: RunConfig, clock: WallClock
) -> AsyncIterator[tuple[str, LocalCluster | None]]:
    """(address, the cluster behind it where it is started here)."""
    if options.url is not None:
        yield options.url, None
        return
    serve = dataclasses.replace(config.serve, http=True, host="127.0.0.1", port=0)
    print(f"starting {config.topology.describe()}, policy {config.policy} …", file=sys.stderr)
    async with local_cluster(dataclasses.replace(config, serve=serve), clock) as local:
        yield local.cluster.url, local


async def _workload(
    options: ServeBenchOptions,
    prompts: Sequence[PromptText],
    arrivals: Sequence[Arrival] | None,
    client: OpenAIClient,
    server: ServerFacts,
) -> Workload:
    if arrivals is None:
        texts = [prompt.text for prompt in prompts[: options.num_prompts]]
        # Only a number that was given can exceed the context unseen: what prompts ask for is theirs to know.
        bounded = options.max_tokens is not None and server.max_model_len is not None
        ids = await client.tokenize(texts) if bounded else None
        return from_rate(
            prompts[: options.num_prompts],
            count=options.num_prompts,
            rate=options.request_rate,
            burstiness=options.burstiness,
            seed=options.seed,
            max_tokens=options.max_tokens,
            default_tokens=DEFAULT_TOKENS,
            lengths=None if ids is None else [*map(len, ids)],
            max_model_len=server.max_model_len,
        )
    check_sizes(arrivals, max_model_len=server.max_model_len, max_tokens=options.max_tokens)
    few = prompts[: max(options.num_prompts, 32)]
    return from_trace(
        arrivals,
        few,
        await client.tokenize([prompt.text for prompt in few]),
        time_scale=options.time_scale,
        max_model_len=server.max_model_len,
        max_tokens=options.max_tokens,
    )


async def _warm_up(client: OpenAIClient, workload: Workload, clock: WallClock, count: int) -> None:
    """The first requests, at once and not counted. Raises ``ConfigError`` where all of them fail."""
    first = [dataclasses.replace(planned, due_s=0.0) for planned in workload.planned[:count]]
    if first:
        load = Load(first, client.begin, clock)
        died = await load.run(client.trouble)
        failures = [record.failure for record in load.records if record.failure]
        if died or len(failures) == len(first):
            raise ConfigError("warmup", died or failures[0], "look at the server's log; --warmup 0 goes on regardless")


async def _under_load(
    options: ServeBenchOptions,
    workload: Workload,
    client: OpenAIClient,
    local: LocalCluster | None,
    clock: WallClock,
    run: Run,
) -> None:
    pids = local.pids if local is not None else {}
    before = cpu_seconds(pids)
    client_before_s = time.process_time()
    run.load = Load(workload.planned, client.begin, clock, concurrency=options.concurrency)
    run.began_ns = clock.now_ns()
    try:
        run.died = await run.load.run(client.trouble, local.cluster.lost() if local is not None else None)
    finally:
        run.ended_ns = clock.now_ns()
        run.client_cpu_s = time.process_time() - client_before_s
        run.wall_s = (run.ended_ns - run.began_ns) / 1e9
        run.roles = cpu_by_role(before, cpu_seconds(pids))


def _check_writable(name: str, path: str) -> None:
    try:
        check_writable(path)
    except ConfigError as error:
        raise ConfigError(name, error.problem, error.remedy) from None
