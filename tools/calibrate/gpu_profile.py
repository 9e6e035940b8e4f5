"""What was measured of a GPU as a hardware profile, in the schema of all others.

Every number that was measured says so, with the machine, the versions and the date. One GPU shows no links and this measures no
attention: those numbers stay the base profile's, of its kind, and say whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import yaml

from afore.core.errors import ConfigError
from afore.tools.calibrate.fit import to_yaml_fields
from afore.tools.calibrate.raw import Raw
from afore.workers.device.hardware import HardwareProfile, Number

GPU_BASE = "h200"
"""What is not measured, where no other base is given."""


def profile_of_gpu(found: Mapping[str, Any], base: HardwareProfile, *, name: str) -> HardwareProfile:
    """``base`` with what ``calibrate.gpu`` found in its place: memory, M_tile, tiles, experts, partition, copies and launches.

    The M_tile with the most rows a second is taken. Raises ``ConfigError`` where fields of ``found`` are missing or wrong, where
    it is of experts of another size than the base's, or nothing was measured that a profile could hold.
    """
    raw = Raw.parse(found)
    raw.check_experts(base)
    tiles = [one for one in raw.tiles if one.tile_us > 0]
    if not tiles:
        raise ConfigError("calibrate", "no tile's time grew with their number", "measure with more --repeats")
    best = max(tiles, key=lambda one: (one.tile_tokens / one.tile_us, -one.tile_tokens))

    def measured(value: float, what: str) -> Number:
        return Number(value=value, kind="measured", source=f"{what}; {raw.where}")

    def kept(numbers: Any) -> dict[str, Number]:
        """Those of the base, which say so: this machine may be of another kind."""
        found: dict[str, Number] = {field.name: getattr(numbers, field.name) for field in fields(numbers)}
        return {key: replace(one, source=f"kept from profile {base.name}: {one.source}") for key, one in found.items()}

    weights = 3 * base.shape.hidden.value * base.shape.expert.value
    flops = 2 * weights * best.tile_tokens / (best.tile_us * 1e6)
    chip = replace(
        base.chip,
        **kept(base.chip)
        | {
            "memory_gb": measured(raw.memory_gb, "as the driver says"),
            "tile_tokens": measured(best.tile_tokens, "the M_tile of most rows a second"),
            "gemm_efficiency": measured(
                flops / base.chip.tflops.value,
                f"time of a tile, kernel {best.kernel}, as a part of the peak above; the line through tiles is off by "
                f"{best.tile_fit_error:.1%} at most",
            ),
            "layer_host_us": measured(best.experts_us, "experts without rows"),
            "launch_us": measured(raw.launch_us, "enqueuing a target's experts"),
            "partition_us": measured(raw.partition_us, f"exact share of a target, kernel {raw.partition_kernel}"),
        },
    )
    reading = [one for one in raw.tiles if one.row_us > 0]
    if reading:
        least = min(reading, key=lambda one: one.row_us)
        part = base.expert_bytes() / (least.row_us * 1e3) / base.chip.memory_gb_per_s.value
        what = (
            f"one more expert with one tile of {least.tile_tokens}, kernel {least.kernel}, as a part of the peak above"
        )
        chip = replace(chip, memory_efficiency=measured(part, what))
    wires = replace(
        base.wires,
        **kept(base.wires)
        | {"copy_us": measured(raw.copy_latency_us, "copies of experts within the GPU, before their bytes")},
    )
    return replace(
        base,
        name=name,
        about=f"experts of {base.shape.experts.value:.0f}, D={base.shape.hidden.value:.0f}, I={base.shape.expert.value:.0f}, "
        f"measured on {raw.where}; links, attention and what else one GPU does not show are the profile {base.name}'s",
        chip=chip,
        wires=wires,
        planner_us={
            workers: replace(one, source=f"kept from profile {base.name}: {one.source}")
            for workers, one in base.planner_us.items()
        },
    )


def yaml_of(profile: HardwareProfile) -> str:
    """The text of a profile's file."""
    return yaml.safe_dump(to_yaml_fields(profile), sort_keys=False, allow_unicode=True, width=120)
