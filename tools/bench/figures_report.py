"""What reports of latencies have in common: a table of spreads, the closing lines, and where a report goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from afore.tools.bench.files import write_whole
from afore.tools.bench.machine import describe_machine
from afore.tools.printable import unmarked

TAIL: Final = ("p99_us", "p99.9_us", "max_us")
TAIL_COLUMNS: Final = ("p99", "p99.9", "max")
ANY_WIDTH: Final = 10_000
"""Wider than any table."""


def conclude(
    report: Mapping[str, Any],
    *,
    show: Callable[[Mapping[str, Any]], None],
    draw: Callable[[Mapping[str, Any], str], None],
    json_path: str | None,
    plot_path: str | None,
) -> int:
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


def opening(report: Mapping[str, Any], console: Console) -> None:
    """Says so where the run was interrupted."""
    if report["interrupted"]:
        console.print("[red]interrupted: only rounds that were finished are shown[/red]")


def closing(report: Mapping[str, Any], formulas: Iterable[tuple[str, str]], console: Console) -> None:
    """Formulas, notes, the machine."""
    for name, formula in formulas:
        console.print(f"[bold]{escape(name)}[/bold]: {escape(formula)}", style="dim", soft_wrap=True)
    for note in report["notes"]:
        console.print(f"note: {unmarked(note)}", soft_wrap=True)
    console.print(
        escape(describe_machine(report["machine"])) + f"; load average afterwards {report['load_average_after']}",
        soft_wrap=True,
    )


def table(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table; all but the first ``left`` columns hold numbers."""
    made = Table(title=unmarked(title), title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right")
    return made


def put(made: Table, console: Console) -> None:
    """Prints a table; one that is wider than the console in parts, each with the first columns again: no number is cut."""
    left = next((at for at, column in enumerate(made.columns) if column.justify != "left"), len(made.columns))
    begin, end = left, len(made.columns)
    while True:
        part = _part(made, [*range(left), *range(begin, end)], continued=begin > left)
        if end > begin + 1 and _width(part, console) > console.width:
            end -= 1
            continue
        console.print(part)
        if end == len(made.columns):
            return
        begin, end = end, len(made.columns)


def _part(made: Table, places: Sequence[int], *, continued: bool) -> Table:
    columns = [made.columns[place] for place in places]
    part = Table(title=f"{made.title}, continued" if continued else made.title, title_justify="left")
    for column in columns:
        part.add_column(column.header, justify=column.justify)
    for row, cells in zip(made.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
        part.add_row(*cells, end_section=row.end_section)
    return part


def _width(made: Table, console: Console) -> int:
    """Columns of a terminal that it takes where nothing is cut."""
    return Measurement.get(console, console.options.update(max_width=ANY_WIDTH), made).maximum


def between_rounds(figure: Mapping[str, Any]) -> str:
    """The smallest and the largest p50 of a round, µs."""
    rounds = figure["rounds_p50_us"]
    return f"{us(min(rounds))} … {us(max(rounds))}" if rounds else ""


def tail(figure: Mapping[str, Any]) -> list[str]:
    """The cells of ``TAIL_COLUMNS``."""
    return [us(figure[key]) for key in TAIL]


def us(value: float) -> str:
    """Microseconds as a cell; long times in ms."""
    return short(value) if value < 100_000 else f"{value / 1e3:,.0f} ms"


def short(value: float) -> str:
    """A number as a cell."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
