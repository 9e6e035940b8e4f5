"""Seats: which requests decode on which attention worker and in which microbatch, evenly. Pure."""

from __future__ import annotations

from collections.abc import Callable


class Seats:
    """How many requests hold a seat of (attention worker, microbatch), from admission until they leave."""

    def __init__(self, workers: int, microbatches: int, *, capacity: int) -> None:
        """``capacity``: seats of one worker in one microbatch."""
        self._capacity = capacity
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
        """A free seat in the emptiest microbatch of the emptiest worker that ``suits``; ties by rank. None if there is none."""
        workers = [
            worker for worker, taken_M in enumerate(self._taken_AM) if min(taken_M) < self._capacity and suits(worker)
        ]
        if not workers:
            return None
        worker = min(workers, key=lambda a: (sum(self._taken_AM[a]), a))
        taken_M = self._taken_AM[worker]
        # Over all workers, so that a microbatch is not filled on one of them and left empty on the others.
        microbatch = min(
            (m for m, taken in enumerate(taken_M) if taken < self._capacity),
            key=lambda m: (taken_M[m], sum(row_M[m] for row_M in self._taken_AM), m),
        )
        return worker, microbatch
