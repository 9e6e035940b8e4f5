"""A queue from those who put to the one coroutine that takes: ``asyncio.Queue`` without bounds, joining and several readers.

A target goes through two of them on every worker, and of a queue's nine calls seven are for what nobody asks of it there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """First in, first out; nothing is lost when the one who takes is cancelled."""

    __slots__ = ("_items", "_loop", "_taker")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._taker: asyncio.Future[None] | None = None
        # Known from the first wait on: asking for the running loop is a system call on Python 3.11.
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._items)

    def put(self, item: T) -> None:
        """Hands an item over; never waits."""
        self._items.append(item)
        taker = self._taker
        if taker is not None and not taker.done():
            taker.set_result(None)

    async def take(self) -> T:
        """The oldest item, once there is one. Does not suspend where there is; at most one takes at a time."""
        items = self._items
        while not items:
            assert self._taker is None, "one coroutine takes"
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._taker = self._loop.create_future()
            try:
                await self._taker
            finally:
                self._taker = None
        return items.popleft()
