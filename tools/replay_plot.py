"""Pictures of a replay, after the paper's Figures 1, 2, 4 and 9 (SVG)."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afore.tools.bench.files import write_whole
from afore.tools.bench.plot import plot_library

Runs = Sequence[Mapping[str, Any]]
"""Of the report: ``ep``, ``slots`` and ``rows``."""
COUNTED = 8
"""EP of the pictures that show one, where it was replayed (the paper's)."""


def draw(runs: Runs, folder: Path, prefix: str) -> list[Path]:
    """Writes ``<prefix>-….svg``; returns the files. Raises ``HostError`` without matplotlib, or for a full disk."""
    figure_class = plot_library()
    shown = min(runs, key=lambda run: (abs(run["ep"] - COUNTED), -run["slots"]))
    pictures: dict[str, Callable[[Any], None]] = {
        "latency": lambda axes: _latency(axes, [run for run in runs if run["slots"] == shown["slots"]]),
        "imbalance": lambda axes: _imbalance(axes, shown),
        "workers": lambda axes: _workers(axes, shown),
        "layers": lambda axes: _layers(axes, shown),
    }
    written = []
    for name, fill in pictures.items():
        figure = figure_class(figsize=(7, 3.6), layout="constrained")
        fill(figure.subplots())
        picture = io.BytesIO()
        figure.savefig(picture, format="svg")
        path = folder / f"{prefix}-{name}.svg"
        write_whole(str(path), picture.getvalue())
        written.append(path)
    return written


def _latency(axes: Any, runs: Runs) -> None:
    policies = [row["policy"] for row in runs[0]["rows"]]
    for place, policy in enumerate(policies):
        values = [run["rows"][place]["plan_us"]["p50"] for run in runs]
        axes.plot([run["ep"] for run in runs], values, marker="o", markersize=3, label=policy)
    axes.set(xscale="log", yscale="log", xlabel="expert parallelism", ylabel="median planning latency (µs)")
    axes.set_xticks([run["ep"] for run in runs], [str(run["ep"]) for run in runs])
    axes.set_title(f"R = {runs[0]['slots']}", fontsize="small")
    axes.legend(fontsize="x-small", ncols=2)


def _imbalance(axes: Any, run: Mapping[str, Any]) -> None:
    rows = run["rows"]
    places = np.arange(len(rows))
    axes.bar(places, [row["token"]["after"] for row in rows], color="tab:blue")
    axes.axhline(rows[0]["token"]["before"], color="0.5", linewidth=0.8, linestyle="--")
    axes.set_xticks(places, [row["policy"] for row in rows], rotation=30, ha="right", fontsize="small")
    axes.set(ylabel="token imbalance (max/mean)", ylim=(1, None))
    axes.set_title(_title(run), fontsize="small")


def _workers(axes: Any, run: Mapping[str, Any]) -> None:
    row = _best(run)
    before, after = row["load_by_worker"]["before"], row["load_by_worker"]["after"]
    places = np.arange(len(before))
    axes.bar(places - 0.2, before, 0.4, label="everything on primaries", color="0.7")
    axes.bar(places + 0.2, after, 0.4, label=row["policy"], color="tab:blue")
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set(xlabel="FFN worker", ylabel="pairs over the mean", ylim=(0, None))
    axes.set_title(_title(run), fontsize="small")
    axes.legend(fontsize="small")


def _layers(axes: Any, run: Mapping[str, Any]) -> None:
    row = _best(run)
    before, after = row["token_by_layer"]["before"], row["token_by_layer"]["after"]
    places = np.arange(len(before))
    axes.plot(places, [value or np.nan for value in before], marker=".", color="0.5", label="everything on primaries")
    axes.plot(places, [value or np.nan for value in after], marker=".", color="tab:blue", label=row["policy"])
    axes.set(xlabel="MoE layer", ylabel="token imbalance (max/mean)", ylim=(1, None))
    axes.set_title(_title(run), fontsize="small")
    axes.legend(fontsize="small")


def _best(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """``afore`` where it was replayed, else the last policy."""
    found: Mapping[str, Any] = next((row for row in run["rows"] if row["policy"] == "afore"), run["rows"][-1])
    return found


def _title(run: Mapping[str, Any]) -> str:
    return f"EP {run['ep']}, R = {run['slots']}"
