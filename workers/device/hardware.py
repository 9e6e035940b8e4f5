"""Hardware profiles: what a kind of GPU or host can do, from YAML; costs of work are computed from it for a model's shape.

Every number is ``{value, kind, source}``. ``kind`` says how far it may be trusted: *given* (published, by the paper or a maker),
*inferred* (from given ones, the reasoning in ``source``) or *measured* (on a machine, by ``tools.calibrate``). A profile has
bandwidths, latencies and efficiencies only. What a copy takes (D), the window that it has (W) and what is exposed (O) are what a
run shows, never what goes in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from afore.core.errors import ConfigError
from afore.workers.device.hardware_check import check_profile
from afore.workers.device.profile import CostProfile

Kind = Literal["given", "inferred", "measured"]
MOST_BYTES = 1 << 20
"""Of a profile's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number of a profile, and why it is believed."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model that a profile's costs are for."""

    layers: Number
    """All decoder layers."""
    dense_layers: Number
    """Those of them, the first ones, that have no experts."""
    hidden: Number
    """D."""
    expert: Number
    """I, of one routed expert."""
    experts: Number
    """E."""
    top_k: Number
    """K."""
    shared_experts: Number
    """Experts that every token passes on its attention worker, of size I each."""
    heads: Number
    """Query heads."""
    kv_heads: Number
    """Key and value heads."""
    head_dim: Number
    """Numbers of a head."""
    vocabulary: Number
    """Tokens."""
    weight_bytes: Number
    """Bytes of one weight, activation or cached number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device and the software that drives it."""

    memory_gb: Number
    """Memory of one device, in 10^9 bytes."""
    memory_gb_per_s: Number
    """Peak memory bandwidth."""
    memory_efficiency: Number
    """Part of it that kernels reach."""
    tflops: Number
    """Peak of dense matrix products in the model's type."""
    gemm_efficiency: Number
    """Part of it that the grouped GEMM of experts reaches on full tiles."""
    dense_efficiency: Number
    """Part of it that attention's products reach."""
    tile_tokens: Number
    """M_tile of the grouped GEMM."""
    launch_us: Number
    """Host and driver, for each piece of work."""
    layer_host_us: Number
    """Host and small kernels of one MoE target on an FFN worker, whatever its rows: what no piece of work below accounts for."""
    attention_host_us: Number
    """The same of one layer on an attention worker."""
    partition_us: Number
    """Exact partitioning of a target (eq. 11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """What lies between devices."""

    link_gb_per_s: Number
    """Peak of one device's port, each way."""
    link_efficiency: Number
    """Part of it that large transfers reach."""
    message_us: Number
    """Latency of a small message between any two roles."""
    collective_us: Number
    """Latency of a collective over all FFN workers."""
    copy_us: Number
    """Latency of copying one expert, before its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A kind of device, its wires, and the model that runs on it."""

    name: str
    about: str
    shape: Shape
    chip: Chip
    wires: Wires
    planner_us: dict[int, Number]
    """Time of one plan, by FFN workers (N)."""

    def plan_us(self, workers: int) -> float:
        """Time of one plan for N workers: between two given N in proportion, beyond them as the nearest."""
        known = sorted(self.planner_us)
        below = max((n for n in known if n <= workers), default=known[0])
        above = min((n for n in known if n >= workers), default=known[-1])
        low, high = self.planner_us[below].value, self.planner_us[above].value
        return low if above == below else low + (high - low) * (workers - below) / (above - below)

    def expert_bytes(self) -> float:
        """Bytes of one expert's weights."""
        return 3 * self.shape.hidden.value * self.shape.expert.value * self.shape.weight_bytes.value

    def wire_us(self, tokens: float) -> float:
        """What the rows of ``tokens`` tokens take between an attention worker and the FFN workers, or back."""
        nbytes = tokens * self.shape.hidden.value * self.shape.weight_bytes.value
        return self.wires.message_us.value + nbytes / (self._link() * 1e3)

    def costs(self, *, workers: int, redistribute_us: float = 0.0) -> CostProfile:
        """Costs of work on one device where N FFN workers share the experts."""
        shape, chip = self.shape, self.chip
        hidden, width = shape.hidden.value, shape.weight_bytes.value
        heads, kv_heads = shape.heads.value * shape.head_dim.value, shape.kv_heads.value * shape.head_dim.value
        attention_weights = hidden * (2 * heads + 2 * kv_heads)
        shared_weights = 3 * hidden * shape.expert.value * shape.shared_experts.value
        token_weights = attention_weights + shared_weights
        expert_weights = 3 * hidden * shape.expert.value
        memory = chip.memory_gb_per_s.value * chip.memory_efficiency.value * 1e3
        dense = chip.tflops.value * chip.dense_efficiency.value * 1e6
        grouped = chip.tflops.value * chip.gemm_efficiency.value * 1e6
        all_layers = shape.layers.value * (token_weights + shape.top_k.value * expert_weights)
        row_bytes = hidden * width * (workers - 1) / workers
        return CostProfile(
            name=self.name,
            source=f"computed from the profile {self.name}: {self.about}",
            launch_us=chip.launch_us.value,
            tile_tokens=int(chip.tile_tokens.value),
            tile_us=2 * expert_weights * chip.tile_tokens.value / grouped,
            expert_us=expert_weights * width / memory,
            experts_us=chip.layer_host_us.value,
            partition_us=chip.partition_us.value,
            partition_pair_ns=0.0,
            gate_us=0.0,
            attention_us=chip.attention_host_us.value + token_weights * width / memory,
            attention_token_us=2 * token_weights / dense,
            attention_context_ns=2 * kv_heads * width / memory * 1e3,
            gather_us=self.wires.collective_us.value,
            gather_gb_per_s=self._link(),
            gather_token_bytes=row_bytes,
            reduce_us=self.wires.collective_us.value,
            reduce_gb_per_s=self._link(),
            reduce_token_bytes=row_bytes,
            copy_latency_us=self.wires.copy_us.value,
            copy_gb_per_s=self._link(),
            expert_bytes=self.expert_bytes(),
            planner_us=self.plan_us(workers),
            sample_us=hidden * shape.vocabulary.value * width / memory,
            sample_token_us=2 * hidden * shape.vocabulary.value / dense,
            prefill_us=shape.layers.value * chip.attention_host_us.value,
            prefill_token_us=2 * all_layers / dense,
            prefill_context_ns=shape.layers.value * 4 * heads / dense * 1e3,
            redistribute_us=redistribute_us,
        )

    def _link(self) -> float:
        return self.wires.link_gb_per_s.value * self.wires.link_efficiency.value


def profile_names() -> tuple[str, ...]:
    """The profiles that come with the package."""
    folder = resources.files("afore.workers.device") / "data"
    return tuple(sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def profile_text(name_or_path: str) -> str:
    """The YAML of a profile of the package, or of a file. Raises ``ConfigError``."""
    if name_or_path in profile_names():
        return (resources.files("afore.workers.device") / "data" / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    if Path(name_or_path).suffix not in (".yaml", ".yml"):
        raise ConfigError(
            "profile", f"there is no {name_or_path!r}", f"profiles are {', '.join(profile_names())}, or give FILE.yaml"
        )
    path = Path(name_or_path)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError("profile", f"{name_or_path} is no file", "name a file: a pipe or a device may never end")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise ConfigError("profile", f"{name_or_path!r} cannot be read: {error}", "name a profile's file") from error
    if len(content) > MOST_BYTES:
        raise ConfigError("profile", f"{name_or_path} has more than {MOST_BYTES >> 20} MiB", "name a profile's file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError("profile", f"{name_or_path} is no text in UTF-8", "name a profile's file") from error


class _OnceLoader(yaml.SafeLoader):
    """Of YAML's safe types, and no key twice: the second would silently be taken."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands there twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_profile(name_or_path: str) -> HardwareProfile:
    """A profile of the package by name, or one of a file. Raises ``ConfigError`` that names what is missing or wrong."""
    text = profile_text(name_or_path)
    try:
        raw = yaml.load(text, _OnceLoader)  # a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that is none
        reason = next(iter(str(error).splitlines()), "nested too deeply")
        raise ConfigError("profile", f"{name_or_path} is no YAML of a profile: {reason[:200]}") from error
    return parse_profile(raw, name_or_path)


def parse_profile(raw: Any, where: str) -> HardwareProfile:
    """The profile of a parsed file. Raises ``ConfigError``."""
    groups: dict[str, Any] = {"shape": Shape, "chip": Chip, "wires": Wires}
    tops = _mapping(raw, where, {"name", "about", "planner_us", *groups})
    texts = [_text(tops[field]) for field in ("name", "about")]
    if not all(texts):
        raise ConfigError(
            f"profile {where}", "name and about are texts of printable letters", "say what it is in a sentence"
        )
    parts = {}
    for group, cls in groups.items():
        names = {field.name for field in fields(cls)}
        numbers = _mapping(tops[group], f"{where}: {group}", names)
        parts[group] = cls(**{name: _number(numbers[name], f"{where}: {group}.{name}") for name in names})
    plans = tops["planner_us"]
    if not isinstance(plans, dict) or not plans or not all(type(n) is int and n >= 1 for n in plans):
        raise ConfigError(f"profile {where}: planner_us", "it maps numbers of FFN workers to times", "such as {8: …}")
    planner_us = {n: _number(plans[n], f"{where}: planner_us.{n}") for n in sorted(plans)}
    profile = HardwareProfile(name=texts[0], about=texts[1], planner_us=planner_us, **parts)
    check_profile(profile, f"profile {where}")
    return profile


def _mapping(raw: Any, where: str, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"profile {where}", "it is no mapping", f"give {', '.join(sorted(names))}")
    missing, unknown = sorted(names - raw.keys()), sorted(map(str, raw.keys() - names))
    if missing or unknown:
        some = ", ".join(name[:40] for name in unknown[:5]) + ("…" if len(unknown) > 5 else "")
        problem = f"lacks {', '.join(missing)}" if missing else f"has {some}, which no profile has"
        raise ConfigError(f"profile {where}", problem)
    return raw


def _number(raw: Any, where: str) -> Number:
    entry = _mapping(raw, where, {"value", "kind", "source"})
    value, source = _float(entry["value"]), _text(entry["source"])
    if value is None:
        raise ConfigError(f"profile {where}", f"{_shown(entry['value'])} is no finite number, 0 or more")
    if entry["kind"] not in get_args(Kind) or not source:
        raise ConfigError(
            f"profile {where}", "each number says its kind and source", f"kinds: {', '.join(get_args(Kind))}"
        )
    return Number(value=value, kind=entry["kind"], source=source)


def _float(value: Any) -> float | None:
    """A finite number, 0 or more; else none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _text(value: Any) -> str:
    """On one line, as pages and terminals show it; empty for what is no text that they could."""
    text = " ".join(value.split()) if isinstance(value, str) else ""
    return text if text.isprintable() else ""


def _shown(value: Any) -> str:
    """A wrong value for a message: what has parts is named by its type, for aliases make a few bytes endless."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a whole number of many digits"
    return repr(value)[:60] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
