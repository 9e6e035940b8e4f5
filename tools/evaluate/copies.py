"""What Figure 11 is made of: of every target with copies, their time D, their window W, and what was left of it or exposed.

Copies of a target's own plan are told from those that were sent ahead, by entries of their own, and a target's waits for its own
from waits for what an earlier plan or such an entry is still filling.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from afore.core.clock import Clock
from afore.core.target import Target
from afore.core.topology import FFN
from afore.core.trace import SpanName, Tracer, split_member

SKETCH = 21
"""Points of a distribution that are kept: every 5 %."""


class CopySamples:
    """Collects the copies of all FFN workers of a run."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._landed: dict[tuple[int, int, int, int], tuple[int, int, int]] = {}
        """(worker, layer, slot, generation) → (submitted, begun, landed), in ns."""
        self._raw_us: dict[int, float] = defaultdict(float)
        self._d_us: dict[int, float] = defaultdict(float)
        self._w_us: dict[int, float] = {}
        self._left_us: dict[int, float] = {}
        self._exposed_us: dict[int, float] = defaultdict(float)
        self._copies: dict[int, int] = defaultdict(int)
        self._first_layer: set[int] = set()
        """Sequences of targets of the first MoE layer."""
        self._made: Counter[int] = Counter()
        """Copies that landed, by the sequence of the entry that made them."""
        self._of_targets: set[int] = set()
        """Sequences of all targets: an entry of another sequence is of copies alone."""
        self._since_ns, self._until_ns = 0.0, math.inf
        self._latest = self._ignored = -1
        self._stopped = False

    def start(self, now_ns: int) -> None:
        """What is counted begins here: targets that some worker has already come to, and copies that have landed, are left out."""
        self._since_ns = now_ns
        self._ignored = self._latest
        for counted in (self._raw_us, self._d_us, self._w_us, self._left_us, self._exposed_us, self._copies):
            counted.clear()
        self._first_layer.clear()
        self._made.clear()

    def stop(self, now_ns: int) -> None:
        """Nothing is counted from here on, but for copies that have landed and are seen later."""
        self._stopped = True
        self._until_ns = now_ns

    def tracer(self, name: str, clock: Clock) -> Tracer:
        """A role's tracer: FFN workers' hears of copies, the others' of nothing."""
        role, rank = split_member(name)
        return _CopyTracer(self, rank, name, clock) if role == FFN else Tracer(name, clock, None)

    def copied(self, worker: int, args: dict[str, Any], begun_ns: int, end_ns: int) -> None:
        """A copy has landed; before it began, it waited for uses of its slot, or for its target's turn."""
        key = (worker, args["layer"], args["slot"], args["generation"])
        self._landed[key] = (args["submitted_ns"], begun_ns, end_ns)
        if self._since_ns <= end_ns <= self._until_ns:
            self._made[args["generation"]] += 1

    def waited(self, worker: int, target: Target, reached_ns: int, args: dict[str, Any]) -> None:
        """A target has come to its wait, and gone on."""
        sequence = args["sequence"]
        self._latest = max(self._latest, sequence)
        self._of_targets.add(sequence)
        if self._stopped or sequence <= self._ignored:
            return
        if target.layer == 0:
            self._first_layer.add(sequence)
        for slot, generation in zip(args["slots"], args["generations"], strict=True):
            landed = self._landed.get((worker, target.layer, slot, generation))
            if landed is None:
                continue
            submitted_ns, begun_ns, end_ns = landed
            if end_ns > reached_ns:
                self._exposed_us[sequence] = max(self._exposed_us[sequence], (end_ns - reached_ns) / 1e3)
            if generation == sequence:
                self._copies[sequence] += 1
                self._raw_us[sequence] = max(self._raw_us[sequence], (end_ns - begun_ns) / 1e3)
                self._d_us[sequence] = max(self._d_us[sequence], (end_ns - submitted_ns) / 1e3)
                window_us, left_us = (reached_ns - submitted_ns) / 1e3, (reached_ns - end_ns) / 1e3
                self._w_us[sequence] = min(self._w_us.get(sequence, window_us), window_us)
                self._left_us[sequence] = min(self._left_us.get(sequence, left_us), left_us)

    def summary(self) -> dict[str, Any]:
        """Means and distributions over targets that copied; times in µs, the worst of a target's workers."""
        sequences = sorted(self._copies)
        exposed = [self._exposed_us.get(s, 0.0) for s in sequences]
        return {
            "targets": len(sequences),
            "copies": sum(self._copies.values()),
            "ahead": sum(count for entry, count in self._made.items() if entry not in self._of_targets),
            "d_us": _spread([self._d_us[s] for s in sequences]),
            "raw_us": _spread([self._raw_us[s] for s in sequences]),
            "w_us": _spread([self._w_us[s] for s in sequences]),
            "left_us": _spread([self._left_us[s] for s in sequences]),
            "exposed_us": _spread(exposed),
            "exposed_targets": sum(value > 0 for value in exposed),
            "exposed_in_first_layer": sum(
                value > 0 for s, value in zip(sequences, exposed, strict=True) if s in self._first_layer
            ),
            "exposed_to_earlier": len(self._exposed_us.keys() - self._copies.keys()),
        }


class _CopyTracer(Tracer):
    """Passes on what ``CopySamples`` counts, and keeps nothing.

    A copy's span comes when its landing is seen, which may be after the wait of the target that needs it.
    """

    def __init__(self, samples: CopySamples, rank: int, process: str, clock: Clock) -> None:
        super().__init__(process, clock, None)
        self._samples = samples
        self._rank = rank
        self.enabled = True
        self.only = frozenset({"copy", "wait"})

    def span(self, name: SpanName, target: Target | None, start_ns: int, end_ns: int, **args: Any) -> None:
        if name == "copy":
            self._samples.copied(self._rank, args, start_ns, end_ns)
        elif name == "wait" and args["slots"]:
            assert target is not None
            self._samples.waited(self._rank, target, start_ns, args)

    def instant(self, name: str, at_ns: int, target: Target | None = None, **args: Any) -> None:
        """Not counted."""

    def counter(self, name: str, at_ns: int, value: float) -> None:
        """Not counted."""


def _spread(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"mean": 0.0, "points": []}
    ordered = sorted(values)
    points = [ordered[round(at * (len(ordered) - 1) / (SKETCH - 1))] for at in range(SKETCH)]
    return {"mean": round(sum(ordered) / len(ordered), 3), "points": [round(point, 3) for point in points]}
