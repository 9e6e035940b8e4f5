"""The profile of an evaluation: by name, from a file, or measured here; with single numbers replaced; and named by its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from afore.core.errors import ConfigError
from afore.tools.bench.files import check_place, write_whole
from afore.tools.calibrate.fit import to_yaml_fields
from afore.workers.device.hardware import HardwareProfile, Number, profile_names, read_profile
from afore.workers.device.hardware_check import check_profile

CPU = "cpu"
Override = tuple[str, float]
"""(dotted name, value): ``("chip.gemm_efficiency", 0.7)``."""
Profiles = HardwareProfile | Mapping[str, HardwareProfile] | None
"""One that every name stands for, or some by name; other names are read."""
_GROUPS = ("shape", "chip", "wires")


def open_profile(name_or_path: str, directory: Path, say: Callable[[str], None]) -> HardwareProfile:
    """The named profile. ``cpu``, where no package has one, is measured and kept in ``directory``, and ``say`` hears of it.

    Raises ``ConfigError``; ``HostError``, also for what is in the way of its file.
    """
    if name_or_path != CPU or CPU in profile_names():
        return read_profile(name_or_path)
    path = directory / f"{CPU}.yaml"
    check_place(path)
    if path.is_file():
        say(f"profile {CPU}: {path}, measured before; remove it to measure again")
        return read_profile(str(path))
    # Only here: it brings torch and the model's kernels.
    from afore.models.bundle import bundled_model_path
    from afore.tools.calibrate.measure import measure_cpu

    say("profile cpu: none is there, so this CPU is measured with the bundled model: about half a minute")
    profile = measure_cpu(Path(bundled_model_path()))
    text = yaml.safe_dump(to_yaml_fields(profile), sort_keys=False, allow_unicode=True, width=120)
    write_whole(str(path), text.encode())
    return read_profile(str(path))


def profiles_of(names: Iterable[str], given: Profiles) -> dict[str, HardwareProfile]:
    """What each name stands for: what is given for it, or else the package's or a file's. Raises ``ConfigError``."""
    found: dict[str, HardwareProfile] = {}
    for name in names:
        if name not in found:
            known = given if isinstance(given, HardwareProfile) else (given or {}).get(name)
            found[name] = known or read_profile(name)
    return found


def parse_override(text: str) -> Override:
    """``chip.gemm_efficiency=0.7``. Raises ``ConfigError`` for what is no number's name and value."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError as error:
        raise ConfigError("--set", f"{text!r} has no number after =", "such as chip.gemm_efficiency=0.7") from error


def with_overrides(profile: HardwareProfile, overrides: Sequence[Override]) -> HardwareProfile:
    """The profile with those numbers replaced, each marked *inferred*. Raises ``ConfigError`` for a name that it does not have."""
    for name, value in overrides:
        group, _, field = name.partition(".")
        part = getattr(profile, group, None) if group in _GROUPS else None
        if part is None or field not in type(part).__dataclass_fields__:
            known = [f"{one}.{f}" for one in _GROUPS for f in type(getattr(profile, one)).__dataclass_fields__]
            raise ConfigError("--set", f"no profile has {name!r}", f"of {', '.join(known)}")
        if not 0 <= value < float("inf"):
            raise ConfigError("--set", f"{name}={value} is no finite number, 0 or more")
        was = getattr(part, field)
        number = Number(value=value, kind="inferred", source=f"set for this evaluation, in place of {was.value:g}")
        profile = replace(profile, **{group: replace(part, **{field: number})})
    if overrides:
        check_profile(profile, "--set")
    return profile


def cut_to(profile: HardwareProfile, moe_layers: int) -> HardwareProfile:
    """The profile for a model of so many MoE layers: head and dense layers shrink with them, or a short one would be all sampling.

    Raises ``ConfigError`` for more than the model has.
    """
    shape = profile.shape
    whole = int(shape.layers.value - shape.dense_layers.value)
    if moe_layers > whole:
        raise ConfigError("--layers", f"{moe_layers} MoE layers; the profile's model has {whole}", "give fewer")
    if moe_layers in (0, whole):
        return profile
    source = f"the model's, cut to {moe_layers} MoE layers"
    dense = round(shape.dense_layers.value * moe_layers / whole)
    numbers = {
        "dense_layers": float(dense),
        "layers": float(moe_layers + dense),
        "vocabulary": float(round(shape.vocabulary.value * moe_layers / whole)),
    }
    short = {name: Number(value=value, kind="inferred", source=source) for name, value in numbers.items()}
    return replace(profile, shape=replace(shape, **short))


def profile_digest(profile: HardwareProfile) -> str:
    """Of all its numbers' values: two profiles of one digest cost the same. Words do not enter."""
    values = {
        group: {name: getattr(getattr(profile, group), name).value for name in _fields(profile, group)}
        for group in _GROUPS
    }
    plans = {str(workers): number.value for workers, number in sorted(profile.planner_us.items())}
    return hashlib.sha256(json.dumps([values, plans], sort_keys=True).encode()).hexdigest()[:16]


def _fields(profile: HardwareProfile, group: str) -> list[str]:
    return sorted(type(getattr(profile, group)).__dataclass_fields__)
