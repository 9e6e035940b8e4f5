"""Tables of figures: whatever the terminal's width, every number is there whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from afore.tools.bench.figures_report import put, table

COLUMNS = ("way", "min", "p50", "rounds", "p99", "p99.9", "max", "round trip p50", "CPU s/M", "× best peer")
ROWS = [(name, *(f"{number}1,234.5" for number in range(len(COLUMNS) - 1))) for name in ("shm spin-then-fd", "tcp")]


def printed(width: int) -> list[str]:
    console = Console(record=True, width=width, highlight=False, file=io.StringIO())
    made = table("latency", *COLUMNS)
    for row in ROWS:
        made.add_row(*row)
        made.add_section()
    put(made, console)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_number_is_cut(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cell in (*COLUMNS, *(cell for row in ROWS for cell in row)):
        assert cell in text
    assert text.count("shm spin-then-fd") == text.count("way") == sum("latency" in line for line in lines)


def test_what_fits_is_one_table() -> None:
    assert sum("latency" in line for line in printed(200)) == 1
    assert sum("latency" in line for line in printed(80)) > 1
