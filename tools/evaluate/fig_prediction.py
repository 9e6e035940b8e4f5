"""Beyond the paper: what a prediction of the next layer's demand is worth, by how often the next layer's gate is right."""

from __future__ import annotations

from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.figure import Figure, Results, Row, Setting, available, copies_of

POLICIES = ("libra", "afore-ahead")
"""They ask the next layer's gate."""
ACCURACIES, QUICK_ACCURACIES = (0.5, 0.7, 0.9, 1.0), (0.5, 1.0)


def _points(setting: Setting) -> list[Cell]:
    return [
        setting.sweep(workload=setting.workloads[0], policy=policy, next_gate_accuracy=accuracy)
        for policy in available(POLICIES)
        for accuracy in setting.few(ACCURACIES, QUICK_ACCURACIES)
    ]


def _others(setting: Setting) -> dict[str, Cell]:
    """Those that it is held against: they predict nothing."""
    return {policy: setting.sweep(workload=setting.workloads[0], policy=policy) for policy in ("static", "afore")}


def _rows(setting: Setting, results: Results) -> list[Row]:
    against = {policy: results[cell]["tokens_per_s"] for policy, cell in _others(setting).items()}
    rows = []
    for cell in _points(setting):
        found = results[cell]
        ours = {
            "tokens/s": found["tokens_per_s"],
            **{f"over {policy}": found["tokens_per_s"] / speed - 1 for policy, speed in against.items()},
            "tile imbalance": found["imbalance"]["tile"]["after"],
            "copies a target": copies_of(found)["copies a target"],
        }
        rows.append(Row(label=f"{cell.policy}, {cell.next_gate_accuracy:.0%} right", ours=ours))
    return rows


PREDICTION = Figure(
    name="prediction",
    title="Beyond the paper: how often the next layer's gate must be right",
    cells=lambda setting: [*_others(setting).values(), *_points(setting)],
    rows=_rows,
    unit={"tokens/s": "tokens/s", "over static": "%", "over afore": "%", "tile imbalance": "x", "copies a target": ""},
    note="The part of a layer's assignments that its gate gives right on the hidden states of the layer before. Wrong ones go to "
    "the least demanded experts, evenly, so that the order of the hot ones survives at any accuracy: optimistic. `libra` moves "
    "pairs at no cost on the path here.",
)
