"""Beyond the paper: the same model and traffic on other hardware and faster kernels, where skew costs less."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.fig_compare import LEAST_MICROBATCHES
from afore.tools.evaluate.figure import Figure, Results, Row, Setting, available, copies_of, vary
from afore.workers.device.hardware import HardwareProfile, read_profile

PROFILES = ("a100-glm45air", "a100-glm45air-roofline", "h200")
"""Of the package, from slow kernels to fast ones."""
POLICIES = ("static", "eplb", "eplb-redistribute", "libra", "afore", "afore-ahead")
QUICK_POLICIES = ("static", "eplb-redistribute", "afore")
BOTH = " + both"
_MODEL = ("layers", "dense_layers", "hidden", "expert", "experts", "top_k", "shared_experts", "vocabulary")


def with_both(cell: Cell) -> dict[str, Cell]:
    """The cell with the runtime's two mechanisms that any policy can have, own-stream collectives and fewer microbatches, by label;
    none where M leaves no fewer."""
    if cell.microbatches <= LEAST_MICROBATCHES:
        return {}
    fewer = (("batch.least_microbatches", LEAST_MICROBATCHES),)
    return {cell.policy + BOTH: vary(cell, collectives="own-stream", options=fewer)}


def profiles_tried(setting: Setting) -> list[str]:
    """The evaluation's own, and the package's others of the same model: with another model, they would say nothing of it."""
    own = setting.template.profile
    others = [name for name in PROFILES if name != own and _same_model(_packaged(name), setting.profile)]
    ordered = [name for name in PROFILES if name == own or name in others]
    return list(setting.few(ordered if own in ordered else [own, *others], [own, *others][:2]))


@cache
def _packaged(name: str) -> HardwareProfile:
    return read_profile(name)


def _same_model(one: HardwareProfile, other: HardwareProfile) -> bool:
    return all(getattr(one.shape, name).value == getattr(other.shape, name).value for name in _MODEL)


def bars(setting: Setting, profile: str) -> Mapping[str, Cell]:
    """What is run on a profile, by label. Numbers that were set for the evaluation are of its own profile."""
    own = profile == setting.template.profile
    base = setting.sweep(
        workload=setting.workloads[0], profile=profile, overrides=setting.template.overrides if own else ()
    )
    found = {policy: vary(base, policy=policy) for policy in available(setting.few(POLICIES, QUICK_POLICIES))}
    return found if setting.quick else {**found, **with_both(found["afore-ahead"])}


def _rows(setting: Setting, results: Results) -> list[Row]:
    rows = []
    for profile in profiles_tried(setting):
        tried = bars(setting, profile)
        base, history = results[tried["static"]], results[tried["eplb-redistribute"]]
        for label, cell in tried.items():
            found = results[cell]
            copies = copies_of(found)
            ours = {
                "tokens/s": found["tokens_per_s"],
                "over static": found["tokens_per_s"] / base["tokens_per_s"] - 1,
                "over eplb-redistribute": found["tokens_per_s"] / history["tokens_per_s"] - 1,
                "tile imbalance": found["imbalance"]["tile"]["after"],
                "copies a target": copies["copies a target"],
                "exposed": copies["exposed"],
            }
            rows.append(Row(label=f"{profile}: {label}", ours=ours))
    return rows


OTHER_PROFILES = Figure(
    name="profiles",
    title="Beyond the paper: other hardware, faster kernels",
    cells=lambda setting: [cell for name in profiles_tried(setting) for cell in bars(setting, name).values()],
    rows=_rows,
    unit={
        "tokens/s": "tokens/s",
        "over static": "%",
        "over eplb-redistribute": "%",
        "tile imbalance": "x",
        "copies a target": "",
        "exposed": "ms",
    },
    note="The shape and the requests are the template's on each profile. `a100-glm45air` is driven as slowly as the paper's static "
    "baseline shows; `a100-glm45air-roofline` (the same GPUs) and `h200` are public specifications, with tuned kernels in CUDA "
    "graphs: inferred, not measured. Where attention decides rather than experts, nothing that is done about experts brings "
    "anything: compare the sensitivity to attention / FFN time and to kernel speed. Moving pairs costs nothing on the path here. "
    "*Both*: own-stream collectives and fewer microbatches.",
)
