"""The load driver: sends planned requests at their times, at most so many at once, and loses none of their records.

It knows nothing of HTTP: ``begin`` makes whatever sends one request, so that tests drive it in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from afore.core.clock import Clock
from afore.tools.bench.latency import UNFINISHED, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request to be sent."""

    index: int
    due_s: float
    """Seconds after the first."""
    prompt: str | tuple[int, ...]
    max_tokens: int
    prompt_tokens: int = 0
    """Where they are known before."""


class Sending(Protocol):
    """One request under way."""

    async def follow(self) -> str:
        """Sends it and follows its answer to the end; returns why it failed, or nothing."""
        ...

    def record(self, failure: str) -> Record:
        """What has been seen of it so far."""
        ...


Begin = Callable[[Planned, int], Sending]
"""(request, when it was due in ns) → the request under way, stamped as sent now."""
Trouble = Callable[[], Awaitable[str]]
"""Why the server cannot go on, or nothing."""


class Load:
    """One run of load. ``records`` fills while it runs; ``unsent`` counts what an early end left."""

    def __init__(
        self, planned: Sequence[Planned], begin: Begin, clock: Clock, *, concurrency: int | None = None
    ) -> None:
        self._planned = planned
        self._begin = begin
        self._clock = clock
        self._room = asyncio.Semaphore(len(planned) + 1 if concurrency is None else concurrency)
        self._failed = asyncio.Event()
        self.records: list[Record] = []

    @property
    def unsent(self) -> int:
        """Requests that were never sent."""
        return len(self._planned) - len(self.records)

    async def run(self, trouble: Trouble, lost: Awaitable[str] | None = None) -> str:
        """Sends everything and follows it to the end. Returns why the server died, or nothing.

        ``trouble`` is asked after a request has failed; ``lost`` returns when the server has died. Whatever ends the run early
        (cancellation too), requests under way hand in what was seen of them.
        """
        watchers = {asyncio.create_task(self._watch(trouble), name="trouble")}
        if lost is not None:
            watchers.add(asyncio.create_task(_named(lost), name="lost"))
        everything = asyncio.create_task(self._send_all(), name="load")
        tasks: set[asyncio.Task[str] | asyncio.Task[None]] = {everything, *watchers}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                return next(watcher.result() for watcher in watchers if watcher.done())
            await everything
            # A server may have died with the very last request, before the watcher had its turn.
            return await trouble() if any(not record.completed for record in self.records) else ""
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self) -> None:
        first_ns = self._clock.now_ns()
        async with asyncio.TaskGroup() as group:
            for planned in self._planned:
                due_ns = first_ns + round(planned.due_s * 1e9)
                wait_us = (due_ns - self._clock.now_ns()) / 1e3
                if wait_us > 0:
                    await self._clock.sleep_us(wait_us)
                await self._room.acquire()
                group.create_task(self._one(planned, due_ns), name=f"request {planned.index}")

    async def _one(self, planned: Planned, due_ns: int) -> None:
        sending = self._begin(planned, due_ns)
        failure = UNFINISHED
        try:
            failure = await sending.follow()
        finally:
            self._room.release()
            self.records.append(sending.record(failure))
        if failure:
            self._failed.set()

    async def _watch(self, trouble: Trouble) -> str:
        while True:
            await self._failed.wait()
            self._failed.clear()
            if found := await trouble():
                return found


async def _named(lost: Awaitable[str]) -> str:
    return await lost
