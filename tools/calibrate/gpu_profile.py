"""What was measured of a GPU as a hardware profile, in the schema of all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from afore.core.errors import ConfigError
from afore.workers.device.hardware import HardwareProfile, Number


def profile_of_gpu(found: Mapping[str, Any], base: HardwareProfile, *, name: str) -> HardwareProfile:
    """``base`` with what ``calibrate.gpu`` found in its place: M_tile, tiles, memory, copies and launches.

    The M_tile with the most rows a second is taken. One GPU shows no links: those stay the base's. Raises ``ConfigError`` where
    nothing was measured that a profile could hold.
    """
    machine = f"{found.get('machine', 'this GPU')}, {found.get('date', 'undated')}, torch {found.get('torch', '?')}"
    tiles = [one for one in found["tiles"] if one["tile_us"] > 0]
    if not tiles:
        raise ConfigError("calibrate", "no tile's time grew with their number", "measure with more --repeats")
    best = max(tiles, key=lambda one: (one["tile_tokens"] / one["tile_us"], -one["tile_tokens"]))

    def measured(value: float, what: str) -> Number:
        return Number(value=value, kind="measured", source=f"{what}; {machine}")

    weights = 3 * base.shape.hidden.value * base.shape.expert.value
    flops = 2 * weights * best["tile_tokens"] / (best["tile_us"] * 1e6)
    copy, host = found["copy"], found["host"]
    chip = replace(
        base.chip,
        tile_tokens=measured(best["tile_tokens"], "the M_tile of most rows a second"),
        gemm_efficiency=measured(flops / base.chip.tflops.value, f"time of a tile, kernel {best['kernel']}"),
        layer_host_us=measured(max(0.0, best["experts_us"]), "experts without tiles"),
        launch_us=measured(host["enqueue_experts_us"], "enqueuing a target's experts"),
    )
    if copy["copy_gb_per_s"] > 0:
        part = min(1.0, 2 * copy["copy_gb_per_s"] / base.chip.memory_gb_per_s.value)
        chip = replace(chip, memory_efficiency=measured(part, "copying experts within the GPU, read and written"))
    return replace(
        base,
        name=name,
        about=f"{base.about.split(' by public')[0]}, measured on {machine}",
        chip=chip,
        wires=replace(base.wires, copy_us=measured(copy["copy_latency_us"], "copies of experts, before their bytes")),
    )
