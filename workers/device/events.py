"""What the events of all host-side devices share: awaiting them with a deadline, and the error of the work before them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from afore.core.errors import DeadlineExceeded, DeviceClosed, DeviceError
from afore.workers.device.base import Work


def describe(work: Work) -> str:
    """A piece of work as messages name it: span and target."""
    return work.span if work.target is None else f"{work.span} of {work.target}"


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in a stream. Everything behind it is dropped, there and in streams that wait for it."""

    device: str
    work: Work
    error: BaseException

    def as_error(self) -> DeviceError:
        """A fresh ``DeviceError`` with the original as its cause: one for each event that is awaited."""
        problem = f"{type(self.error).__name__}: {self.error}" if str(self.error) else type(self.error).__name__
        error = DeviceError(self.device, describe(self.work), problem)
        error.__cause__ = self.error
        return error


class Owner(Protocol):
    """A device, as its events and streams see it."""

    @property
    def name(self) -> str: ...

    @property
    def closed(self) -> bool: ...


class DeviceEvent(ABC):
    """An event that the event loop can await. Only ``done`` and ``completed_ns`` may be read from other threads."""

    __slots__ = ("_waiters", "failure", "owner", "stream_name")

    def __init__(self, owner: Owner, stream_name: str) -> None:
        self.owner = owner
        self.stream_name = stream_name
        self.failure: Failure | None = None
        self._waiters: list[asyncio.Future[None]] | None = None
        """A target makes ten events, and the host awaits one."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the stream has reached this point."""

    @property
    @abstractmethod
    def completed_ns(self) -> int:
        """When it did. Only valid once ``done``."""

    @property
    def over(self) -> bool:
        """Done, or never to be: the device was closed before."""
        return self.done or self.owner.closed

    @abstractmethod
    def _arm(self) -> None:
        """Sees to it that ``_release`` is called in the loop once the event is over. Called for each waiter."""

    async def wait(self, *, timeout_us: float) -> None:
        """Awaits completion. Raises ``DeadlineExceeded``, ``DeviceClosed``, or the ``DeviceError`` of the work before it."""
        if not self.over:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(future)
            self._arm()
            # A timer of our own: asyncio.timeout would cost as much as the rest of a hand-over.
            timer = loop.call_later(timeout_us * 1e-6, self._expire, future, timeout_us)
            try:
                await future
            finally:
                timer.cancel()
                if self._waiters and future in self._waiters:
                    self._waiters.remove(future)
        self._settle()

    def _settle(self) -> None:
        """Raises what a waiter gets where the event is over, but not well."""
        if not self.done:
            raise DeviceClosed(self.owner.name, f"stream {self.stream_name}", "closed before it reached this point")
        if self.failure is not None:
            raise self.failure.as_error()

    def _expire(self, future: asyncio.Future[None], timeout_us: float) -> None:
        if not future.done():
            future.set_exception(
                DeadlineExceeded(
                    self.owner.name,
                    f"stream {self.stream_name} did not reach an event within {timeout_us / 1e6:g} s",
                    "what is enqueued runs only after flush(); else it waits for another stream, or computes too long",
                )
            )

    def _release(self) -> None:
        waiters, self._waiters = self._waiters, None
        for future in waiters or ():
            if not future.done():
                future.set_result(None)
