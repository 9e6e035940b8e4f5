"""What ``evaluate reality`` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 110


def show(report: dict[str, Any]) -> None:
    """Kernels' lines of the first shape, then a table of all shapes, then a line for each comparison of plans."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_kernels(report["shapes"][0]["spans"]))
    console.print(_times(report["shapes"]))
    for line in _lines(report):
        console.print(line, markup=False, highlight=False)


def _kernels(spans: dict[str, Any]) -> Table:
    table = Table("work", "fixed µs", "each µs", "spans fitted", "tested", "error")
    for name, one in spans.items():
        numbers = (f"{one['fixed_us']:.1f}", f"{one['each_us']:.2f}", str(one["fitted"]), str(one["tested"]))
        table.add_row(name, *numbers, f"{one['error']:.1%}")
    return table


def _times(shapes: list[dict[str, Any]]) -> Table:
    table = Table("A + N", "what", "targets", "mean µs", "median µs", "P10-P90", "mean", "median")
    for shape in shapes:
        measured = shape["measured"]
        table.add_row(shape["name"], "measured, odd steps", *_row(measured["odd"]), "", "")
        noise = [f"{measured['even'][what] / measured['odd'][what] - 1:+.1%}" for what in ("mean_us", "median_us")]
        table.add_row("", "measured, even steps", *_row(measured["even"]), *noise)
        for name, one in shape["predicted"].items():
            errors = [f"{one[f'odd_{what}_error']:+.1%}" for what in ("mean", "median")]
            table.add_row("", _PREDICTIONS[name], *_row(one), *errors)
        table.add_section()
    return table


_PREDICTIONS = {"fitted": "predicted from even steps", "shared": "from the first shape, cores shared"}


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{one['mean_us']:.0f}", f"{one['median_us']:.0f}", f"{one['p10_us']:.0f}-{one['p90_us']:.0f}")
    return (str(one["targets"]), *times)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    before, after = report["load"]
    yield f"{report['cores']} cores; load of the machine {before:.1f} before, {after:.1f} after"
    for shape in report["shapes"]:
        yield f"{shape['name']}: {shape['core_share']:.0%} of the cores' time was left by other work"
        for name in ("host_us", "alone_us", "beside_us"):
            what = {"host_us": "host, µs (means)", "alone_us": "without waiting", "beside_us": "CPU beside the way"}[
                name
            ]
            yield f"{shape['name']} {what}: " + ", ".join(f"{part} {us:.0f}" for part, us in shape[name].items())
        for world, one in shape["plans"].items():
            same = f"{one['identical']} of {one['plans']} bit-equal"
            yield f"{shape['name']} plans, {world}: {same}" + ("" if one["same"] else f": {one['first']}")
