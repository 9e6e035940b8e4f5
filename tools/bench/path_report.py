"""The tables and the picture of ``bench path``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from afore.tools.bench import figures_report
from afore.tools.bench.figures_report import TAIL_COLUMNS, between_rounds, closing, opening, tail, us
from afore.tools.bench.files import write_whole
from afore.tools.bench.machine import report_console
from afore.tools.bench.path_parts import PARTS, TOTALS
from afore.tools.bench.plot import check_plot, plot_library
from afore.tools.printable import unmarked


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints a result."""
    console = console or report_console()
    opening(report, console)
    for found in report["topologies"]:
        _topology(found, report, console)
    console.print(
        "p50, p99, p99.9, max: µs over all targets of all rounds; rounds: the smallest and the largest p50 of a round",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    closing(report, (*PARTS, *TOTALS), console)


def _topology(found: Mapping[str, Any], report: Mapping[str, Any], console: Console) -> None:
    shape = found["topology"]
    recorded = {name: side for name, side in found["sides"].items() if "figures" in side}
    counts = ", ".join(f"{name} {side['targets']:,}" for name, side in recorded.items())
    title = f"topology {shape}, {found['rounds']} rounds of {report['requests']} requests; targets: {counts}"
    for heading, rows in (("part (they add up)", PARTS), ("in all", TOTALS)):
        table = figures_report.table(title, heading, "policy", "p50", "rounds", *TAIL_COLUMNS, "n", left=2)
        for name, _ in rows:
            for number, (policy, side) in enumerate(recorded.items()):
                table.add_row(name if number == 0 else "", unmarked(policy), *_cells(side["figures"][name]))
            table.add_section()
        console.print(table)
        title = f"topology {shape}"
    rates = ", ".join(
        f"{name} {side['tokens_per_second']:,.0f} ({side['scheduler_cpu_s_per_1000_tokens']:.2f})"
        for name, side in found["sides"].items()
    )
    console.print(f"tokens/s, median of rounds (scheduler's CPU s / 1,000 tokens): {unmarked(rates)}", soft_wrap=True)
    if (cost := found.get("observation")) is not None:
        speed, cpu = cost["tokens_per_second"], cost["cpu"]
        console.print(
            f"recording costs ({unmarked(cost['policy'])}, with spans / without, round by round): tokens/s × {speed['median']:.2f}"
            f" ({speed['min']:.2f} … {speed['max']:.2f}), CPU / token × {cpu['median']:.2f} ({cpu['min']:.2f} … {cpu['max']:.2f})",
            soft_wrap=True,
        )


def _cells(figure: Mapping[str, Any]) -> list[str]:
    if not figure["n"]:
        return ["", "", "", "", "", "0"]
    return [us(figure["p50_us"]), between_rounds(figure), *tail(figure), f"{figure['n']:,}"]


def draw(report: Mapping[str, Any], path: str) -> None:
    """Bars of the parts' medians, end to end, one for each policy; beside them p50 and p99 of the totals.

    Raises ``ConfigError`` for an unknown format, ``HostError`` without matplotlib or for a full disk.
    """
    kind = check_plot(path)
    shapes = report["topologies"]
    figure = plot_library()(figsize=(12, 1.6 + 2.6 * max(1, len(shapes))), layout="constrained")
    grid = figure.subplots(max(1, len(shapes)), 2, squeeze=False)
    for (bars, totals), found in zip(grid, shapes, strict=False):
        recorded = {name: side["figures"] for name, side in found["sides"].items() if side.get("targets")}
        names = list(recorded)
        left = [0.0] * len(names)
        for part, _ in PARTS:
            widths = [recorded[name][part]["p50_us"] for name in names]
            bars.barh(names, widths, left=left, label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        bars.set(xlabel="µs, medians of the parts end to end", title=f"topology {found['topology']}")
        bars.invert_yaxis()
        for number, name in enumerate(names):
            places = [row + 0.25 * (number - (len(names) - 1) / 2) for row in range(len(TOTALS))]
            p50, p99 = ([recorded[name][total][key] for total, _ in TOTALS] for key in ("p50_us", "p99_us"))
            totals.hlines(places, p50, p99, color=f"C{number}")
            totals.plot(p50, places, "o", color=f"C{number}", label=name, markersize=4)
            totals.plot(p99, places, "|", color=f"C{number}")
        totals.set_yticks(range(len(TOTALS)), [total for total, _ in TOTALS], fontsize="small")
        totals.set(xscale="log", xlabel="µs: p50 (dot) to p99 (bar)")
        totals.invert_yaxis()
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize="x-small")
    grid[0][1].legend(fontsize="x-small", loc="best")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind)
    write_whole(path, picture.getvalue())
