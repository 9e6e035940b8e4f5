"""The tables of a comparison, and what is inside the timed span on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from afore.tools.bench.ab import FORMULAS
from afore.tools.bench.machine import describe_machine, report_console

BUSY: Final = 1.5
"""Load average over cores above which other work must have run beside the comparison: alone, both sides keep it at about 1."""
ACCOUNTING: Final = (
    "Timed on both sides: from handing over all prompts, as token ids, to the last token; prefill is included, tokenisation and"
    " HTTP are not. AFORE also turns tokens into text and streams each of them to the client's process, which shares the"
    " cores; transformers returns token ids.",
    "Same stop rule: the model's end token (unless --ignore-eos) or the same most tokens. transformers' batch keeps its rows until"
    " the last has ended; only real tokens count.",
    "transformers decodes one batch padded on the left, with attention mask: padding changes the order of its float sums, so a near"
    " tie between two tokens may fall otherwise than at batch 1.",
)


def show(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints a result."""
    console = console or report_console()
    if result["interrupted"]:
        asked = result["options"]["rounds"]
        console.print(f"[red]interrupted after {result['rounds']} of {asked} rounds[/red]")
    _calibration(result, console)
    names = list(result["contestants"])
    rounds = Table("round", title=f"tokens/s, {result['requests']} requests, interleaved", title_justify="left")
    for name in names:
        rounds.add_column(name, justify="right")
    for number in range(result["rounds"]):
        rounds.add_row(str(number + 1), *(f"{result['contestants'][name]['rounds'][number]:,.0f}" for name in names))
    rounds.add_row(
        "median", *(f"[bold]{result['contestants'][name]['tokens_per_second']:,.0f}[/bold]" for name in names)
    )
    console.print(rounds)
    _ratios(result, console)
    for name, roles in result["cpu_by_role"].items():
        tokens = result["contestants"][name]["tokens"] * result["rounds"]
        parts = ", ".join(f"{role} {row['cpu_s'] / tokens * 1000:.2f}" for role, row in roles.items())
        console.print(f"{name}: CPU s / 1,000 tokens by role: {parts}", soft_wrap=True)
    for name, formula in FORMULAS.items():
        console.print(f"[bold]{name}[/bold]: {formula}", style="dim", soft_wrap=True)
    for line in ACCOUNTING:
        console.print(line, style="dim", soft_wrap=True)
    console.print(f"CPU used by the sides whose turn it was not, in the worst run: {result['idle_cpu_s']:.2f} s")
    cores, load = result["machine"]["usable_cores"], result["load_average_after"]
    if load > BUSY * cores:
        console.print(
            f"[yellow]the machine was shared: load average {load} on {cores} cores; look at the spread of the ratios, and at"
            " CPU s / 1,000 tokens, which other work moves less[/yellow]",
            soft_wrap=True,
        )
    console.print(
        describe_machine(result["machine"]) + f"; load average afterwards {result['load_average_after']}",
        soft_wrap=True,
    )


def _calibration(result: Mapping[str, Any], console: Console) -> None:
    table = Table(
        "transformers",
        "threads",
        title="calibration: 32 tokens an answer, median",
        title_justify="left",
    )
    table.add_column("runs", justify="right")
    table.add_column("tokens/s", justify="right")
    for row in result["calibration"]:
        chosen = row == result["best"]
        table.add_row(
            row["implementation"],
            str(row["threads"]),
            str(row["runs"]),
            f"{row['tokens_per_second']:,.0f}" + (" (chosen)" if chosen else ""),
        )
    console.print(table)


def _ratios(result: Mapping[str, Any], console: Console) -> None:
    table = Table("", title=f"against {result['baseline']}", title_justify="left")
    for heading in (
        "tokens/s",
        "decode tokens/s",
        "ratio",
        "min … max",
        "decode ratio",
        "CPU s / 1,000 tokens",
        "equal tokens",
    ):
        table.add_column(heading, justify="right")
    for name, row in result["contestants"].items():
        ratio, decode = row.get("ratio"), row.get("decode_tokens_per_second")
        table.add_row(
            name,
            f"{row['tokens_per_second']:,.0f}",
            f"{decode:,.0f}" if decode is not None else "none",
            f"[bold]{ratio['median']:.2f}[/bold]" if ratio else "1",
            f"{ratio['min']:.2f} … {ratio['max']:.2f}" if ratio else "",
            f"{row['decode_ratio']:.2f}" if "decode_ratio" in row else "",
            f"{row['cpu_s_per_1000_tokens']:.2f}",
            f"{row['equal_requests']} of {result['requests']}" if "equal_requests" in row else "",
        )
    console.print(table)
