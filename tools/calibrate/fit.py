"""From samples to numbers: lines through medians, fitted on one half of a run's steps and tested on the other."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from afore.tools.calibrate.spans import Recorded, Sample
from afore.workers.device.hardware import HardwareProfile, Number


@dataclass(frozen=True, slots=True)
class Line:
    """time = fixed + each · size, in µs."""

    fixed_us: float
    each_us: float

    def at(self, size: float) -> float:
        """The time of a piece of that size."""
        return self.fixed_us + self.each_us * size


@dataclass(frozen=True, slots=True)
class Fit:
    """A line, and how well it tells the half of the run that it was not fitted on."""

    line: Line
    fitted: int
    tested: int
    error: float
    """Median of |predicted - measured| / measured over the tested half; 0 where nothing is left to test."""


ALONE = 0.1
"""Copies and collectives also wait for ports and for one another: the shortest tenth of them did not."""


def fit(samples: Sequence[Sample], *, slope: bool, part: float = 0.5) -> Fit:
    """Fits even steps and tests odd ones. ``slope``: whether time grows with size; ``part``: without, which quantile it is.

    A line goes through the medians of each size, weighted by how many there are: single times on shared cores are off by whole time
    slices. Neither part is negative: a line that would be is one through zero, or flat.
    """
    even = [sample for sample in samples if sample.step % 2 == 0] or list(samples)
    odd = [sample for sample in samples if sample.step % 2]
    line = _line(even) if slope else Line(_quantile([sample.took_us for sample in even], part), 0.0)
    errors = [abs(line.at(s.size) - s.took_us) / s.took_us for s in odd if s.took_us > 0]
    return Fit(line, len(even), len(odd), statistics.median(errors) if errors else 0.0)


def _quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return statistics.median(ordered) if part == 0.5 else ordered[int(part * (len(ordered) - 1))]


def _line(samples: Sequence[Sample]) -> Line:
    by_size: dict[float, list[float]] = defaultdict(list)
    for sample in samples:
        by_size[sample.size].append(sample.took_us)
    sizes = np.array(sorted(by_size))
    medians = np.array([statistics.median(by_size[size]) for size in sizes])
    weights = np.array([float(len(by_size[size])) for size in sizes])
    middle = float(np.average(medians, weights=weights))
    if len(sizes) < 2:
        return Line(middle, 0.0)
    mean = float(np.average(sizes, weights=weights))
    spread = float(np.sum(weights * (sizes - mean) ** 2))
    each = float(np.sum(weights * (sizes - mean) * (medians - middle))) / spread
    if each <= 0:
        return Line(middle, 0.0)
    fixed = middle - each * mean
    if fixed < 0:
        return Line(0.0, float(np.sum(weights * sizes * medians) / np.sum(weights * sizes**2)))
    return Line(fixed, each)


def fit_all(recorded: Recorded) -> dict[str, Fit]:
    """One fit for each kind of work that the run has."""
    waits = ("copy", "gather", "reduce")
    return {
        name: fit(samples, slope=name in ("experts", "attention"), part=ALONE if name in waits else 0.5)
        for name, samples in sorted(recorded.samples.items())
        if samples
    }


def profile_from(
    base: HardwareProfile, fits: dict[str, Fit], *, name: str, about: str, workers: int
) -> HardwareProfile:
    """``base`` with what the fits say in its place; its peaks and its model stay. What was not recorded keeps its source."""
    chip: dict[str, Number] = {}
    wires: dict[str, Number] = {}
    expert_weights = 3 * base.shape.hidden.value * base.shape.expert.value
    hidden, width = base.shape.hidden.value, base.shape.weight_bytes.value
    heads = base.shape.heads.value * base.shape.head_dim.value
    kv_heads = base.shape.kv_heads.value * base.shape.head_dim.value
    token_weights = hidden * (2 * heads + 2 * kv_heads) + base.shape.shared_experts.value * expert_weights
    peak = base.chip.tflops.value * 1e6
    launch_us = base.chip.launch_us.value

    def measured(value: float, of: Fit, what: str) -> Number:
        return Number(
            value=value, kind="measured", source=f"{about}: {what} of {of.fitted} spans; error on others {of.error:.1%}"
        )

    if (experts := fits.get("experts")) is not None:
        flops = 2 * expert_weights * base.chip.tile_tokens.value
        if experts.line.each_us > 0:
            chip["gemm_efficiency"] = measured(flops / experts.line.each_us / peak, experts, "time of a tile")
        fixed = max(0.0, experts.line.fixed_us - launch_us)
        chip["layer_host_us"] = measured(fixed, experts, "time of experts without tiles")
    if (partition := fits.get("partition")) is not None:
        chip["partition_us"] = measured(max(0.0, partition.line.fixed_us - launch_us), partition, "median")
    if (attention := fits.get("attention")) is not None:
        if attention.line.each_us > 0:
            efficiency = 2 * token_weights / attention.line.each_us / peak
            chip["dense_efficiency"] = measured(efficiency, attention, "time of a row")
        memory = base.chip.memory_gb_per_s.value * base.chip.memory_efficiency.value * 1e3
        fixed = attention.line.fixed_us - token_weights * width / memory - launch_us
        chip["attention_host_us"] = measured(max(0.0, fixed), attention, "time of a layer without rows")
    if (copies := fits.get("copy")) is not None:
        moving_us = max(1e-3, copies.line.fixed_us - base.wires.copy_us.value)
        rate = base.expert_bytes() / moving_us / 1e3 / base.wires.link_gb_per_s.value
        wires["link_efficiency"] = measured(rate, copies, "the shortest tenth's time of a copy")
    if (gathers := fits.get("gather")) is not None:
        wires["collective_us"] = measured(
            max(0.0, gathers.line.fixed_us - launch_us), gathers, "the shortest tenth's time of a gather"
        )
    plans = dict(base.planner_us)
    if (plan := fits.get("plan")) is not None:
        plans[workers] = measured(plan.line.fixed_us, plan, "median")
    return replace(
        base,
        name=name,
        about=about,
        chip=replace(base.chip, **chip),
        wires=replace(base.wires, **wires),
        planner_us=dict(sorted(plans.items())),
    )


def to_yaml_fields(profile: HardwareProfile) -> dict[str, Any]:
    """The profile as its file has it."""

    def numbers(group: Any) -> dict[str, Any]:
        return {name: _entry(getattr(group, name)) for name in type(group).__dataclass_fields__}

    return {
        "name": profile.name,
        "about": profile.about,
        "shape": numbers(profile.shape),
        "chip": numbers(profile.chip),
        "wires": numbers(profile.wires),
        "planner_us": {workers: _entry(number) for workers, number in profile.planner_us.items()},
    }


def _entry(number: Number) -> dict[str, Any]:
    return {"value": float(f"{number.value:.6g}"), "kind": number.kind, "source": number.source}
