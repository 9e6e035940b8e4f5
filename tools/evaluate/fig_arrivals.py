"""Beyond the paper's closed picture: requests that come one by one, as in Azure's traces, and whose prompts are paid for."""

from __future__ import annotations

from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.figure import SPEED, Figure, Results, Row, Setting, speed, vary

TRACE = "azure-conv"
OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS = 200, 6
POLICIES, QUICK_POLICIES = ("static", "eplb-redistribute", "afore"), ("static", "afore")


def _cells(setting: Setting) -> list[Cell]:
    rows = setting.few((max(1, setting.template.rows // 4),), (max(1, setting.template.rows // 20),))[0]
    steps = setting.few((OUTPUT_TOKENS,), (QUICK_OUTPUT_TOKENS,))[0]
    return [
        setting.sweep(workload=workload, policy=policy, arrivals=TRACE, rows=rows, steps=steps)
        for workload in setting.few(setting.workloads, setting.workloads[-1:])
        for policy in setting.few(POLICIES, QUICK_POLICIES)
    ]


def _rows(setting: Setting, results: Results) -> list[Row]:
    rows = []
    for cell in _cells(setting):
        found = results[cell]
        rows.append(
            Row(
                label=f"{cell.workload}: {cell.policy}",
                ours={
                    **speed(found, results[vary(cell, policy="static")]),
                    "median ITL": found["itl_p50_ms"],
                    "P95 TTFT": found["ttft_p95_ms"],
                    "requests/s": found["requests_per_s"],
                },
            )
        )
    return rows


ARRIVING = Figure(
    name="arrivals",
    title="Requests that arrive as in a trace",
    cells=_cells,
    rows=_rows,
    unit={**SPEED, "median ITL": "ms", "P95 TTFT": "ms", "requests/s": ""},
    note=f"Gaps and answers' lengths are distributed as in Azure's `{TRACE}`, answers scaled to {OUTPUT_TOKENS} tokens on "
    "average, prompts as the workload's; requests come at 80 % of what balanced FFN workers, or prefill workers, could serve. "
    "Throughput is therefore set by the arrivals, and what a policy changes is latency. "
    "`eplb-redistribute` moves pairs at no cost on the path here.",
)
