"""The replies to one target: which FFN workers have written theirs, and the sum of their partial rows.

A pure state machine: bells are hints, the headers in the reply slots decide.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from afore.core.target import Target
from afore.transport.exchange import Part, Replies

F32 = npt.NDArray[np.float32]


class PendingReplies:
    """Collects the N partial results of one target."""

    def __init__(self, replies: Replies, target: Target, num_tokens: int, num_workers: int) -> None:
        self.target = target
        self._replies = replies
        self.num_tokens = num_tokens
        self._parts_N: list[tuple[Part, F32] | None] = [None] * num_workers
        self._left = num_workers

    @property
    def complete(self) -> bool:
        """All N replies are there."""
        return self._left == 0

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the FFN workers whose reply has not come."""
        return tuple(worker for worker, part in enumerate(self._parts_N) if part is None)

    def look(self, worker: int) -> bool:
        """Looks at one worker's slot (its bell has rung); true once all N replies are there."""
        if self._left and self._parts_N[worker] is None:
            part = self._replies.take(self.target.microbatch, worker, self.target, self.num_tokens)
            if part is not None:
                self._parts_N[worker] = part
                self._left -= 1
        return self._left == 0

    @property
    def parts_N(self) -> tuple[Part, ...]:
        """Which of the target's rows each worker has replied, once all have."""
        assert self._left == 0, f"replies of {self.missing} are missing"
        return tuple(part[0] for part in self._parts_N if part is not None)

    def sum_TD(self) -> F32:
        """The routed sum [T, D]: partial rows added in rank order, so that the same parts give the same bits every time."""
        assert self._left == 0, f"replies of {self.missing} are missing"
        parts = [part for part in self._parts_N if part is not None]
        if any(count != self.num_tokens for (_, count), _ in parts):
            return self._assembled_TD(parts)
        (_, first_TD), *rest = parts
        if not rest:
            return first_TD.copy()
        out_TD = first_TD + rest[0][1]
        for _, part_TD in rest[1:]:
            out_TD += part_TD
        return out_TD

    def _assembled_TD(self, parts: list[tuple[Part, F32]]) -> F32:
        """Rows that the workers have summed among themselves: each has sent some of them."""
        out_TD: F32 = np.zeros((self.num_tokens, parts[0][1].shape[1]), dtype=np.float32)
        for (first, count), rows_TD in parts:
            out_TD[first : first + count] += rows_TD
        return out_TD
