"""The tables and the picture of ``bench transport``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console

from afore.tools.bench.figures_report import TAIL_COLUMNS, between_rounds, closing, opening, put, short, table, tail, us
from afore.tools.bench.files import write_whole
from afore.tools.bench.machine import report_console
from afore.tools.bench.plot import check_plot, plot_library
from afore.tools.bench.transport_figures import FORMULAS
from afore.tools.bench.transport_options import size_text
from afore.tools.printable import unmarked

DIRECTIONS: Final = (("one_way", "one-way"), ("round_trip", "round trip"))
GOAL: Final = 1.5
"""Times the best peer's p50 that ``shm`` may take."""


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints a result."""
    console = console or report_console()
    opening(report, console)
    fabrics = {name: way for name, way in report["ways"].items() if not way["peer"]}
    for name, way in fabrics.items():
        _latencies(name, way, report["rounds"], console)
    if fabrics:
        _streams(fabrics, console)
    if report["ways"]:
        _beside(report, console)
    if "oversubscribed" in report:
        _crowd(report["oversubscribed"], console)
    closing(report, FORMULAS.items(), console)


def _cells(figure: Mapping[str, Any]) -> list[str]:
    return [us(figure["min_us"]), us(figure["p50_us"]), between_rounds(figure), *tail(figure)]


def _latencies(name: str, way: Mapping[str, Any], rounds: int, console: Console) -> None:
    title = f"{name} ({way['arrives']}): latency in µs, {rounds} rounds"
    rows = table(title, "bytes", "", "iterations", "min", "p50", "rounds", *TAIL_COLUMNS, "CPU s/M", left=2)
    for nbytes, found in way["sizes"].items():
        for key, shown in DIRECTIONS:
            first = key == "one_way"
            rows.add_row(
                size_text(int(nbytes)) if first else "",
                shown,
                f"{found[key]['n']:,}" if first else "",
                *_cells(found[key]),
                short(found["cpu_s_per_million"]) if first else "",
            )
    put(rows, console)


def _streams(fabrics: Mapping[str, Any], console: Console) -> None:
    rows = table("messages that wait for no answer", "fabric", "bytes", "iterations", "messages/s", "GB/s", "CPU s/M")
    for name, way in fabrics.items():
        for number, (nbytes, found) in enumerate(way["sizes"].items()):
            stream = found["stream"]
            rows.add_row(
                "" if number else name,
                size_text(int(nbytes)),
                f"{stream['n']:,}",
                f"{stream['messages_per_second']:,.0f}",
                f"{stream['gb_per_second']:,.3f}",
                short(stream["cpu_s_per_million"]),
            )
        rows.add_section()
    put(rows, console)


def _beside(report: Mapping[str, Any], console: Console) -> None:
    nbytes, against = str(report["peer_bytes"]), report["against_peers"]
    rows = table(
        f"{nbytes} bytes with notification to another process: one-way, µs",
        "way", "min", "p50", "rounds", *TAIL_COLUMNS, "round trip p50", "CPU s/M", "× best peer",
    )  # fmt: skip
    for name, way in report["ways"].items():
        found = way["sizes"][nbytes]
        ratio = against.get(name)
        rows.add_row(
            name,
            *_cells(found["one_way"]),
            us(found["round_trip"]["p50_us"]),
            short(found["cpu_s_per_million"]),
            f"{ratio['median']:.2f}" if ratio else "",
        )
    put(rows, console)
    for name, way in report["ways"].items():
        if way["peer"]:
            console.print(f"{name}: {unmarked(way['arrives'])}", style="dim", soft_wrap=True)
    for name, ratio in against.items():
        if name.split()[0] == "shm":
            kept = "kept" if ratio["median"] <= GOAL else "not kept"
            console.print(
                f"{name} takes {ratio['median']:.2f} ({ratio['min']:.2f} … {ratio['max']:.2f}) times the best peer of each"
                f" round ({ratio['best']} over all); the aim is at most {GOAL}: {kept}",
                soft_wrap=True,
            )
    if not against:
        console.print("no public peer was measured, so nothing is compared")


def _crowd(crowd: Mapping[str, Any], console: Console) -> None:
    who = f"{crowd['processes']} processes on {crowd['cores']} cores"
    title = f"{who}, {crowd['nbytes']} bytes: one-way, µs, {crowd['rounds']} rounds"
    rows = table(
        title, "way", "min", "p50", *TAIL_COLUMNS, "round trip p50", "CPU s/M", "best p99.9 in", "least CPU in"
    )  # fmt: skip
    for name, found in crowd["ways"].items():
        rows.add_row(
            name,
            us(found["one_way"]["min_us"]),
            us(found["one_way"]["p50_us"]),
            *tail(found["one_way"]),
            us(found["round_trip"]["p50_us"]),
            short(found["cpu_s_per_million"]),
            f"{found['best_tail_rounds']}",
            f"{found['least_cpu_rounds']}",
        )
    put(rows, console)


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
            rates = {nbytes: found["stream"]["gb_per_second"] for nbytes, found in sizes.items() if nbytes}
            throughput.plot(list(rates), list(rates.values()), "o-", color=color, label=name, markersize=4)
    latency.set(xscale="log", yscale="log", xlabel="bytes (0 shown at 1)", ylabel="one-way, µs: p50, shaded to p99.9")
    throughput.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s, messages that wait for no answer")
    latency.legend(fontsize="x-small")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind)
    write_whole(path, picture.getvalue())
