"""What the strict stand-in for ``cuda.bindings.driver`` is of: its state, how streams run, how calls answer, what is no mistake."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.workers.device.cuda import fake_types as t
from tests.workers.device.cuda.fake_machine import Machine, Operation, Record

OK = t.CUresult.CUDA_SUCCESS
_nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda argument: None)


class FakeBase:
    """One process of ``machine``."""

    NOTHING = ctypes.cast(_nothing, ctypes.c_void_p).value or 0
    """A host function that does nothing."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine if machine is not None else Machine()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """(name, arguments) of every call that enqueues, makes or ends something."""
        self.mistakes: list[str] = []
        self.failing: dict[str, t.CUresult] = {}
        """Calls that answer with an error from now on."""
        self.missing: set[str] = set()
        """Calls that the driver's library does not have."""
        self.broken = False
        """The GPU has failed: what is enqueued does not run any more."""
        self.streams: dict[int, list[Operation]] = {}
        self.priorities: dict[int, int] = {}
        self.events: dict[int, Record | None] = {}
        self.registered: dict[int, int] = {}
        self._held: set[int] = set()
        self._sleeps: list[Record] = []
        self._free_us: dict[int, float] = {}
        self._current = -1
        self._retained: dict[int, int] = {}
        self._peers: set[int] = set()
        self._running = False
        self._initialised = False

    # For tests

    def hold(self, stream: int) -> None:
        """The stream stands still."""
        self._held.add(stream)

    def let_go(self, stream: int) -> None:
        """It goes on."""
        self._held.discard(stream)
        self._run()

    def sleep(self, stream: int, cycles: int = 0) -> None:
        """Enqueues what only waits, until the host blocks for an event: so the host has enqueued by then what it had to."""
        asleep = Record()
        self._sleeps.append(asleep)
        self.streams[stream].append(Operation("sleep", lambda: None, after=asleep))

    def _wake(self) -> None:
        while self._sleeps:
            asleep = self._sleeps.pop()
            asleep.done, asleep.time_us = True, self.machine.now_us
        self._run()

    def fail_gpu(self) -> None:
        """A kernel has touched memory that is not its own: whatever is asked from now on answers with that."""
        self.broken = True

    def named(self, *names: str) -> list[tuple[str, tuple[Any, ...]]]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call[0] in names]

    @property
    def live(self) -> dict[str, int]:
        """What was made and not ended."""
        mine = [a for a in self.machine.allocations.values() if a.owner is self]
        return {
            "streams": len(self.streams),
            "events": len(self.events),
            "allocations": len(mine),
            "registered": len(self.registered),
            "contexts": sum(self._retained.values()),
            "mapped": sum(a.mapped for a in self.machine.allocations.values() if a.owner is not self),
        }

    # Running

    def _enqueue(self, name: str, arguments: tuple[Any, ...], stream: int, operation: Operation) -> tuple[Any, ...]:
        if self.broken:
            return (t.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        if name in self.failing:
            return (self.failing[name],)
        operation.enqueued_us = self.machine.now_us
        self.streams[stream].append(operation)
        answer = self._answer(name, arguments)
        self._run()
        return answer

    def _run(self) -> None:
        if self._running or self.broken:
            return
        self._running = True
        try:
            while any(self._step(stream, work) for stream, work in self.streams.items()):
                pass
        finally:
            self._running = False

    def _step(self, stream: int, work: list[Operation]) -> bool:
        if not work or stream in self._held:
            return False
        if work[0].after is not None and not work[0].after.done:
            return False
        machine, operation = self.machine, work.pop(0)
        waited_us = operation.after.time_us if operation.after is not None else 0.0
        begin_us = max(self._free_us.get(stream, 0.0), operation.enqueued_us, waited_us)
        machine.at_us = self._free_us[stream] = machine.tick(begin_us) + operation.cost_us
        machine.now_us = max(machine.now_us, machine.at_us)
        operation.run()
        return True

    def _answer(self, name: str, arguments: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        if name in self.failing:
            return (self.failing[name], *(None for _ in values))
        self.calls.append((name, arguments))
        return (OK, *values)

    def _told(self, name: str, value: Any) -> tuple[Any, ...]:
        """What a question is answered; no entry in ``calls``."""
        return (self.failing[name], None) if name in self.failing else (OK, value)

    def _bad_stream(self, stream: t.CUstream) -> bool:
        self._typed(stream, t.CUstream)
        if int(stream) == 0:
            self.mistakes.append("use of the default stream")
        return stream not in self.streams

    def _bad_event(self, event: t.CUevent) -> bool:
        self._typed(event, t.CUevent)
        return event not in self.events

    @staticmethod
    def _typed(value: Any, expected: type) -> None:
        if not isinstance(value, expected):
            raise TypeError(f"{value!r} is no {expected.__name__}")
