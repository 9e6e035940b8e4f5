"""A picture of a run: how many requests had their first token, and how many gaps were over, by when."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afore.core.errors import ConfigError, HostError
from afore.tools.bench.files import write_whole
from afore.tools.bench.latency import Record

FORMATS = ("png", "svg", "pdf")


def plot_library() -> Any:
    """matplotlib's object interface, which keeps no state of its own. Raises ``HostError`` where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HostError(
            "matplotlib", "it is not installed", "pip install 'afore[bench]', or leave out --plot"
        ) from error
    return Figure


@contextmanager
def named_ids(name: str) -> Iterator[None]:
    """Within, an SVG's ids follow from a name and from what is drawn: by themselves they are random."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": name}):
        yield


def check_plot(path: str) -> str:
    """The format of a picture to be. Raises ``ConfigError`` for an unknown one, ``HostError`` without matplotlib."""
    kind = Path(path).suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError("plot", f"{path} is none of {', '.join(FORMATS)}", "give FILE.svg or FILE.png")
    plot_library()
    return kind


def cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """(sorted values, share of values that are at most that)."""
    ordered = sorted(values)
    return ordered, [(index + 1) / len(ordered) for index in range(len(ordered))]


def draw_latencies(records: Sequence[Record], path: str) -> None:
    """Writes cumulative distributions of TTFT and ITL. Raises what ``check_plot`` raises, and ``HostError`` for a full disk."""
    kind = check_plot(path)
    figure = plot_library()(figsize=(9, 3.6), layout="constrained")
    done = [record for record in records if record.completed]
    panels = {
        "time to first token (ms)": [value for record in done if (value := record.ttft_ms) is not None],
        "inter-token latency (ms)": [value for record in done for value in record.itls_ms],
    }
    for axes, (title, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        if values:
            axes.step(*cumulative(values), where="post")
            for percent in (50, 99):
                axes.axhline(percent / 100, color="0.8", linewidth=0.8, zorder=0)
        axes.set(xlabel=title, ylabel="share at most this", ylim=(0, 1.02), xlim=(0, None))
        axes.set_title(f"{len(values):,} values", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind)
    write_whole(path, picture.getvalue())
