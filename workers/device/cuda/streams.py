"""A CUDA stream as a ``Stream``: closures issue kernels at ``flush``, in the host's thread, and the GPU runs them in order.

What was enqueued is issued as far as its waits allow: a wait for an event that its own stream has not issued yet holds back all
that follows it, because CUDA would take it for no wait. Everything else is the GPU's business: the host never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from afore.workers.device.base import Work
from afore.workers.device.cuda.copies import issue_copies
from afore.workers.device.cuda.errors import CudaError
from afore.workers.device.cuda.events import CudaEvent
from afore.workers.device.events import Failure
from afore.workers.device.streams import CollectingStream, CopyBatch, Run, Wait

if TYPE_CHECKING:
    from afore.workers.device.cuda.device import CudaDevice

_Item = Run | CopyBatch | Wait[CudaEvent] | CudaEvent
NOTHING = Work("nothing", None)


@dataclass(frozen=True, slots=True)
class Handles:
    """The driver's streams behind one of ours."""

    stream: int
    bell: int
    """Where the calls are enqueued that tell the host of events: on the stream itself they would hold up what follows."""


class CudaStream(CollectingStream[CudaEvent]):
    """One of the two streams of a ``CudaDevice``."""

    def __init__(
        self, device: CudaDevice, name: str, handles: Handles, current: Callable[[int], AbstractContextManager[object]]
    ) -> None:
        super().__init__(device, name)
        self.device = device
        self.handles = handles
        self._driver = device.driver
        self._current = current
        self._left: deque[_Item] = deque()
        """Flushed, and not issued: it waits for something that the other stream has not issued."""
        self._issued: deque[CudaEvent] = deque()
        """Issued and not known to be done, in order."""
        self._failure: Failure | None = None
        self._last_work = NOTHING

    def flush(self) -> None:
        if self._collected:
            self._left.extend(self._collected)
            self._collected.clear()
            self.device.issue_all()

    def issue_ready(self) -> bool:
        """Issues what can be issued; says whether anything was."""
        if not self._left or self._blocked(self._left[0]):
            return False
        with self._current(self.handles.stream):
            while self._left and not self._blocked(self._left[0]):
                if self.device.closed:
                    break
                self._issue(self._left.popleft())
        return True

    def poll(self) -> None:
        """Looks which events are done. An error of the GPU is the failure of everything that is not."""
        while self._issued:
            event = self._issued[0]
            try:
                if not self._driver.reached(event.handle):
                    return
                stamp_ns = self.device.times.stamp(event.handle)
            except CudaError as error:
                self.device.fail(Failure(self._owner.name, event.behind or NOTHING, error))
                return
            self._issued.popleft()
            event.complete(stamp_ns, event.failure)

    def fail(self, failure: Failure, now_ns: int) -> None:
        """Nothing on this stream will run any more: what was issued is over, with this failure."""
        if self._failure is None:
            self._failure = failure
        while self._issued:
            self._issued.popleft().complete(now_ns, failure)

    def drop(self) -> None:
        """The device closes: what was not issued never is."""
        self._left.clear()
        self._collected.clear()

    def _new_event(self) -> CudaEvent:
        return CudaEvent(self)

    @staticmethod
    def _blocked(item: _Item) -> bool:
        return isinstance(item, Wait) and not item.event.issued

    def _issue(self, item: _Item) -> None:
        try:
            if isinstance(item, CudaEvent):
                self._issue_event(item)
            elif isinstance(item, Wait):
                self._issue_wait(item.event)
            elif self._failure is None:
                self._last_work = item.work
                if isinstance(item, Run):
                    item.do()
                else:
                    issue_copies(self._driver, item.jobs, self.handles.stream)
        except Exception as error:
            work = self._last_work if isinstance(item, CudaEvent | Wait) else item.work
            self._failure = self._failure or Failure(self._owner.name, work, error)
            if isinstance(item, CudaEvent):
                item.issued = True
                item.complete(self.device.clock.now_ns(), self._failure)

    def _issue_event(self, event: CudaEvent) -> None:
        handle = self.device.events.take()
        self._driver.record(handle, self.handles.stream)
        event.handle, event.issued, event.failure, event.behind = handle, True, self._failure, self._last_work
        self._issued.append(event)
        self.device.completion.issued(event, self.handles)

    def _issue_wait(self, event: CudaEvent) -> None:
        if not event.done:
            self._driver.wait(self.handles.stream, event.handle)
        # Also of one that failed and is done: nobody may run over what it has left.
        if self._failure is None:
            self._failure = event.failure
