"""Published targets until every worker has reported on them: what they cost, which of them are cancelled; no I/O."""

from __future__ import annotations

from afore.core import control
from afore.core.target import Target
from afore.scheduler.costs import CostModel
from afore.scheduler.publisher import Published
from afore.scheduler.stats import RunStats
from afore.transport.feedback import FeedbackFlags, FeedbackRecord


class UnderWay:
    """One epoch's. Costs and statistics learn from every record."""

    def __init__(self, *, num_workers: int, costs: CostModel, stats: RunStats) -> None:
        self._num_workers = num_workers
        self._costs = costs
        self._stats = stats
        self._published: dict[int, Published] = {}
        """By sequence."""
        self._reported: dict[int, int] = {}
        self._aborting: set[int] = set()
        """Those of them that are cancelled."""
        self._given_up: dict[int, int] = {}
        """The last step of each microbatch that lost a target: none of its later targets is published."""

    def add(self, sequence: int, target: Target, tokens_A: tuple[int, ...]) -> None:
        """A target has been published."""
        self._published[sequence] = Published(sequence, target, tokens_A)

    def is_given_up(self, target: Target) -> bool:
        """Whether the target's step has lost a target."""
        return target.step <= self._given_up.get(target.microbatch, -1)

    def to_abort(self, sequence: int) -> Published | None:
        """The target of ``sequence``, some of whose inputs are missing; none where it has ended, or is cancelled already."""
        return None if sequence in self._aborting else self._published.get(sequence)

    def give_up(self, entry: Published) -> None:
        """The target is cancelled, and its step with it."""
        self._aborting.add(entry.sequence)
        self._given_up[entry.target.microbatch] = entry.target.step
        self._stats.counters["aborts"] += 1

    def take(self, record: FeedbackRecord) -> control.StepAborted | None:
        """One worker has passed a target; what the hub must hear of once all have passed a cancelled one."""
        entry = self._published.get(record.sequence)
        if entry is None:
            return None
        if record.flags and record.flags & FeedbackFlags.PRIMARIES:
            self._stats.counters["primaries_only"] += 1
        self._stats.counters["replica_pairs"] += record.replica_pairs
        raw_us = record.window_us - record.slack_us
        self._stats.migration.add(record.sequence, record.copies, raw_us, record.window_us)
        aborted = record.sequence in self._aborting
        if not aborted:
            self._costs.update(
                entry.target.layer,
                worker=record.worker,
                tile_us=record.tile_us if record.tiles else None,
                copy_us=record.copy_us if record.copies else None,
                # Also of targets that copied nothing: a window that was once short would else never be seen to have grown.
                window_us=record.window_us if record.window_us > 0 else None,
            )
        reported = self._reported.get(record.sequence, 0) + 1
        if reported < self._num_workers:
            self._reported[record.sequence] = reported
            return None
        self._reported.pop(record.sequence, None)
        del self._published[record.sequence]
        if not aborted:
            return None
        self._aborting.discard(record.sequence)
        target = entry.target
        return control.StepAborted(target.microbatch, target.step, target.layer)
