"""What a figure or table is: cells that it needs, or something to measure here, and rows read off their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from afore.scheduler.policies.registry import POLICIES
from afore.tools.evaluate.cell import Cell
from afore.workers.device.hardware import HardwareProfile

Results = Mapping[Cell, Mapping[str, Any]]

DATASETS: Mapping[str, str] = MappingProxyType(
    {"chat": "ShareGPT", "web": "FineWeb", "code": "CodeForces", "math": "GSM8K"}
)
SPEED: Mapping[str, str] = MappingProxyType(
    {"tokens/s": "tokens/s", "over static": "%", "P95 ITL": "ms", "ITL below static": "%"}
)
"""Columns and units of throughput and latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What figures are made for."""

    template: Cell
    """Shape, layers, steps and seed."""
    workloads: tuple[str, ...]
    profile: HardwareProfile
    quick: bool = False
    """Fewer points of what is varied."""
    sweep_layers: int | None = None
    """MoE layers where settings are many, or runs long; none: the template's."""

    def vary(self, **changes: Any) -> Cell:
        """The template with other values."""
        return vary(self.template, **changes)

    def sweep(self, **changes: Any) -> Cell:
        """The same, for one of many settings or a long run."""
        return self.vary(**({} if self.sweep_layers is None else {"layers": self.sweep_layers}), **changes)

    def few(self, all_of_them: Sequence[Any], some: Sequence[Any]) -> Sequence[Any]:
        """The points of something that is varied."""
        return some if self.quick else all_of_them


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a figure: ours, and the paper's where it gives one."""

    label: str
    ours: Mapping[str, float]
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure or table. Exactly one of ``cells`` and ``measure`` is given."""

    name: str
    title: str
    unit: Mapping[str, str]
    """Columns and their units, in order."""
    cells: Callable[[Setting], list[Cell]] | None = None
    """Runs in virtual time."""
    rows: Callable[[Setting, Results], list[Row]] | None = None
    """From the cells' results."""
    measure: Callable[[Setting], list[Row]] | None = None
    """Measured on this machine: it differs from machine to machine and run to run."""
    note: str = ""
    """What stands below the table."""


def available(policies: Sequence[str]) -> list[str]:
    """Those of them that this version has."""
    return [policy for policy in policies if policy in POLICIES]


def vary(cell: Cell, **changes: Any) -> Cell:
    """The cell with other values."""
    values = {one.name: getattr(cell, one.name) for one in fields(Cell)}
    return Cell(**{**values, **changes})


def scaled(setting: Setting, name: str, times: float, *, most: float = float("inf")) -> tuple[str, float]:
    """An override: a number of the profile so many times as large, ``most`` at most."""
    group, field_name = name.split(".")
    return name, min(most, getattr(getattr(setting.profile, group), field_name).value * times)


def speed(found: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """The columns of ``SPEED``, against a run of ``static``."""
    return {
        "tokens/s": found["tokens_per_s"],
        "over static": found["tokens_per_s"] / base["tokens_per_s"] - 1,
        "P95 ITL": found["itl_p95_ms"],
        "ITL below static": 1 - found["itl_p95_ms"] / base["itl_p95_ms"],
    }


def copies_of(found: Mapping[str, Any]) -> dict[str, float]:
    """How much was copied, and what of it showed."""
    copies = found["copies"]
    return {
        "copies a target": copies["copies"] / max(1, found["targets"]),
        "sent ahead": copies["ahead"] / max(1, found["targets"]),
        "exposed": copies["exposed_us"]["mean"] / 1e3,
        "sampled": float(copies["targets"]),
        "exposed targets": float(copies["exposed_targets"]),
        "of the first layer": float(copies["exposed_in_first_layer"]),
        "waited for earlier": float(copies["exposed_to_earlier"]),
    }


COPIES: Mapping[str, str] = MappingProxyType(
    {
        "copies a target": "",
        "sent ahead": "",
        "exposed": "ms",
        "sampled": "",
        "exposed targets": "",
        "of the first layer": "",
        "waited for earlier": "",
    }
)
"""Columns and units of ``copies_of``: copies of targets' own plans, and those sent ahead of any, a target; what the former's
targets waited in the mean; how many such targets there were, waited, and were of the first layer; and how many others waited, for
copies of an earlier plan or sent ahead."""
