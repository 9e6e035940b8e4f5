"""A replay's figures: a row for each policy, a table for each EP and R, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from afore.core.metrics import percentile
from afore.tools.replay_measure import Measured, Setting

COLUMNS: Mapping[str, str] = {
    "plan µs": "processor time of all calls of the policy for a target, from Python: median and 99th percentile",
    "tokens": "max/mean over workers of token-expert pairs, before → after, mean over targets",
    "tiles": "max over workers of Σ⌈pairs/M_tile⌉ over the mean of the demand's own tiles, before → after (bound ⌈tiles/N⌉)",
    "at bound": "targets whose most loaded worker has ⌈tiles/N⌉ tiles, and the mean gap to that of all",
    "optimal": "targets at the certified optimum from the same slots; open: the solver's time was up first",
    "copies": "expert copies a target, and their bytes",
    "hidden": "part of the copies' time that does not show (the window model below)",
    "FFN time": "Σ(tile_us · most tiles + what of the copies shows), over that of everything on primaries",
}
"""What each column is."""


def row_of(setting: Setting, found: Measured, expert_bytes: float) -> dict[str, Any]:
    """One policy's figures."""
    targets = max(1, found.targets)
    counted = max(1, int(found.of_layer.sum()))

    def mean(sums_L: NDArray[np.float64]) -> float:
        return float(sums_L.sum()) / counted

    def by_layer(sums_L: NDArray[np.float64]) -> list[float | None]:
        return [
            float(total) / int(count) if count else None for total, count in zip(sums_L, found.of_layer, strict=True)
        ]

    return {
        "policy": setting.policy,
        "options": setting.options.of(setting.policy),
        "targets": found.targets,
        "plan_us": {"p50": percentile(found.plan_us, 50), "p99": percentile(found.plan_us, 99)},
        "token": {"before": mean(found.token_before), "after": mean(found.token_after)},
        "tile": {"before": mean(found.tile_before), "after": mean(found.tile_after), "bound": mean(found.tile_bound)},
        "at_bound": found.at_bound,
        "gap_to_bound": found.gap_to_bound / targets,
        "optimal": None if setting.optimum_limit_s is None else found.optimal,
        "open": None if setting.optimum_limit_s is None else found.open,
        "copies": found.copies,
        "copy_bytes": round(found.copies * expert_bytes),
        "copy_us": found.raw_us,
        "exposed_us": found.exposed_us,
        "hidden": 1 - found.exposed_us / found.raw_us if found.raw_us else None,
        "ffn_time": found.ffn_us / found.static_us if found.static_us else None,
        "token_by_layer": {"before": by_layer(found.token_before), "after": by_layer(found.token_after)},
        "load_by_worker": {
            "before": (found.load_before_N * setting.workers / counted).tolist(),
            "after": (found.load_after_N * setting.workers / counted).tolist(),
        },
    }


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One EP and R, a line for each policy."""
    certified = any(row["optimal"] is not None for row in rows)
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("policy")
    for name in COLUMNS:
        if name != "optimal" or certified:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            row["policy"],
            f"{row['plan_us']['p50']:.0f} {row['plan_us']['p99']:.0f}",
            f"{row['token']['before']:.2f} → {row['token']['after']:.2f}",
            f"{row['tile']['before']:.2f} → {row['tile']['after']:.2f} ({row['tile']['bound']:.2f})",
            f"{row['at_bound']} {row['gap_to_bound']:.1%}",
        ]
        if certified:
            cells.append(
                "" if row["optimal"] is None else f"{row['optimal']}" + (f", {row['open']} open" * bool(row["open"]))
            )
        cells += [
            f"{row['copies'] / max(1, row['targets']):.1f} {_size(row['copy_bytes'] / max(1, row['targets']))}",
            "" if row["hidden"] is None else f"{row['hidden']:.0%}",
            "" if row["ffn_time"] is None else f"{row['ffn_time']:.3f}",
        ]
        table.add_row(*cells)
    return table


def _size(number: float) -> str:
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"
