"""The figures and tables: which cells each needs, the paper's values, and how ours are read off the cells' results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from afore.scheduler.policies.registry import POLICIES
from afore.tools.evaluate.cell import Cell

Results = Mapping[Cell, Mapping[str, Any]]

APPROACHES: Mapping[str, str] = MappingProxyType(
    {
        "static": "Static",
        "afore-reactive": "Approach 1",
        "afore-no-overlap": "Approach 2",
        "afore": "Approach 3",
    }
)
ABLATIONS: Mapping[str, str] = MappingProxyType(
    {
        "static": "Static",
        "afore-no-prefetch": "w/o Prefetch",
        "afore-no-overlap": "w/o Overlap",
        "afore": "AFORE",
    }
)
BASELINES = ("static", "eplb", "eplb-redistribute", "harmoeny", "lina", "libra", "afore", "afore-plus")
"""In the order of Figure 8; those that are there are run."""
ON_PATH: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"libra": (0.0, 100.0, 200.0), "harmoeny": (0.0, 100.0, 200.0)}
)
"""Policies that move tokens on the actual demand, and what that may cost each target, in µs."""
DATASETS: Mapping[str, str] = MappingProxyType(
    {"chat": "ShareGPT", "web": "FineWeb", "code": "CodeForces", "math": "GSM8K"}
)
SKEWED = 2.0
"""Static imbalance of Figure 2's skewed routing; the paper says 'skewed' and no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a figure: ours, and the paper's where it gives one."""

    label: str
    ours: Mapping[str, float]
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure or table: cells from a template that has profile, layers, steps and seed, and rows from their results."""

    name: str
    title: str
    cells: Callable[[Cell, Sequence[str]], list[Cell]]
    """From a template and workloads."""
    rows: Callable[[Cell, Sequence[str], Results], list[Row]]
    unit: Mapping[str, str]
    """Columns and their units, in order."""
    note: str = ""
    """What stands below the table."""


def available(policies: Sequence[str]) -> list[str]:
    """Those of them that this version has."""
    return [policy for policy in policies if policy in POLICIES]


def vary(template: Cell, **changes: Any) -> Cell:
    """The template with other values."""
    values = {name: getattr(template, name) for name in Cell.__dataclass_fields__}
    return Cell(**{**values, **changes})


# Figures 3 and 4, the case study


def _case_cells(template: Cell, workloads: Sequence[str]) -> list[Cell]:
    return [vary(template, workload=workloads[0], policy=policy) for policy in available(list(APPROACHES))]


_FIG3 = {
    "Static": (11357.31, 341.713),
    "Approach 1": (11357.31 * 1.045, 341.713 * (1 - 0.039)),
    "Approach 2": (11357.31 * 1.045 * 1.071, 341.713 * (1 - 0.039) * (1 - 0.030)),
    "Approach 3": (11357.31 * 1.303, 341.713 * (1 - 0.178)),
}
_FIG4 = {
    "Static": (1.70, 1.54, 0.0, 0.0),
    "Approach 1": (1.42, 1.28, 0.467, 0.461),
    "Approach 2": (1.10, 1.02, 0.482, 0.437),
    "Approach 3": (1.10, 1.02, 0.495, 0.0),
}


def _fig3_rows(template: Cell, workloads: Sequence[str], results: Results) -> list[Row]:
    cells = {APPROACHES[cell.policy]: results[cell] for cell in _case_cells(template, workloads)}
    base = cells["Static"]
    return [
        Row(
            label=label,
            ours={
                "tokens/s": found["tokens_per_s"],
                "over static": found["tokens_per_s"] / base["tokens_per_s"] - 1,
                "P95 ITL": found["itl_p95_ms"],
                "ITL below static": 1 - found["itl_p95_ms"] / base["itl_p95_ms"],
            },
            paper={
                "tokens/s": _FIG3[label][0],
                "over static": _FIG3[label][0] / _FIG3["Static"][0] - 1,
                "P95 ITL": _FIG3[label][1],
                "ITL below static": 1 - _FIG3[label][1] / _FIG3["Static"][1],
            },
        )
        for label, found in cells.items()
    ]


def _fig4_rows(template: Cell, workloads: Sequence[str], results: Results) -> list[Row]:
    names = ("token imbalance", "tile imbalance", "raw copy", "exposed")
    return [
        Row(
            label=APPROACHES[cell.policy],
            ours={
                "token imbalance": found["imbalance"]["token"]["after"],
                "tile imbalance": found["imbalance"]["tile"]["after"],
                "raw copy": found["copies"]["raw_us"]["mean"] / 1e3,
                "exposed": found["copies"]["exposed_us"]["mean"] / 1e3,
            },
            paper=dict(zip(names, _FIG4[APPROACHES[cell.policy]], strict=True)),
        )
        for cell in _case_cells(template, workloads)
        for found in (results[cell],)
    ]


# Figure 8, the comparison


def _compared(template: Cell, workloads: Sequence[str]) -> list[tuple[str, str, Cell]]:
    """(workload, label, cell) of every bar."""
    bars = []
    for workload in workloads:
        for policy in available(BASELINES):
            for cost_us in ON_PATH.get(policy, (0.0,)):
                label = f"{policy} +{cost_us:g} µs" if policy in ON_PATH else policy
                cell = vary(template, workload=workload, policy=policy, redistribute_us=cost_us)
                bars.append((workload, label, cell))
    return bars


def _fig8_rows(template: Cell, workloads: Sequence[str], results: Results) -> list[Row]:
    bars = _compared(template, workloads)
    rows = []
    for workload, label, cell in bars:
        found = results[cell]
        base = next(results[other] for w, name, other in bars if (w, name) == (workload, "static"))
        paper = {}
        if label == "afore":
            paper = {"over static": 0.298, "ITL below static": 0.182}
        rows.append(
            Row(
                label=f"{DATASETS[workload]} ({workload}): {label}",
                ours={
                    "tokens/s": found["tokens_per_s"],
                    "over static": found["tokens_per_s"] / base["tokens_per_s"] - 1,
                    "P95 ITL": found["itl_p95_ms"],
                    "ITL below static": 1 - found["itl_p95_ms"] / base["itl_p95_ms"],
                },
                paper=paper,
            )
        )
    return rows


# Table 3 and Figure 10, the ablation


def _ablation_cells(template: Cell, workloads: Sequence[str]) -> list[Cell]:
    return [
        vary(template, workload=workload, policy=policy)
        for workload in workloads
        for policy in available(list(ABLATIONS))
    ]


def _fig10_rows(template: Cell, workloads: Sequence[str], results: Results) -> list[Row]:
    means = {"Static": (0.0, 0.0), "AFORE": (0.298, 0.182)}
    rows = []
    for cell in _ablation_cells(template, workloads):
        found, base = results[cell], results[vary(cell, policy="static")]
        full = results[vary(cell, policy="afore")]
        label = ABLATIONS[cell.policy]
        paper = {}
        if label in means:
            paper = {"over static": means[label][0], "ITL below static": means[label][1]}
        rows.append(
            Row(
                label=f"{DATASETS[cell.workload]}: {label}",
                ours={
                    "tokens/s": found["tokens_per_s"],
                    "over static": found["tokens_per_s"] / base["tokens_per_s"] - 1,
                    "below AFORE": 1 - found["tokens_per_s"] / full["tokens_per_s"],
                    "P95 ITL": found["itl_p95_ms"],
                    "ITL below static": 1 - found["itl_p95_ms"] / base["itl_p95_ms"],
                },
                paper=paper,
            )
        )
    return rows


# Figure 11, hiding


def _fig11_cells(template: Cell, workloads: Sequence[str]) -> list[Cell]:
    return [vary(template, workload=workload, policy="afore") for workload in workloads]


def _fig11_rows(template: Cell, workloads: Sequence[str], results: Results) -> list[Row]:
    rows = []
    for cell in _fig11_cells(template, workloads):
        copies = results[cell]["copies"]
        points = copies["left_us"]["points"] or [0.0]
        rows.append(
            Row(
                label=DATASETS[cell.workload],
                ours={
                    "D": copies["d_us"]["mean"] / 1e3,
                    "W": copies["w_us"]["mean"] / 1e3,
                    "left, median": points[len(points) // 2] / 1e3,
                    "left, least": points[0] / 1e3,
                    "targets": float(copies["targets"]),
                    "exposed": float(copies["exposed_targets"]),
                },
                paper={"D": 0.474, "W": 2.064, "left, median": 1.564, "left, least": 0.447, "exposed": 0.0},
            )
        )
    return rows


# Figure 2, why disaggregation makes imbalance worse; Figure 1, the demand itself


def _fig2_cells(template: Cell, workloads: Sequence[str]) -> list[Cell]:
    apart = vary(template, workload=workloads[0], policy="static")
    devices = template.ffn
    together = vary(
        apart,
        colocated=True,
        attention=devices,
        rows=max(1, template.attention * template.rows * template.microbatches // devices),
        microbatches=1,
    )
    return [vary(cell, imbalance=skew) for cell in (together, apart) for skew in (1.0, SKEWED)]


def _fig2_rows(template: Cell, workloads: Sequence[str], results: Results) -> list[Row]:
    cells = _fig2_cells(template, workloads)
    rows = []
    for label, loss, (uniform, skewed) in (("monolithic", 0.119, cells[:2]), ("AFD", 0.201, cells[2:])):
        flat, steep = results[uniform]["tokens_per_s"], results[skewed]["tokens_per_s"]
        rows.append(Row(label=label, ours={"loss by skew": 1 - steep / flat}, paper={"loss by skew": loss}))
    return rows


def _fig1_cells(template: Cell, workloads: Sequence[str]) -> list[Cell]:
    return [vary(template, workload=workloads[0], policy="static")]


def _fig1_rows(template: Cell, workloads: Sequence[str], results: Results) -> list[Row]:
    found = results[_fig1_cells(template, workloads)[0]]
    layers = [layer["token"]["before"] for layer in found["layers_imbalance"]]
    return [
        Row(
            label="load of the most loaded of 8 workers over the mean",
            ours={"mean": found["imbalance"]["token"]["before"], "most imbalanced layer": max(layers)},
            paper={"mean": 1.70, "most imbalanced layer": 3.3},
        )
    ]


_SPEED = {"tokens/s": "tokens/s", "over static": "%", "P95 ITL": "ms", "ITL below static": "%"}

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        figure.name: figure
        for figure in (
            Figure(
                name="fig1",
                title="Figures 1 and 2 (left): the demand",
                cells=_fig1_cells,
                rows=_fig1_rows,
                unit={"mean": "x", "most imbalanced layer": "x"},
                note="The mean is set (tools/evaluate/demand.py); the layers' spread is not.",
            ),
            Figure(
                name="fig2",
                title="Figure 2 (right): what skewed routing costs, monolithic and disaggregated",
                cells=_fig2_cells,
                rows=_fig2_rows,
                unit={"loss by skew": "%"},
                note=f"Skewed means a static imbalance of {SKEWED:g}; the paper gives no number.",
            ),
            Figure(
                name="fig3",
                title="Figure 3: the case study, throughput and latency",
                cells=_case_cells,
                rows=_fig3_rows,
                unit=_SPEED,
            ),
            Figure(
                name="fig4",
                title="Figure 4: the case study, imbalance and copies",
                cells=_case_cells,
                rows=_fig4_rows,
                unit={"token imbalance": "x", "tile imbalance": "x", "raw copy": "ms", "exposed": "ms"},
            ),
            Figure(
                name="fig8",
                title="Figure 8: policies and workloads",
                cells=lambda template, workloads: [cell for _, _, cell in _compared(template, workloads)],
                rows=_fig8_rows,
                unit=_SPEED,
                note="The paper's column has its means over four workloads: its text gives ranges and means, no bars.",
            ),
            Figure(
                name="fig10",
                title="Table 3 and Figure 10: the ablation",
                cells=_ablation_cells,
                rows=_fig10_rows,
                unit={**_SPEED, "below AFORE": "%"},
                note="The paper: without prefetch 12.4-17.9 % below AFORE, without overlap 15.2-21.3 %.",
            ),
            Figure(
                name="fig11",
                title="Figure 11: hiding copies",
                cells=_fig11_cells,
                rows=_fig11_rows,
                unit={
                    "D": "ms",
                    "W": "ms",
                    "left, median": "ms",
                    "left, least": "ms",
                    "targets": "",
                    "exposed": "",
                },
                note="Of every target that copied: its slowest copy D, its shortest window W, and the least of W - D over its "
                "workers. The paper's are the middle of the ranges that its text gives; it sampled 324 targets.",
            ),
        )
    }
)
