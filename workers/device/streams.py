"""What the streams of all host-side devices share: collecting a target's work until ``flush``, and refusing foreign events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from afore.core.errors import DeviceClosed
from afore.workers.device.base import CopyJob, Event, Work
from afore.workers.device.events import DeviceEvent, Owner

E = TypeVar("E", bound=DeviceEvent)


@dataclass(slots=True)
class Run:
    """A closure to be run."""

    work: Work
    do: Callable[[], None]


@dataclass(slots=True)
class CopyBatch:
    """Copies to be made."""

    work: Work
    jobs: tuple[CopyJob, ...]


@dataclass(slots=True)
class Wait(Generic[E]):
    """What follows starts after the event."""

    event: E


class CollectingStream(ABC, Generic[E]):
    """A stream that keeps what is enqueued until ``flush``. An event in the list is a record."""

    def __init__(self, owner: Owner, name: str) -> None:
        self._owner = owner
        self._name = name
        self._collected: list[Any] = []
        """``Run``, ``CopyBatch``, ``Wait``, events, and what streams of one kind alone know."""

    @property
    def name(self) -> str:
        return self._name

    def run(self, work: Work, do: Callable[[], None]) -> None:
        self._add(Run(work, do))

    def copy(self, work: Work, jobs: Sequence[CopyJob]) -> None:
        self._add(CopyBatch(work, tuple(jobs)))

    def wait(self, event: Event) -> None:
        """Raises ``ValueError`` for an event that no stream of this device has recorded: it might never come."""
        if getattr(event, "owner", None) is not self._owner:
            raise ValueError(f"stream {self._name} of {self._owner.name}: the event was not recorded on this device")
        self._add(Wait(cast("E", event)))  # a device has events of one kind

    def record(self) -> E:
        event = self._new_event()
        self._add(event)
        return event

    @abstractmethod
    def flush(self) -> None: ...

    @abstractmethod
    def _new_event(self) -> E: ...

    def _add(self, item: object) -> None:
        if self._owner.closed:
            raise DeviceClosed(self._owner.name, f"stream {self._name}", "nothing can be enqueued after close()")
        self._collected.append(item)
