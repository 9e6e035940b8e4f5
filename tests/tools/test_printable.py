"""Foreign text on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from afore.tools.printable import printable, unmarked


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain µ", "plain µ"), ("a\nb\x1b[2Jc", "a b [2Jc"), ("\ud800x", " x"), ("y" * 400, "y" * 300)],
)
def test_what_is_not_printable_is_a_space(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("text", ["/m[/x]", "[red]m", "[link=a]m", "[/]", "m[bold]"])
def test_markup_is_shown_as_it_is(text: str) -> None:
    out = io.StringIO()
    table = Table("head", title=f"{unmarked(text)} title")
    table.add_row(unmarked(text))
    Console(file=out, width=80).print(table)
    assert out.getvalue().count(text) == 2
