"""Seats: which requests decode on which attention worker and in which microbatch, evenly. Pure."""

from __future__ import annotations

from collections.abc import Callable


class Seats:
    """How many requests hold a seat of (attention worker, microbatch), from admission until they leave.

    The first ``open`` microbatches admit; seats of the others are to be changed for theirs.
    """

    def __init__(self, workers: int, microbatches: int, *, capacity: int, per_worker: int | None = None) -> None:
        """``capacity``: seats of one worker in one microbatch; ``per_worker``: of one worker in all of them."""
        self._capacity = capacity
        self._per_worker = capacity * microbatches if per_worker is None else per_worker
        self.open = microbatches
        self._taken_AM = [[0] * microbatches for _ in range(workers)]

    def of_worker(self, worker: int) -> int:
        """Seats of a worker that are taken."""
        return sum(self._taken_AM[worker])

    def take(self, worker: int, microbatch: int) -> None:
        """Somebody sits down."""
        assert self._taken_AM[worker][microbatch] < self._capacity, "no such seat is free"
        self._taken_AM[worker][microbatch] += 1

    def leave(self, worker: int, microbatch: int) -> None:
        """Somebody stands up."""
        assert self._taken_AM[worker][microbatch] > 0, "nobody sits there"
        self._taken_AM[worker][microbatch] -= 1

    def best(self, suits: Callable[[int], bool]) -> tuple[int, int] | None:
        """A free seat in the emptiest open microbatch of the emptiest worker that ``suits``; ties by rank. None: there is none."""
        workers = [
            worker
            for worker, taken_M in enumerate(self._taken_AM)
            if sum(taken_M) < self._per_worker and min(taken_M[: self.open]) < self._capacity and suits(worker)
        ]
        if not workers:
            return None
        worker = min(workers, key=lambda a: (sum(self._taken_AM[a]), a))
        return worker, self._emptiest(worker)

    def better(self, worker: int, microbatch: int) -> int | None:
        """The open microbatch for which a seat of this one is to be changed: because this one closes, or holds two more or over."""
        taken_M = self._taken_AM[worker]
        if min(taken_M[: self.open]) >= self._capacity:
            return None
        emptiest = self._emptiest(worker)
        closes = microbatch >= self.open
        return emptiest if closes or taken_M[emptiest] + 1 < taken_M[microbatch] else None

    def _emptiest(self, worker: int) -> int:
        taken_M = self._taken_AM[worker][: self.open]
        # Over all workers, so that a microbatch is not filled on one of them and left empty on the others.
        return min(
            (m for m, taken in enumerate(taken_M) if taken < self._capacity),
            key=lambda m: (taken_M[m], sum(row_M[m] for row_M in self._taken_AM), m),
        )
