"""Answers to reservations of KV blocks, strictly in the order they were asked: a pure state machine over the pool.

A released request's blocks may be in use for a while (a step still runs, prefill's writes have not landed). Refusing a reservation
for that time would leave the engine with nothing to wait for: the release it counts on has been. So such a reservation waits here.
"""

from __future__ import annotations

from collections import deque

from afore.core import control
from afore.workers.kv_pool import KvPool


class Reservations:
    """The reservations of one attention worker that are not answered yet."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._asked: deque[control.Reserve] = deque()

    def ask(self, reserve: control.Reserve) -> None:
        """The engine wants blocks; ``answers`` has its answer, now or later."""
        self._asked.append(reserve)

    def withdraw(self, request: int) -> None:
        """The request has ended: it needs no answer any more."""
        self._asked = deque(reserve for reserve in self._asked if reserve.request != request)

    def answers(self) -> list[control.Reserved]:
        """What can be answered by now: blocks, or none where only the end of another request makes room.

        To be asked for again whenever blocks may have become free. Raises ``WireError`` for a request that has blocks already.
        """
        answers: list[control.Reserved] = []
        while self._asked:
            reserve = self._asked[0]
            blocks = self._pool.reserve(reserve.request, reserve.tokens, reserve.sampling, reserve.seen)
            if not blocks and self._pool.may_hold(reserve.tokens):
                break
            self._asked.popleft()
            answers.append(control.Reserved(reserve.request, blocks))
        return answers
