"""What a run did in the time that is measured: between two looks at statistics that count from its beginning, and throughput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
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


def tokens_per_s(times_ns: Sequence[Sequence[int]], first: int, last: int) -> float:
    """Throughput while each request decodes its tokens after ``first``, up to ``last``: the time that is common to all of them.

    A token counts for the part of the time since the one before it that lies within: whole tokens would count parts of steps at
    both ends, as many as happen to lie there.
    """
    begin_ns = max(times[first] for times in times_ns)
    end_ns = min(times[last] for times in times_ns)
    if end_ns <= begin_ns:  # steps so far apart have no time in common: what each has to itself
        return sum((last - first) / (times[last] - times[first]) for times in times_ns) * 1e9
    within = 0.0
    for shared, seats in Counter(tuple(times[first : last + 1]) for times in times_ns).items():
        for earlier, after in pairwise(shared):
            within += seats * max(0, min(after, end_ns) - max(earlier, begin_ns)) / (after - earlier)
    return within / (end_ns - begin_ns) * 1e9


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
