"""``python -m afore.tools.bench serve``: load on a server, and what its clients saw."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afore.core.clock import WallClock
from afore.core.config import RunConfig
from afore.core.errors import AforeError, ConfigError, HostError, RoleLost
from afore.serving.demo import check_writable
from afore.tools.bench import report
from afore.tools.bench.arrivals import Arrival, check_schedule, check_sizes, draw_arrivals_s, read_arrivals
from afore.tools.bench.files import write_whole
from afore.tools.bench.latency import Record, summarise
from afore.tools.bench.load import Load
from afore.tools.bench.local_cluster import LocalCluster, local_cluster
from afore.tools.bench.machine import cpu_by_role, cpu_seconds, machine_facts
from afore.tools.bench.openai_client import OpenAIClient, ServerFacts
from afore.tools.bench.options import ServeBenchOptions, effective, parse
from afore.tools.bench.plot import check_plot, draw_latencies
from afore.tools.bench.prompts import PromptText, read_prompts
from afore.tools.bench.signals import until_signalled
from afore.tools.bench.workload import Workload, from_rate, from_trace
from afore.tools.ending import flush_output, lose_output
from afore.tools.span_table import SpanTable, build
from afore.tools.trace_files import open_directory

DEFAULT_TOKENS = 64
"""Of an answer, where neither the prompt nor an option says."""


@dataclass(slots=True)
class Run:
    """What a run has found so far; it is filled while it goes on, so that an interruption loses nothing."""

    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    server: ServerFacts | None = None
    load: Load | None = None
    died: str = ""
    interrupted: bool = False
    client_cpu_s: float = 0.0
    wall_s: float = 0.0
    roles: dict[str, dict[str, float]] = field(default_factory=dict)
    """CPU by role, of a cluster that was started here."""
    began_ns: int = 0
    ended_ns: int = 0
    spans: SpanTable | None = None

    @property
    def records(self) -> Sequence[Record]:
        """Of every request that was sent, in order."""
        return sorted(self.load.records, key=lambda record: record.index) if self.load is not None else ()


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
    return _conclude(options, config, run)


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
        return from_rate(
            prompts,
            count=options.num_prompts,
            rate=options.request_rate,
            burstiness=options.burstiness,
            seed=options.seed,
            max_tokens=options.max_tokens,
            default_tokens=DEFAULT_TOKENS,
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


def _conclude(options: ServeBenchOptions, config: RunConfig, run: Run) -> int:
    records = run.records
    if not records:
        print("bench: interrupted before the first request was sent", file=sys.stderr)
        return 0 if run.interrupted else 1
    assert run.load is not None
    result = {
        **summarise(records, options.objectives),
        "unsent": run.load.unsent,
        "interrupted": run.interrupted,
        "died": run.died,
        "client_cpu_share": run.client_cpu_s / run.wall_s if run.wall_s > 0 else None,
        "cpu_by_role": _per_thousand(run.roles, sum(record.output_tokens for record in records)),
        "notes": run.notes,
        "server": dataclasses.asdict(run.server) if run.server is not None else None,
        "machine": run.machine,
        "options": effective(options),
        "cluster": dataclasses.asdict(config) if options.url is None else None,
        "formulas": dict(report.FORMULAS),
    }
    if run.spans is not None:
        result["spans"] = dataclasses.asdict(run.spans)
    # The report first: a file that cannot be written costs that file, not the measurement. A reader who went away is told
    # last (``BrokenPipeError``), for files do not depend on him.
    with contextlib.ExitStack() as behind:
        unwritten = 0
        try:
            _report(options, result, run)
        except BrokenPipeError as gone:
            behind.callback(_raise, gone)
        except HostError as error:
            unwritten += _failed(error)
        for path, write in _files(options, records, run.began_ns):
            try:
                write(path)
            except HostError as error:
                unwritten += _failed(error)
        if run.died:
            print(f"bench: the server died: {run.died}; figures are of what came before", file=sys.stderr)
        nothing = not result["completed"] and not run.interrupted
        return 1 if run.died or unwritten or nothing else 0


def _report(options: ServeBenchOptions, result: dict[str, Any], run: Run) -> None:
    """Raises ``BrokenPipeError``, or ``HostError`` where standard output cannot be written."""
    try:
        if options.json:
            print(json.dumps(_without_secrets(result)))
        else:
            report.show(result, run.spans)
    except BrokenPipeError:
        raise
    except SystemExit as gone:  # what rich makes of a closed pipe
        raise BrokenPipeError from gone
    except OSError as error:
        lose_output()
        raise HostError("standard output", f"it cannot be written: {error.strerror}") from error
    flush_output()


def _files(
    options: ServeBenchOptions, records: Sequence[Record], began_ns: int
) -> list[tuple[str, Callable[[str], None]]]:
    """(path, what writes it) of every file that was asked for."""
    files: list[tuple[str, Callable[[str], None]]] = []
    if options.out is not None:
        lines = "".join(json.dumps(report.request_line(record, began_ns)) + "\n" for record in records)
        files.append((options.out, lambda path: write_whole(path, lines.encode())))
    if options.plot is not None:
        files.append((options.plot, lambda path: draw_latencies(records, path)))
    return files


def _failed(error: HostError) -> int:
    print(f"bench: {error}", file=sys.stderr)
    return 1


def _raise(error: BaseException) -> None:
    raise error


def _per_thousand(roles: Mapping[str, Mapping[str, float]], output_tokens: int) -> dict[str, dict[str, float]]:
    found = {}
    for role, row in roles.items():
        found[role] = dict(row)
        if output_tokens:
            found[role]["cpu_s_per_1000_tokens"] = row["cpu_s"] / output_tokens * 1000
    return found


def _without_secrets(result: dict[str, Any]) -> dict[str, Any]:
    """Keys do not belong into files that are passed around."""
    result["options"]["api_key"] = None
    if result["cluster"] is not None:
        result["cluster"]["serve"]["api_key"] = None
    return result


def _check_writable(name: str, path: str) -> None:
    try:
        check_writable(path)
    except ConfigError as error:
        raise ConfigError(name, error.problem, error.remedy) from None
