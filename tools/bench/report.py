"""The tables of ``bench serve``: every figure with its unit, the formulas below, and no line for what was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from afore.tools.bench.latency import FORMULAS, LATENCIES, Record
from afore.tools.bench.machine import describe_machine, report_console
from afore.tools.printable import unmarked
from afore.tools.span_table import SpanTable
from afore.tools.span_view import show_roles, show_target

BUSY_CLIENT = 0.8
"""Share of a core above which the client may be what is measured."""

__all__ = ["FORMULAS", "request_line", "show"]


def request_line(record: Record, began_ns: int) -> dict[str, Any]:
    """One request for ``--out``: times in ms after the run began."""

    def after_ms(at_ns: int) -> float:
        return round((at_ns - began_ns) / 1e6, 3)

    return {
        "index": record.index,
        "due_ms": after_ms(record.due_ns),
        "sent_ms": after_ms(record.sent_ns),
        "chunks_ms": [after_ms(at_ns) for at_ns in record.chunks_ns],
        "ended_ms": after_ms(record.ended_ns),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "ttft_ms": record.ttft_ms,
        "tpot_ms": record.tpot_ms,
        "e2e_ms": record.e2e_ms,
        "failure": record.failure,
    }


def show(result: Mapping[str, Any], spans: SpanTable | None, console: Console | None = None) -> None:
    """Prints a result."""
    console = console or report_console()
    _totals(result, console)
    latencies = Table("latency", title="latencies (ms)", title_justify="left")
    for heading in ("mean", "p50", "p90", "p99"):
        latencies.add_column(heading, justify="right")
    for name in (*LATENCIES, "late_start"):
        if (row := result.get(f"{name}_ms")) is not None:
            title = name.replace("_", " ") if name == "late_start" else name.upper()
            latencies.add_row(title, *(f"{row[key]:,.2f}" for key in ("mean", "p50", "p90", "p99")))
    console.print(latencies)
    if result["cpu_by_role"]:
        _cpu(result, console)
    for name, formula in FORMULAS.items():
        if name != "goodput" or "goodput" in result:
            console.print(f"[bold]{name}[/bold]: {escape(formula)}", style="dim", soft_wrap=True)
    share = result["client_cpu_share"]
    if share is not None:
        console.print(f"client: {share:.0%} of one core", soft_wrap=True)
        if share > BUSY_CLIENT:
            console.print("[yellow]the client itself was busy: it may limit what was measured[/yellow]")
    for note in result["notes"]:
        console.print(f"note: {unmarked(note)}", soft_wrap=True)
    console.print(escape(describe_machine(result["machine"])), soft_wrap=True)
    if spans is not None:
        cpu_s = {role: row["cpu_s"] for role, row in result["cpu_by_role"].items()}
        show_target(spans, console)
        show_roles(spans, console, title="spans by role", cpu_s=cpu_s)
        console.print(
            "spans were recorded during this run, which costs some CPU: compare runs without --spans", style="dim"
        )


def _totals(result: Mapping[str, Any], console: Console) -> None:
    server = result["server"]
    title = unmarked(f"{server['model']} {server['version']}".strip())
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("requests completed", f"{result['completed']} of {result['requests'] + result['unsent']}")
    for name in ("failed", "unfinished", "unsent"):
        if result[name]:
            table.add_row(f"requests {name}", f"[red]{result[name]}[/red]")
    table.add_row("duration (s)", f"{result['duration_s']:,.2f}")
    for key, what, digits in (
        ("requests_per_second", "requests/s", 2),
        ("input_tokens_per_second", "input tokens/s", 0),
        ("output_tokens_per_second", "output tokens/s", 0),
        ("total_tokens_per_second", "total tokens/s", 0),
    ):
        if result[key]:
            table.add_row(what, f"{result[key]:,.{digits}f}")
    table.add_row("input / output tokens", f"{result['input_tokens']:,} / {result['output_tokens']:,}")
    table.add_row("peak concurrency", f"{result['peak_concurrency']}")
    if (goodput := result.get("goodput")) is not None:
        asked = ", ".join(
            f"{name} ≤ {goodput[f'{name}_ms']:g} ms"
            for name in ("ttft", "tpot", "e2e")
            if goodput[f"{name}_ms"] is not None
        )
        table.add_row(
            f"goodput, requests/s ({asked})", f"{goodput['requests_per_second'] or 0:,.2f} ({goodput['met']} met)"
        )
    console.print(table)
    for failure, count in result["failures"].items():
        console.print(f"[red]failed {count} ×[/red] {unmarked(failure)}", soft_wrap=True)


def _cpu(result: Mapping[str, Any], console: Console) -> None:
    table = Table("role", title="CPU seconds by role (user and system, all threads)", title_justify="left")
    for heading in ("processes", "CPU s", "share", "CPU s / 1,000 output tokens"):
        table.add_column(heading, justify="right")
    rows = result["cpu_by_role"]
    total_s = sum(row["cpu_s"] for row in rows.values())
    per_thousand = 0.0
    for role, row in rows.items():
        each = row.get("cpu_s_per_1000_tokens", 0.0)
        per_thousand += each
        share = f"{row['cpu_s'] / total_s:.0%}" if total_s else "0%"
        table.add_row(role, f"{row['processes']:.0f}", f"{row['cpu_s']:,.2f}", share, f"{each:,.3f}")
    if rows:
        table.add_row(
            "all",
            f"{sum(row['processes'] for row in rows.values()):.0f}",
            f"{total_s:,.2f}",
            "100%",
            f"{per_thousand:,.3f}",
        )
    console.print(table)
