"""Whether a profile's numbers can be those of a machine and a model: each by its name, before anything is computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from afore.core.errors import ConfigError
from afore.core.topology import MAX_LAYERS

if TYPE_CHECKING:
    from afore.workers.device.hardware import HardwareProfile

MOST_EXPERTS: Final = 1 << 14
"""As recorded and published routing has them at most."""
MOST: Final = 1e12
"""Of any number: a µs of it is eleven days, a GB/s more than all memory there is. Products of a few stay finite."""
LEAST_RATE: Final = 1e-9
"""Of what others are divided by."""
MOST_COST_US: Final = 600e6
"""Of one piece of work: a virtual run waits an hour for a step at most."""

_WHOLE: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "shape.layers": (1, MAX_LAYERS),
        "shape.dense_layers": (0, MAX_LAYERS),
        "shape.hidden": (1, 1 << 24),
        "shape.expert": (1, 1 << 24),
        "shape.experts": (1, MOST_EXPERTS),
        "shape.top_k": (1, MOST_EXPERTS),
        "shape.heads": (1, 1 << 16),
        "shape.kv_heads": (1, 1 << 16),
        "shape.head_dim": (1, 1 << 16),
        "shape.vocabulary": (1, 1 << 30),
        "chip.tile_tokens": (1, 1 << 20),
    }
)
"""What is counted: (least, most)."""
_RATES: Final = (
    "shape.weight_bytes",
    "chip.memory_gb_per_s",
    "chip.memory_efficiency",
    "chip.tflops",
    "chip.gemm_efficiency",
    "chip.dense_efficiency",
    "wires.link_gb_per_s",
    "wires.link_efficiency",
)


def check_profile(profile: HardwareProfile, where: str) -> None:
    """Raises ``ConfigError`` that names the number. ``where``: the file, or the option that gave it."""
    values = _values(profile)
    for name, value in values.items():
        if not 0 <= value <= MOST:
            raise ConfigError(f"{where}: {name}", f"{value:g} is none of 0 to {MOST:g}")
    for name, (least, most) in _WHOLE.items():
        value = values[name]
        if not (value == int(value) and least <= value <= most):
            raise ConfigError(f"{where}: {name}", f"{value:g} is no whole number from {least} to {most}")
    for name in _RATES:
        if values[name] < LEAST_RATE:
            raise ConfigError(f"{where}: {name}", f"{values[name]:g}: nothing would ever end", "give more")
    if values["shape.top_k"] > values["shape.experts"]:
        K, E = values["shape.top_k"], values["shape.experts"]
        raise ConfigError(f"{where}: shape.top_k", f"a token passes {K:g} of {E:g} experts", "give as many at most")
    if values["shape.dense_layers"] >= values["shape.layers"]:
        dense, layers = values["shape.dense_layers"], values["shape.layers"]
        raise ConfigError(
            f"{where}: shape.dense_layers", f"{dense:g} of {layers:g} layers: none has experts", "give fewer"
        )
    _check_costs(profile, where)


def _check_costs(profile: HardwareProfile, where: str) -> None:
    """What follows from the numbers: none may be out of all measure by itself, and a piece of work still take years."""
    costs = profile.costs(workers=2)
    copy_us, rows_us = costs.copy_ns(0) / 1e3, profile.wire_us(1)
    pieces = {
        "a tile": costs.tile_us,
        "an expert's weights": costs.expert_us,
        "a target's experts": costs.experts_us,
        "partitioning": costs.partition_us,
        "attention": costs.attention_us + costs.attention_token_us,
        "sampling": costs.sample_us + costs.sample_token_us,
        "a prompt's chunk": costs.prefill_us + costs.prefill_token_us,
        "a copy": copy_us,
        "a message": rows_us,
        "a collective": costs.gather_us,
        "a launch": costs.launch_us,
        "a plan": max(number.value for number in profile.planner_us.values()),
    }
    for what, cost_us in pieces.items():
        if not cost_us <= MOST_COST_US:
            raise ConfigError(
                where,
                f"{what} takes {cost_us / 1e6:,.0f} s",
                f"give numbers with which it ends within {MOST_COST_US / 1e6:.0f} s",
            )


def _values(profile: HardwareProfile) -> dict[str, float]:
    values = {
        f"{group}.{name}": getattr(part, name).value
        for group, part in (("shape", profile.shape), ("chip", profile.chip), ("wires", profile.wires))
        for name in type(part).__dataclass_fields__
    }
    return values | {f"planner_us.{workers}": number.value for workers, number in profile.planner_us.items()}
