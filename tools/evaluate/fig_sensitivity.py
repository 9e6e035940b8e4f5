"""Beyond the paper: what each knob and each property of hardware and traffic does to the gain, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.fig_ablation import target_us
from afore.tools.evaluate.figure import COPIES, Figure, Results, Row, Setting, copies_of, scaled, vary

POLICIES = ("static", "eplb-redistribute", "afore")
QUICK_POLICIES = ("static", "afore")
_Change = Callable[[Setting, Any], dict[str, Any]]


def _overrides(setting: Setting, *numbers: tuple[str, float]) -> dict[str, Any]:
    return {"overrides": setting.template.overrides + numbers}


def _workers(setting: Setting, workers: int) -> dict[str, Any]:
    """Attention workers and requests grow with FFN workers: each has as much to do as in the template."""
    template = setting.template
    return {"ffn": workers, "attention": max(1, round(template.attention * workers / template.ffn))}


def _attention(setting: Setting, ratio: float) -> dict[str, Any]:
    return _overrides(setting, ("chip.attention_host_us", ratio * target_us(setting)))


KNOBS: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...], _Change], ...] = (
    ("R", (0, 2, 4, 8, 16), (2, 8), lambda s, v: {"slots": v}),
    ("M", (1, 2, 3, 4), (1, 3), lambda s, v: {"microbatches": v}),
    ("M_tile", (16, 32, 64, 128), (32,), lambda s, v: _overrides(s, ("chip.tile_tokens", float(v)))),
    ("B", (1, 2, 4, 8, 16), (1,), lambda s, v: {"copy_budget": v}),
    ("EP", (2, 4, 8, 16, 32), (4,), _workers),
    ("attention / FFN time", (0.25, 0.5, 1.0, 2.0, 4.0), (2.0,), _attention),
    (
        "kernel speed",
        (0.5, 1.0, 2.0, 4.0),
        (2.0,),
        lambda s, v: _overrides(s, scaled(s, "chip.gemm_efficiency", v, most=1.0)),
    ),
    (
        "bandwidth",
        (0.125, 0.25, 0.5, 1.0, 2.0),
        (0.25,),
        lambda s, v: _overrides(s, scaled(s, "wires.link_gb_per_s", v)),
    ),
    ("skew", (1.0, 1.2, 1.4, 1.7, 2.0, 2.5), (2.0,), lambda s, v: {"imbalance": v}),
    (
        "batch",
        (0.25, 0.5, 1.0, 2.0),
        (0.5,),
        lambda s, v: {"rows": max(1, round(s.template.rows * v))},
    ),
    ("steps spread", (0, 1), (0,), lambda s, v: {"options": (*s.template.options, ("batch.spread", bool(v)))}),
    ("one slow worker", (1.0, 1.25, 1.5, 2.0), (1.5,), lambda s, v: {"slow_worker": v}),
)
"""(what, all its values, the quick ones, what it changes in the template)."""


def points(setting: Setting) -> dict[str, Cell]:
    """Each setting that is tried, under ``afore``, by label."""
    return {
        f"{name} = {value:g}": setting.sweep(workload=setting.workloads[0], policy="afore", **change(setting, value))
        for name, every, few, change in KNOBS
        for value in setting.few(every, few)
    }


def _cells(setting: Setting) -> list[Cell]:
    policies = setting.few(POLICIES, QUICK_POLICIES)
    return [vary(cell, policy=policy) for cell in points(setting).values() for policy in policies]


def _rows(setting: Setting, results: Results) -> list[Row]:
    rows = []
    for label, cell in points(setting).items():
        found, base = results[cell], results[vary(cell, policy="static")]
        ours = {
            "tokens/s": found["tokens_per_s"],
            "over static": found["tokens_per_s"] / base["tokens_per_s"] - 1,
            "tile imbalance": found["imbalance"]["tile"]["after"],
            "bound": found["imbalance"]["tile"]["bound"],
            **copies_of(found),
        }
        history = vary(cell, policy="eplb-redistribute")
        if history in results:
            ours["over eplb-redistribute"] = found["tokens_per_s"] / results[history]["tokens_per_s"] - 1
        rows.append(Row(label=label, ours=ours))
    return rows


SENSITIVITY = Figure(
    name="sensitivity",
    title="Beyond the paper: sensitivity",
    cells=_cells,
    rows=_rows,
    unit={
        "tokens/s": "tokens/s",
        "over static": "%",
        "over eplb-redistribute": "%",
        "tile imbalance": "x",
        "bound": "x",
        **COPIES,
    },
    note="`afore` against the same setting's `static` and `eplb-redistribute`; everything else as in the template. Kernel speed, "
    "bandwidth and batch are multiples of the profile's and the template's. EP changes attention workers in proportion. A slow "
    "worker is not told to the planner (`planner.worker_speed` would).",
)
