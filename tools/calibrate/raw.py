"""What ``calibrate --gpu`` measured, read back from its JSON and refused by field where it is not that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afore.core.errors import ConfigError
from afore.tools.bench.files import read_kept
from afore.workers.device.hardware import HardwareProfile

MOST = 1e15
"""Of a number: no time in microseconds, no size comes near it, and reckoning with it stays finite."""
REMEDY = "give what `calibrate --gpu --raw` wrote, or the gpu_check.json of tools/gpu_check.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTile:
    """One M_tile by one kernel; see ``gpu_measure.tile_times``."""

    tile_tokens: float
    kernel: str
    tile_us: float
    tile_fit_error: float
    row_us: float
    experts_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """The parts that a profile is made of."""

    where: str
    """Machine, date and versions in a line."""
    memory_gb: float
    hidden_size: float
    expert_size: float
    dtype: str
    tiles: tuple[RawTile, ...]
    partition_us: float
    partition_kernel: str
    copy_latency_us: float
    launch_us: float

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Raw:
        """Raises ``ConfigError`` that names the field."""
        versions = _mapping(found, "versions")
        experts, copy, host = _mapping(found, "experts"), _mapping(found, "copy"), _mapping(found, "host")
        partition, tiles = _mapping(found, "partition"), found.get("tiles")
        if not isinstance(tiles, list) or not tiles:
            raise ConfigError("raw.tiles", f"{tiles!r} is no list of measured tiles", REMEDY)
        said = ", ".join(f"{name} {_text(versions, name, 'versions')}" for name in versions)
        return cls(
            where=f"{_text(found, 'machine')}, {_text(found, 'date')}, {said}",
            memory_gb=_number(_mapping(found, "gpu"), "memory_gb", "gpu"),
            hidden_size=_number(experts, "hidden_size", "experts"),
            expert_size=_number(experts, "expert_size", "experts"),
            dtype=_text(experts, "dtype", "experts"),
            tiles=tuple(_tile(one, f"tiles.{index}") for index, one in enumerate(tiles)),
            partition_us=_number(partition, "partition_us", "partition"),
            partition_kernel=_text(partition, "kernel", "partition"),
            copy_latency_us=_number(copy, "copy_latency_us", "copy"),
            launch_us=_number(host, "enqueue_experts_us", "host"),
        )

    def check_experts(self, base: HardwareProfile) -> None:
        """Refuses what was measured with other experts than the profile is for. Raises ``ConfigError``."""
        width = {"float32": 4, "bfloat16": 2, "float16": 2}.get(self.dtype)
        mine = (self.hidden_size, self.expert_size, width)
        theirs = (base.shape.hidden.value, base.shape.expert.value, base.shape.weight_bytes.value)
        if mine != theirs:
            raise ConfigError(
                "raw.experts",
                f"D, I and bytes of a weight are {mine}, those of the profile {base.name} {theirs}",
                "give a --base of the same model",
            )


def read_raw(path: str) -> Mapping[str, Any]:
    """What was measured, out of its own file or a GPU check's report. Raises ``ConfigError``."""
    try:
        content = json.loads(read_kept(Path(path)).decode("utf-8"))
    except OSError as error:
        raise ConfigError("--from-raw", f"{path} cannot be read: {error.strerror}", REMEDY) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("--from-raw", f"{path} is no JSON: {error}", REMEDY) from error
    if isinstance(content, dict) and "parts" in content:
        part = content["parts"].get("calibration") if isinstance(content["parts"], dict) else None
        if not isinstance(part, dict) or not isinstance(part.get("result"), dict):
            raise ConfigError("--from-raw", f"{path} is a GPU check whose calibration did not pass", REMEDY)
        content = part["result"]
    if not isinstance(content, dict):
        raise ConfigError("--from-raw", f"{path} holds no mapping", REMEDY)
    return content


def _tile(raw: Any, where: str) -> RawTile:
    if not isinstance(raw, dict):
        raise ConfigError(f"raw.{where}", f"{raw!r} is no mapping", REMEDY)
    tokens = _number(raw, "tile_tokens", where)
    if tokens < 1 or tokens != int(tokens):
        raise ConfigError(f"raw.{where}.tile_tokens", f"{tokens!r} is no number of pairs", REMEDY)
    return RawTile(
        tile_tokens=tokens,
        kernel=_text(raw, "kernel", where),
        tile_us=_number(raw, "tile_us", where, negative=True),
        tile_fit_error=_number(raw, "tile_fit_error", where),
        row_us=_number(raw, "row_us", where, negative=True),
        experts_us=_number(raw, "experts_us", where),
    )


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"raw.{name}", f"{value!r} is no mapping", REMEDY)
    return value


def _text(raw: Mapping[str, Any], name: str, where: str = "") -> str:
    value = raw.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"raw.{where}{'.' if where else ''}{name}", f"{value!r} is no text", REMEDY)
    return value


def _number(raw: Mapping[str, Any], name: str, where: str, *, negative: bool = False) -> float:
    """``negative``: a slope that noise has turned round, which its reader leaves out."""
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
        raise ConfigError(f"raw.{where}.{name}", f"{_short(value)} is no finite number up to {MOST:g}", REMEDY)
    if value < 0 and not negative:
        raise ConfigError(f"raw.{where}.{name}", f"{value!r} is less than 0", REMEDY)
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
