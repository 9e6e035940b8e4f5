"""What a run of ``bench serve`` found, and how it is told: the report first, then the files, each failure in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from afore.core.config import RunConfig
from afore.core.errors import HostError
from afore.tools.bench import report
from afore.tools.bench.files import write_whole
from afore.tools.bench.latency import Record, summarise
from afore.tools.bench.load import Load
from afore.tools.bench.openai_client import ServerFacts
from afore.tools.bench.options import ServeBenchOptions, effective
from afore.tools.bench.plot import draw_latencies
from afore.tools.ending import flush_output, lose_output
from afore.tools.span_table import SpanTable


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


def conclude(options: ServeBenchOptions, config: RunConfig, run: Run) -> int:
    """Prints the report, writes the files; returns the exit status. Raises ``BrokenPipeError`` at the very end."""
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
