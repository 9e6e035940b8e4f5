"""What a run did between two looks at its scheduler's statistics, which count from its beginning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_RATIOS = (("token", "before"), ("token", "after"), ("tile", "before"), ("tile", "after"), ("tile", "bound"))
_DIGITS = 9
"""Differences of sums have no more that can be relied on."""


def between(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> dict[str, Any]:
    """``imbalance``, ``layers_imbalance``, ``counters`` and ``targets`` of the time between. ``before``: none, from the beginning.

    Means are those over the targets between; None where there were none.
    """
    earlier: Sequence[Mapping[str, Any] | None] = before["layers"] if before else [None] * len(after["layers"])
    layers = [_less(layer, known) for layer, known in zip(after["layers"], earlier, strict=True)]
    known_counts = before["counters"] if before else {}
    counters = {name: count - known_counts.get(name, 0) for name, count in after["counters"].items()}
    return {
        "imbalance": _mean(layers),
        "layers_imbalance": layers,
        "counters": counters,
        "targets": counters.get("targets", 0),
    }


def _sum(layer: Mapping[str, Any] | None, kind: str, name: str) -> float:
    return layer[kind][name] * layer["targets"] if layer and layer["targets"] else 0.0


def _less(after: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """A layer's means over what came since ``before``."""
    targets = after["targets"] - (before["targets"] if before else 0)
    found: dict[str, Any] = {"layer": after["layer"], "targets": targets, "token": {}, "tile": {}}
    for kind, name in _RATIOS:
        total = _sum(after, kind, name) - _sum(before, kind, name)
        found[kind][name] = round(total / targets, _DIGITS) if targets else None
    return found


def _mean(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all targets of all layers."""
    targets = sum(layer["targets"] for layer in layers)
    found: dict[str, Any] = {"token": {}, "tile": {}}
    for kind, name in _RATIOS:
        total = sum(_sum(layer, kind, name) for layer in layers)
        found[kind][name] = round(total / targets, _DIGITS) if targets else None
    return found
