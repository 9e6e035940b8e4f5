"""What the planner's bench prints."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from rich.table import Table

from afore.tools.bench.machine import describe_machine, report_console

PAPER_US: Final[Mapping[int, float]] = MappingProxyType(
    {2: 8.23, 4: 11.08, 8: 14.63, 16: 25.46, 32: 51.17, 64: 106.8, 128: 245.8}
)
"""The paper's planning time by EP."""

FORMULAS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "median": "µs of one core call with carried state: median of each round's targets, then over rounds",
        "p99": "µs, over all targets of all rounds",
        "/ C++": "a round's median over the C++ build's of the same round: median (smallest–largest over rounds)",
        "tiles": "tiles of the most loaded worker over Σ_e ⌈demand_e/M_tile⌉ / N, mean over targets; in brackets: on primaries",
        "at bound": "targets whose most loaded worker has ⌈tiles/N⌉ tiles; gap: mean excess over it",
    }
)


def print_report(report: Mapping[str, Any]) -> None:
    """The table, what its columns mean, and what was left out."""
    console = report_console()
    table = Table(title=f"µs per plan: E = {report['experts']}, M_tile = {report['tile_tokens']}", title_justify="left")
    for name in ("EP", "R", "tokens", "core", "median", "p99", "/ C++", "paper", "tiles", "at bound", "gap"):
        table.add_column(name, justify="left" if name == "core" else "right")
    for row in report["rows"]:
        first = True
        for name, one in (*row["cores"].items(), *row["public"].items()):
            ratio = one.get("ratio")
            table.add_row(
                *(str(row[key]) if first else "" for key in ("ep", "slots", "tokens")),
                name,
                f"{one['median_us']:.2f}",
                f"{one['p99_us']:.2f}",
                f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})" if ratio else "",
                f"{row['paper_us']}" if first and row["paper_us"] else "",
                f"{one['tile_imbalance']:.3f}" + (f" ({row['static']['tile_imbalance']:.2f})" if first else ""),
                f"{one['at_bound']:.0%}",
                f"{one['gap_to_bound']:.2%}",
            )
            first = False
        table.add_section()
    console.print(table)
    for name, meaning in FORMULAS.items():
        console.print(f"{name}: {meaning}")
    checked = [row["identical"] for row in report["rows"] if "identical" in row]
    if checked:
        console.print(
            "afore and the C++ build left bit-identical state in "
            + ("every row" if all(checked) else f"{sum(checked)} of {len(checked)} rows: one of them is wrong")
        )
    for name in dict.fromkeys(name for row in report["rows"] for name in row["cores"]):
        met = [row["cores"][name]["median_us"] < row["paper_us"] for row in report["rows"] if row["paper_us"]]
        if met:
            console.print(f"{name}: median below the paper's in {sum(met)} of {len(met)} rows")
    console.print(
        f"demand: {report['demand']}; {report['rounds']} interleaved rounds of {report['targets_per_round']} targets, "
        f"slots of {report['in_flight']} in flight guarded"
    )
    for note in report["notes"]:
        console.print(f"note: {note}")
    console.print(describe_machine(report["machine"]))
