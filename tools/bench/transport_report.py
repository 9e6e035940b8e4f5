"""The tables and the picture of ``bench transport``."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from afore.tools.bench.files import write_whole
from afore.tools.bench.machine import describe_machine, report_console
from afore.tools.bench.plot import check_plot, plot_library
from afore.tools.bench.transport_figures import FORMULAS
from afore.tools.bench.transport_options import size_text
from afore.tools.printable import unmarked

DIRECTIONS: Final = (("one_way", "one-way"), ("round_trip", "round trip"))
LATENCY: Final = ("min_us", "p50_us", "p99_us", "p99.9_us", "max_us")
GOAL: Final = 1.5
"""Times the best peer's p50 that ``shm`` may take."""


def conclude(report: Mapping[str, Any], *, json_path: str | None, plot_path: str | None) -> int:
    """Prints, writes the files; returns the exit status. Raises ``HostError`` for a file that cannot be written."""
    text = json.dumps(report) + "\n"
    if json_path == "-":
        print(text, end="")
    else:
        show(report)
        if json_path is not None:
            write_whole(json_path, text.encode())
    if plot_path is not None:
        draw(report, plot_path)
    return 0


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints a result."""
    console = console or report_console()
    if report["interrupted"]:
        console.print("[red]interrupted: only rounds that were finished are shown[/red]")
    fabrics = {name: way for name, way in report["ways"].items() if not way["peer"]}
    for name, way in fabrics.items():
        _latencies(name, way, report["rounds"], console)
    if fabrics:
        _streams(fabrics, console)
    if report["ways"]:
        _beside(report, console)
    if "oversubscribed" in report:
        _crowd(report["oversubscribed"], console)
    waits = "; ".join(f"{name} by {text}" for name, text in report["idle"].items())
    console.print(f"idle strategies: {waits}. There is no other in this version.", soft_wrap=True)
    for name, formula in FORMULAS.items():
        console.print(f"[bold]{escape(name)}[/bold]: {escape(formula)}", style="dim", soft_wrap=True)
    for note in report["notes"]:
        console.print(f"note: {unmarked(note)}", soft_wrap=True)
    console.print(
        escape(describe_machine(report["machine"])) + f"; load average afterwards {report['load_average_after']}",
        soft_wrap=True,
    )


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=unmarked(title), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table


def _cells(figure: Mapping[str, Any]) -> list[str]:
    rounds = figure["rounds_p50_us"]
    return [
        *(_us(figure[key]) for key in LATENCY[:2]),
        f"{_us(min(rounds))} … {_us(max(rounds))}",
        *(_us(figure[key]) for key in LATENCY[2:]),
    ]


def _us(value: float) -> str:
    return _short(value) if value < 100_000 else f"{value / 1e3:,.0f} ms"


def _short(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _latencies(name: str, way: Mapping[str, Any], rounds: int, console: Console) -> None:
    title = f"{name} ({way['arrives']}): latency in µs, {rounds} rounds"
    table = _table(title, "bytes", "", "iterations", "min", "p50", "rounds", "p99", "p99.9", "max", "CPU s/M", left=2)
    for nbytes, found in way["sizes"].items():
        for key, shown in DIRECTIONS:
            first = key == "one_way"
            table.add_row(
                size_text(int(nbytes)) if first else "",
                shown,
                f"{found[key]['n']:,}" if first else "",
                *_cells(found[key]),
                _short(found["cpu_s_per_million"]) if first else "",
            )
    console.print(table)


def _streams(fabrics: Mapping[str, Any], console: Console) -> None:
    table = _table("messages that wait for no answer", "fabric", "bytes", "iterations", "messages/s", "GB/s", "CPU s/M")
    for name, way in fabrics.items():
        for number, (nbytes, found) in enumerate(way["sizes"].items()):
            stream = found["stream"]
            table.add_row(
                "" if number else name,
                size_text(int(nbytes)),
                f"{stream['n']:,}",
                f"{stream['messages_per_second']:,.0f}",
                f"{stream['gb_per_second']:,.3f}",
                _short(stream["cpu_s_per_million"]),
            )
        table.add_section()
    console.print(table)


def _beside(report: Mapping[str, Any], console: Console) -> None:
    nbytes, against = str(report["peer_bytes"]), report["against_peers"]
    table = _table(
        f"{nbytes} bytes with notification to another process: one-way, µs",
        "way", "min", "p50", "rounds", "p99", "p99.9", "max", "round trip p50", "CPU s/M", "× best peer",
    )  # fmt: skip
    for name, way in report["ways"].items():
        found = way["sizes"][nbytes]
        ratio = against.get(name)
        table.add_row(
            name,
            *_cells(found["one_way"]),
            _us(found["round_trip"]["p50_us"]),
            _short(found["cpu_s_per_million"]),
            f"{ratio['median']:.2f}" if ratio else "",
        )
    console.print(table)
    for name, way in report["ways"].items():
        if way["peer"]:
            console.print(f"{name}: {unmarked(way['arrives'])}", style="dim", soft_wrap=True)
    if (shm := against.get("shm")) is not None:
        kept = "kept" if shm["median"] <= GOAL else "not kept"
        console.print(
            f"shm takes {shm['median']:.2f} ({shm['min']:.2f} … {shm['max']:.2f}) times the best peer of each round"
            f" ({shm['best']} over all); the aim is at most {GOAL}: {kept}",
            soft_wrap=True,
        )
    elif not against:
        console.print("no public peer was measured, so nothing is compared")


def _crowd(crowd: Mapping[str, Any], console: Console) -> None:
    who = f"{crowd['processes']} processes on {crowd['cores']} cores"
    title = f"{who}, {crowd['nbytes']} bytes: one-way, µs, {crowd['rounds']} rounds"
    table = _table(
        title, "way", "min", "p50", "p99", "p99.9", "max", "round trip p50", "CPU s/M", "best p99.9 in", "least CPU in"
    )  # fmt: skip
    for name, found in crowd["ways"].items():
        table.add_row(
            name,
            *(_us(found["one_way"][key]) for key in LATENCY),
            _us(found["round_trip"]["p50_us"]),
            _short(found["cpu_s_per_million"]),
            f"{found['best_tail_rounds']}",
            f"{found['least_cpu_rounds']}",
        )
    console.print(table)


def draw(report: Mapping[str, Any], path: str) -> None:
    """Latency over size (p50, and up to p99.9 as a band), and throughput over size, a line for each fabric.

    Raises ``ConfigError`` for an unknown format, ``HostError`` without matplotlib or for a full disk.
    """
    kind = check_plot(path)
    figure = plot_library()(figsize=(12, 4.2), layout="constrained")
    latency, throughput = figure.subplots(1, 2)
    for number, (name, way) in enumerate(report["ways"].items()):
        color = f"C{number}"
        sizes = {int(nbytes): found for nbytes, found in way["sizes"].items()}
        x = [max(1, nbytes) for nbytes in sizes]
        p50, tail = ([found["one_way"][key] for found in sizes.values()] for key in ("p50_us", "p99.9_us"))
        latency.plot(x, p50, "x" if way["peer"] else "o-", color=color, label=name, markersize=4)
        if not way["peer"]:
            latency.fill_between(x, p50, tail, color=color, alpha=0.12, linewidth=0)
            rates = [found["stream"]["gb_per_second"] for found in sizes.values()]
            throughput.plot(x, rates, "o-", color=color, label=name, markersize=4)
    latency.set(xscale="log", yscale="log", xlabel="bytes (0 shown at 1)", ylabel="one-way, µs: p50, shaded to p99.9")
    throughput.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s, messages that wait for no answer")
    latency.legend(fontsize="x-small")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind)
    write_whole(path, picture.getvalue())
