"""A user's model as a profile's shape, and what it weighs on each kind of worker."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from afore.core.errors import ConfigError
from afore.models.config import ModelSpec
from afore.models.families import FAMILIES
from afore.workers.device.hardware import HardwareProfile, Number, Shape
from afore.workers.device.hardware_check import check_profile

_SHARED = ("n_shared_experts", "num_shared_experts")
WORKSPACE = 0.08
"""Part of a device's memory that runtime, activations and fragmentation take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """GB on one device of each kind."""

    attention: float
    ffn: float
    each: float
    """What a device has for them."""

    @property
    def fits(self) -> bool:
        """Whether both kinds have room."""
        return max(self.attention, self.ffn) <= self.each


def with_model(profile: HardwareProfile, config: Path) -> HardwareProfile:
    """The profile for another model. ``config``: its config.json, or the directory that holds it.

    Raises ``CheckpointError`` for a model that cannot be served, ``ConfigError`` naming the field for one that cannot be read.
    """
    if config.is_file() and config.name != "config.json":
        raise ConfigError(
            "--model", f"{config} is not named config.json", "give the model's config.json, or its directory"
        )
    directory = config.parent if config.is_file() else config
    # Only here: it imports transformers.
    from afore.models.config import read_spec

    spec = read_spec(directory)
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    _check_told(raw, spec.family, directory / "config.json")
    chosen = replace(profile, shape=shape_of(spec, raw, str(directory / "config.json")))
    check_profile(chosen, f"--model {directory}")
    return chosen


def _check_told(raw: dict[str, Any], model_type: str, file: Path) -> None:
    """Raises ``ConfigError`` for a size that the file leaves out: transformers would put that of another model in its place."""
    from transformers import CONFIG_MAPPING

    family = FAMILIES[model_type]
    # Other names that transformers takes for a field.
    names: dict[str, str] = CONFIG_MAPPING[model_type].attribute_map
    for field in ("num_hidden_layers", "hidden_size", "num_experts_per_tok", family.num_experts, family.expert_size):
        known = {field, names.get(field, field), *(other for other, meant in names.items() if meant == field)}
        if not known & raw.keys():
            raise ConfigError(
                "--model",
                f"{file} has no {field}",
                "put it there, or copy the file again from where the model was published",
            )


def shape_of(spec: ModelSpec, raw: dict[str, Any], source: str) -> Shape:
    """The spec's numbers. Raises ``ConfigError`` for a type whose bytes are unknown."""
    widths = {"bfloat16": 2, "float16": 2, "float32": 4}
    if spec.expert_dtype not in widths:
        raise ConfigError("--model: dtype", f"{spec.expert_dtype!r} is unknown", f"of {', '.join(widths)}")
    shared = 0.0
    if spec.has_shared_experts:
        numbers = [raw[name] for name in _SHARED if isinstance(raw.get(name), int)]
        whole = raw.get("shared_expert_intermediate_size")
        shared = float(numbers[0]) if numbers else whole / spec.expert_size if isinstance(whole, int) else 1.0
    (kv_heads, key_dim), _ = spec.kv_parts

    def given(value: float) -> Number:
        return Number(value=float(value), kind="given", source=source)

    return Shape(
        layers=given(spec.num_layers),
        dense_layers=given(spec.num_layers - spec.num_moe_layers),
        hidden=given(spec.hidden_size),
        expert=given(spec.expert_size),
        experts=given(spec.num_experts),
        top_k=given(spec.experts_per_token),
        shared_experts=given(shared),
        heads=given(spec.num_heads),
        kv_heads=given(kv_heads),
        head_dim=given(key_dim),
        vocabulary=given(spec.vocab_size),
        weight_bytes=given(widths[spec.expert_dtype]),
    )


def memory_of(
    profile: HardwareProfile, *, ffn: int, slots: int, rows: int, microbatches: int, context_tokens: float
) -> Memory:
    """What each kind of device holds: experts and redundant slots; or the rest of the model and every request's cache."""
    shape = profile.shape
    width, hidden = shape.weight_bytes.value, shape.hidden.value
    moe = shape.layers.value - shape.dense_layers.value
    experts = moe * (-(-shape.experts.value // ffn) + slots) * profile.expert_bytes()
    kv_row = shape.kv_heads.value * shape.head_dim.value
    attention = 2 * hidden * (shape.heads.value * shape.head_dim.value + kv_row)
    shared = 3 * hidden * shape.expert.value * shape.shared_experts.value
    # A dense layer is as wide as the experts that a token passes elsewhere, nearly: configurations do not say it alike.
    dense = 3 * hidden * shape.expert.value * shape.top_k.value
    weights = shape.layers.value * attention + moe * shared + shape.dense_layers.value * dense
    weights += 2 * shape.vocabulary.value * hidden
    cache = rows * microbatches * context_tokens * shape.layers.value * 2 * kv_row
    return Memory(
        attention=width * (weights + cache) / 1e9,
        ffn=experts / 1e9,
        each=profile.chip.memory_gb.value * (1 - WORKSPACE),
    )
