"""Figures as pictures: bars of ours beside the paper's."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from afore.tools.bench.files import write_whole
from afore.tools.bench.plot import plot_library
from afore.tools.evaluate.figures import Figure, Row


def draw(figure: Figure, rows: Sequence[Row], directory: Path, kinds: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Writes ``<name>.svg`` and ``<name>.png``. Raises ``HostError`` without matplotlib, or for a disk that is full."""
    columns = [name for name in figure.unit if any(name in row.ours for row in rows)]
    canvas = plot_library()(figsize=(2.0 + 3.4 * len(columns), 1.2 + 0.3 * len(rows)), layout="constrained")
    canvas.suptitle(figure.title, fontsize="medium")
    places = list(range(len(rows)))
    for index, (axes, name) in enumerate(zip(canvas.subplots(1, len(columns), squeeze=False)[0], columns, strict=True)):
        times = 100.0 if figure.unit[name] == "%" else 1.0
        axes.barh(
            [p - 0.2 for p in places], [row.ours.get(name, 0.0) * times for row in rows], 0.38, label="ours", color="C0"
        )
        if any(name in row.paper for row in rows):
            paper = [row.paper.get(name, 0.0) * times for row in rows]
            axes.barh([p + 0.2 for p in places], paper, 0.38, label="paper", color="0.7")
            axes.legend(fontsize="x-small")
        axes.set_yticks(places, [row.label for row in rows] if index == 0 else [""] * len(rows), fontsize="small")
        axes.invert_yaxis()
        axes.set_xlabel(f"{name} ({figure.unit[name]})" if figure.unit[name] not in ("", "tokens/s") else name)
    written = []
    for kind in kinds:
        picture = io.BytesIO()
        # Without a date and with named ids two runs draw the same bytes.
        canvas.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
        written.append(directory / f"{figure.name}.{kind}")
        write_whole(str(written[-1]), picture.getvalue())
    return written
