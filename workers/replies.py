"""The replies to one target: which FFN workers have written theirs, and the sum of their partial rows.

A pure state machine: bells are hints, the headers in the reply slots decide.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from afore.core.target import Target
from afore.transport.exchange import Replies

F32 = npt.NDArray[np.float32]


class PendingReplies:
    """Collects the N partial results of one target."""

    def __init__(self, replies: Replies, target: Target, num_tokens: int, num_workers: int) -> None:
        self.target = target
        self._replies = replies
        self._num_tokens = num_tokens
        self._rows_N: list[F32 | None] = [None] * num_workers
        self._left = num_workers

    @property
    def complete(self) -> bool:
        """All N replies are there."""
        return self._left == 0

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the FFN workers whose reply has not come."""
        return tuple(worker for worker, rows in enumerate(self._rows_N) if rows is None)

    def look(self, worker: int) -> bool:
        """Looks at one worker's slot (its bell has rung); true once all N replies are there."""
        if self._left and self._rows_N[worker] is None:
            rows_TD = self._replies.take(self.target.microbatch, worker, self.target, self._num_tokens)
            if rows_TD is not None:
                self._rows_N[worker] = rows_TD
                self._left -= 1
        return self._left == 0

    def sum_TD(self) -> F32:
        """The routed sum [T, D]: partial rows added in rank order, so that the same parts give the same bits every time."""
        assert self._left == 0, f"replies of {self.missing} are missing"
        first_TD, *rest = (rows_TD for rows_TD in self._rows_N if rows_TD is not None)
        if not rest:
            return first_TD.copy()
        out_TD = first_TD + rest[0]
        for part_TD in rest[1:]:
            out_TD += part_TD
        return out_TD
