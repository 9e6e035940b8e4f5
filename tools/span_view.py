"""The span table on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from afore.tools.printable import unmarked
from afore.tools.span_table import DEFINITIONS, SpanTable


def show_target(table: SpanTable, console: Console) -> None:
    """Where the time of a target goes; nothing where no target is whole."""
    if not table.targets or table.wall_p50_us is None or table.wall_p99_us is None or table.waiting_share is None:
        return
    console.print(
        f"where the time of a target goes: {table.targets:,} targets, wall p50 {table.wall_p50_us:,.0f} µs,"
        f" p99 {table.wall_p99_us:,.0f} µs; {table.waiting_share:.0%} of it is waiting",
        soft_wrap=True,
    )
    grid = Table(
        "part of a target",
        "kind",
    )
    for heading in ("targets", "p50 µs", "p99 µs", "share of wall"):
        grid.add_column(heading, justify="right")
    for row in table.parts:
        grid.add_row(
            row.part, row.kind, f"{row.targets:,}", f"{row.p50_us:,.1f}", f"{row.p99_us:,.1f}", f"{row.share:.1%}"
        )
    console.print(grid)
    for name, gap in table.gaps.items():
        console.print(
            f"{name}: {gap['count']:,.0f} times, p50 {gap['p50_us']:,.0f} µs,"
            f" in all {gap['of_targets_wall']:.0%} of the targets' wall time"
        )
    for line in DEFINITIONS:
        console.print(line, style="dim")


def show_roles(table: SpanTable, console: Console, *, title: str, cpu_s: Mapping[str, float] | None = None) -> None:
    """What each role's spans took; ``cpu_s`` adds how a span's total compares with the CPU its role used."""
    grid = Table("role", "span", "kind", title=title, title_justify="left")
    for heading in ("count", "p50 µs", "p99 µs", "total ms"):
        grid.add_column(heading, justify="right")
    if cpu_s is not None:
        grid.add_column("of role's CPU", justify="right")
    for row in table.roles:
        cells = [unmarked(row.role), unmarked(row.span), row.kind, f"{row.count:,}"]
        cells += [f"{row.p50_us:,.1f}", f"{row.p99_us:,.1f}", f"{row.total_ms:,.2f}"]
        if cpu_s is not None:
            used = cpu_s.get(row.role, 0.0)
            cells.append(f"{row.total_ms / 1e3 / used:.0%}" if used else "no CPU seen")
        grid.add_row(*cells)
    console.print(grid)
    if cpu_s is not None:
        console.print(
            "of role's CPU: total of the span / CPU seconds of the role; spans that wait use none", style="dim"
        )
