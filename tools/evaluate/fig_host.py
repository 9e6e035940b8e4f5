"""Beyond the paper: what is left of its gains where the host costs a layer less, or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.fig_profiles import with_both
from afore.tools.evaluate.figure import Figure, Results, Row, Setting, scaled, vary

HOST = "chip.layer_host_us"
TIMES, QUICK_TIMES = (0.0, 0.5, 1.0), (0.0, 1.0)


def bars(setting: Setting, times: float) -> Mapping[str, Cell]:
    """What is run where the host takes so many times as long as in the profile, by label."""
    # As it is, it is no other cell than that of the other figures.
    changed = () if times == 1.0 else (scaled(setting, HOST, times),)
    base = setting.sweep(workload=setting.workloads[0], overrides=setting.template.overrides + changed)
    plain = {policy: vary(base, policy=policy) for policy in ("eplb-redistribute", "afore")}
    return {
        **plain,
        **with_both(plain["eplb-redistribute"]),
        **with_both(vary(base, policy="afore-ahead")),
    }


def _rows(setting: Setting, results: Results) -> list[Row]:
    rows = []
    for times in setting.few(TIMES, QUICK_TIMES):
        tried = bars(setting, times)
        speeds = {label: results[cell]["tokens_per_s"] for label, cell in tried.items()}
        for label, cell in tried.items():
            ours = {
                "tokens/s": speeds[label],
                "over afore": speeds[label] / speeds["afore"] - 1,
                "over eplb-redistribute": speeds[label] / speeds["eplb-redistribute"] - 1,
                "tile imbalance": results[cell]["imbalance"]["tile"]["after"],
            }
            rows.append(Row(label=f"{times:g} times the host's time: {label}", ours=ours))
    return rows


HOST_PART = Figure(
    name="host",
    title="Beyond the paper: how much of it the host's time decides",
    cells=lambda setting: [cell for times in setting.few(TIMES, QUICK_TIMES) for cell in bars(setting, times).values()],
    rows=_rows,
    unit={"tokens/s": "tokens/s", "over afore": "%", "over eplb-redistribute": "%", "tile imbalance": "x"},
    note=f"`{HOST}`, what a target costs an FFN worker's host however few tokens it has, is an inferred number of the profile; "
    "attention's is left as it is. Larger and fewer microbatches pay it less often. Each is held against `afore` and "
    "`eplb-redistribute` without *both* (own-stream collectives and fewer microbatches) at the same number.",
)
