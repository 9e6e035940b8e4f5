"""How many KV blocks of each attention worker are free, as the engine counts them: pure, no I/O, no clock.

The engine counts and the worker's pool picks the numbers. Both apply the same rule to the same messages in the same order (a
reservation takes what it names, a step's row takes a block when its position begins one, a release gives all back), so that
no growth of a request costs a message, let alone an answer. The one thing that the engine cannot know is when somebody who may
still write into released blocks has stopped; such a release is *late*, and counts when the worker says ``Freed``.
"""

from __future__ import annotations


class KvLedger:
    """Counts of free blocks."""

    def __init__(self, workers: int, *, blocks: int, block_tokens: int) -> None:
        """``blocks`` of ``block_tokens`` tokens on each of the ``workers``."""
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._free_A = [blocks] * workers
        self._late: dict[int, tuple[int, int]] = {}
        """Ticket → (worker, blocks)."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def free(self, worker: int) -> int:
        """Blocks that can be taken now."""
        return self._free_A[worker]

    def late(self, worker: int) -> int:
        """Blocks that have been released and will come free without anybody's doing."""
        return sum(blocks for where, blocks in self._late.values() if where == worker)

    def take(self, worker: int, count: int) -> None:
        """They must be free."""
        assert 0 < count <= self._free_A[worker], f"{count} of {self._free_A[worker]} free blocks"
        self._free_A[worker] -= count

    def give_back(self, worker: int, ticket: int, count: int, *, late: bool) -> None:
        """A release; a late one counts with ``freed``."""
        if late:
            assert ticket not in self._late, f"ticket {ticket} released twice"
            self._late[ticket] = (worker, count)
        else:
            self._add(worker, count)

    def freed(self, worker: int, ticket: int) -> bool:
        """The worker says that a late release's blocks are free; returns whether one was due."""
        if ticket not in self._late or self._late[ticket][0] != worker:
            return False
        self._add(*self._late.pop(ticket))
        return True

    def _add(self, worker: int, count: int) -> None:
        self._free_A[worker] += count
        assert self._free_A[worker] <= self.blocks, f"{self._free_A[worker]} of {self.blocks} blocks are free"
