"""Figure 8 and what goes beyond it: policies and workloads, mechanisms of our own, and the grid on which none may lose."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from afore.scheduler.policies.registry import POLICIES
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.figure import (
    COPIES,
    DATASETS,
    SPEED,
    Figure,
    Results,
    Row,
    Setting,
    available,
    copies_of,
    speed,
    vary,
)
from afore.tools.evaluate.run_options import Option

BASELINES = ("static", "eplb", "eplb-redistribute", "harmoeny", "lina", "libra")
"""Those that are there are run."""
ABLATED = ("afore-reactive", "afore-no-overlap", "afore-no-prefetch")
BEYOND = tuple(name for name in POLICIES if name.startswith("afore-") and name not in ABLATED)
"""Policies of our own beyond the paper's."""
LEAST_MICROBATCHES = 2
"""With *fewer microbatches*: the engine tries numbers from M down to this one."""
GRID_SEEDS = 3
"""Of the grid: one demand alone would show what it happens to show."""
ON_PATH: Mapping[str, tuple[float, ...]] = MappingProxyType(
    dict.fromkeys(("eplb-redistribute", "libra", "harmoeny"), (0.0, 100.0, 200.0))
)
"""Policies that move tokens on the actual demand, and what that may cost each target, in µs; all others cost nothing there."""
AT_THEIR_BEST: Mapping[str, tuple[str, tuple[Option, ...]]] = MappingProxyType(
    {
        "harmoeny, copies early and kept": (
            "harmoeny",
            (("policy_options.harmoeny.start", "now"), ("policy_options.harmoeny.reuse", True)),
        ),
        "libra, replicas kept": ("libra", (("policy_options.libra.reuse", True),)),
    }
)
"""Baselines with what their publications lack and this runtime offers: label → policy and options."""
PUBLISHED = ("static", "eplb", "harmoeny", "lina", "libra")
"""The paper's own baselines."""
_SHAREGPT = {"tokens/s": 14_700.0, "P95 ITL": 281.0}


_COPIES8 = {name: COPIES[name] for name in ("copies a target", "sent ahead", "exposed")}


def compared(setting: Setting, workload: str) -> dict[str, Cell]:
    """Every bar of Figure 8 for a workload, by label."""
    bars = {}
    for policy in available([*BASELINES, "afore", *BEYOND]):
        for cost_us in ON_PATH.get(policy, (0.0,)):
            label = f"{policy} +{cost_us:g} µs" if policy in ON_PATH else policy
            bars[label] = setting.vary(workload=workload, policy=policy, redistribute_us=cost_us)
    for label, (policy, options) in AT_THEIR_BEST.items():
        bars[f"{label} +0 µs"] = setting.vary(workload=workload, policy=policy, options=options)
    return bars


def best_baseline(setting: Setting, workload: str, results: Results) -> Mapping[str, Any]:
    """The result of the fastest that is not ours, at its least cost."""
    return max(
        (results[cell] for cell in compared(setting, workload).values() if cell.policy in BASELINES),
        key=lambda found: float(found["tokens_per_s"]),
    )


def _fig8_rows(setting: Setting, results: Results) -> list[Row]:
    rows = []
    for workload in setting.workloads:
        bars = compared(setting, workload)
        base, best = results[bars["static"]], best_baseline(setting, workload, results)
        for label, cell in bars.items():
            found = results[cell]
            paper = {"over static": 0.298, "ITL below static": 0.182, "over the best baseline": 0.138}
            rows.append(
                Row(
                    label=f"{DATASETS[workload]} ({workload}): {label}",
                    ours={
                        **speed(found, base),
                        "over the best baseline": found["tokens_per_s"] / best["tokens_per_s"] - 1,
                        "token imbalance": found["imbalance"]["token"]["after"],
                        "tile imbalance": found["imbalance"]["tile"]["after"],
                        "on the path": cell.redistribute_us / 1e3,
                        **{name: value for name, value in copies_of(found).items() if name in _COPIES8},
                    },
                    paper={**paper, **(_SHAREGPT if workload == "chat" else {})} if label == "afore" else {},
                )
            )
    return rows


def _beyond(setting: Setting, workload: str) -> dict[str, Cell]:
    base = setting.vary(workload=workload)
    found = {
        f"{policy}{' + own-stream collectives' if collectives == 'own-stream' else ''}": vary(
            base, policy=policy, collectives=collectives
        )
        for policy in ("afore", *BEYOND)
        for collectives in ("model-stream", "own-stream")
    }
    if base.microbatches > LEAST_MICROBATCHES:
        fewer = (("batch.least_microbatches", LEAST_MICROBATCHES),)
        found["afore, steps not spread"] = vary(base, policy="afore", options=(("batch.spread", False),))
        found["afore + fewer microbatches"] = vary(base, policy="afore", options=fewer)
        # The runtime's mechanisms are no policy's own: baselines get them too.
        for policy in available(["static", "eplb-redistribute", "libra", "afore", *BEYOND]):
            found[f"{policy} + both"] = vary(base, policy=policy, collectives="own-stream", options=fewer)
    return found


def _beyond_cells(setting: Setting) -> list[Cell]:
    return [
        cell
        for workload in setting.workloads
        for cells in (compared(setting, workload), _beyond(setting, workload))
        for cell in cells.values()
    ]


def _beyond_rows(setting: Setting, results: Results) -> list[Row]:
    rows = []
    for workload in setting.workloads:
        best = best_baseline(setting, workload, results)
        plain = results[setting.vary(workload=workload, policy="afore")]
        for label, cell in _beyond(setting, workload).items():
            found = results[cell]
            rows.append(
                Row(
                    label=f"{workload}: {label}",
                    ours={
                        "tokens/s": found["tokens_per_s"],
                        "over afore": found["tokens_per_s"] / plain["tokens_per_s"] - 1,
                        "over the best baseline": found["tokens_per_s"] / best["tokens_per_s"] - 1,
                        "tile imbalance": found["imbalance"]["tile"]["after"],
                        "bound": found["imbalance"]["tile"]["bound"],
                        **copies_of(found),
                    },
                )
            )
    return rows


def _grid(setting: Setting, policy: str) -> dict[str, list[Cell]]:
    """Of each workload the cells of the grid."""
    seed = setting.template.seed
    return {
        workload: [
            setting.sweep(workload=workload, policy=policy, microbatches=M, slots=R, seed=seed + number)
            for number in range(setting.few((GRID_SEEDS,), (1,))[0])
            for M in setting.few((1, 2, 3, 4), (2, 3))
            for R in setting.few((2, 4, 8), (2, 8))
        ]
        for workload in setting.few(setting.workloads, setting.workloads[:1])
    }


def _grid_cells(setting: Setting) -> list[Cell]:
    return [cell for policy in ("afore", *BEYOND) for cells in _grid(setting, policy).values() for cell in cells]


def _grid_rows(setting: Setting, results: Results) -> list[Row]:
    rows = []
    for policy in BEYOND:
        for workload, cells in _grid(setting, policy).items():
            gains = {
                cell: results[cell]["tokens_per_s"] / results[vary(cell, policy="afore")]["tokens_per_s"] - 1
                for cell in cells
            }
            worst = min(gains, key=lambda cell: gains[cell])
            ours = {
                "mean": sum(gains.values()) / len(gains),
                "least": gains[worst],
                "most": max(gains.values()),
                "least at M": float(worst.microbatches),
                "least at R": float(worst.slots),
                "least at seed": float(worst.seed),
                "losing more than 0.5 %": float(sum(gain < -0.005 for gain in gains.values())),
                "of": float(len(gains)),
            }
            rows.append(Row(label=f"{workload}: {policy}", ours=ours))
    return rows


COMPARE_FIGURES = (
    Figure(
        name="fig8",
        title="Figure 8: policies and workloads",
        cells=lambda setting: [cell for w in setting.workloads for cell in compared(setting, w).values()],
        rows=_fig8_rows,
        unit={
            **SPEED,
            "over the best baseline": "%",
            "token imbalance": "x",
            "tile imbalance": "x",
            "on the path": "ms",
            **_COPIES8,
        },
        note="What stands beside our `afore` of each workload are the paper's means, 29.8 % and 18.2 % over static, and the middle "
        "of 10.1 to 17.6 % over the best of its baselines; its text gives values for ShareGPT alone. Moving pairs by true demand "
        "costs every target what the label says. At 0 µs Libra and `eplb-redistribute` have this runtime's own way: "
        "demand that is known, and a plan that is published, while earlier microbatches compute. HarMoEny copies when its target "
        "is there, and drops the copies after it, as published; with *copies early and kept* it has that way too, and Libra with "
        "*replicas kept* fetches none anew. `eplb-redistribute` (EPLB's replicas, pairs moved by true demand) is none of the "
        "paper's baselines, and stronger than any. EPLB counts the very requests that are then measured, and rebalances once, "
        "some steps before. What is exposed is the mean wait of targets that copied for themselves.",
    ),
    Figure(
        name="beyond",
        title="Beyond the paper: mechanisms of our own, one by one and together",
        cells=_beyond_cells,
        rows=_beyond_rows,
        unit={
            "tokens/s": "tokens/s",
            "over afore": "%",
            "over the best baseline": "%",
            "tile imbalance": "x",
            "bound": "x",
            **COPIES,
        },
        note="*Not spread*: microbatches that came together begin and end their steps together. Collectives of a stream of "
        "their own meet no interference here: optimistic. *Fewer microbatches*: the engine finds by trial how many of M "
        "serve fastest. *Both*: own-stream collectives and fewer microbatches, which any policy can have. The bound is "
        "what no placement can beat.",
    ),
    Figure(
        name="grid",
        title="Beyond the paper: does any mechanism lose against `afore`? All M and R",
        cells=_grid_cells,
        rows=_grid_rows,
        unit={
            "mean": "%",
            "least": "%",
            "most": "%",
            "least at M": "",
            "least at R": "",
            "least at seed": "",
            "losing more than 0.5 %": "",
            "of": "",
        },
        note=f"Throughput over `afore` in the same cell: M 1 to 4, R 2, 4 and 8, each with {GRID_SEEDS} seeds (a quick "
        "look: fewer of each, one seed), which make other demand and other prompts.",
    ),
)
