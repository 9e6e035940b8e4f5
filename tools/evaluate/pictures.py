"""Figures as pictures: bars of ours with the paper's value marked on them, one panel for each column."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afore.tools.bench.files import write_whole
from afore.tools.bench.plot import named_ids, plot_library
from afore.tools.evaluate.figure import Figure, Row

OURS, FAINT, PAPER, INK, MUTED = "#2a7f9e", "#a9cfdc", "#d1495b", "#22313a", "#7b8a92"
MOST_PANELS = 4
_OWN = ("afore", "AFORE", "Approach 3")


def draw(figure: Figure, rows: Sequence[Row], directory: Path, kinds: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Writes ``<name>.svg`` and ``<name>.png``; none for a figure without values.

    Raises ``HostError`` without matplotlib, or for a disk that is full.
    """
    columns = [name for name in figure.unit if any(name in row.ours for row in rows)][:MOST_PANELS]
    if not columns:
        return []
    height = 1.1 + 0.27 * len(rows)
    canvas = plot_library()(figsize=(2.4 + 2.9 * len(columns), height), layout="constrained")
    canvas.suptitle(figure.title, fontsize=12, fontweight="bold", color=INK, x=0.01, ha="left")
    panels = canvas.subplots(1, len(columns), squeeze=False)[0]
    for index, (axes, name) in enumerate(zip(panels, columns, strict=True)):
        _panel(axes, figure, rows, name, labelled=index == 0)
    if any(row.paper.get(name) is not None for row in rows for name in columns):
        axes = panels[-1]
        axes.plot([], [], color=PAPER, marker="D", markersize=5, linestyle="none", label="the paper")
        axes.legend(fontsize="x-small", frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    written = []
    for kind in kinds:
        picture = io.BytesIO()
        # Without a date, and with ids that are no random ones, two runs draw the same bytes.
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        with named_ids(figure.name):
            canvas.savefig(picture, format=kind, metadata=metadata, dpi=140)
        written.append(directory / f"{figure.name}.{kind}")
        write_whole(str(written[-1]), picture.getvalue())
    return written


def _panel(axes: Any, figure: Figure, rows: Sequence[Row], name: str, *, labelled: bool) -> None:
    unit = "%" if figure.unit[name] == "share" else figure.unit[name]
    times = 100.0 if unit == "%" else 1.0
    places = list(range(len(rows)))
    values = [row.ours.get(name, 0.0) * times for row in rows]
    own = [any(row.label.endswith(mark) for mark in _OWN) for row in rows]
    several = any(own) and not all(own)
    colors = [OURS if mine or not several else FAINT for mine in own]
    axes.barh(places, values, 0.66, color=colors, zorder=2)
    paper = [(place, row.paper[name] * times) for place, row in zip(places, rows, strict=True) if name in row.paper]
    if paper:
        axes.plot(
            [v for _, v in paper],
            [p for p, _ in paper],
            color=PAPER,
            marker="D",
            markersize=5,
            linestyle="none",
            zorder=3,
        )
    for place, value, row in zip(places, values, rows, strict=True):
        if name in row.ours:
            text = f" {value:,.0f}" if abs(value) >= 100 else f" {value:.3g}"
            axes.text(max(value, 0.0), place, text, va="center", fontsize=6.5, color=MUTED, zorder=4)
    axes.set_yticks(places, [row.label for row in rows] if labelled else [""] * len(rows), fontsize=7.5, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7, colors=MUTED)
    axes.invert_yaxis()
    axes.margins(x=0.16, y=0.6 / max(1, len(rows)))
    axes.set_title(
        f"{name} ({unit})" if unit not in ("", "tokens/s", "yes") else name, fontsize=8.5, color=INK, loc="left"
    )
    axes.grid(axis="x", color="#e4e9ec", linewidth=0.8, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9d2d7")
