"""Streams, events and host functions of the strict stand-in for ``cuda.bindings.driver``."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.workers.device.cuda import fake_types as t
from tests.workers.device.cuda.fake_base import OK, FakeBase
from tests.workers.device.cuda.fake_machine import Operation, Record


class FakeStreams(FakeBase):
    """A wait captures the record that is there when it is enqueued, as the driver's does."""

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, ...]:
        return self._answer("cuCtxGetStreamPriorityRange", (), 0, -5)

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, ...]:
        if flags != t.CUstream_flags.CU_STREAM_NON_BLOCKING:
            self.mistakes.append("a stream that waits for the default stream")
        stream = t.CUstream(next(self.machine.numbers))
        self.streams[stream], self.priorities[stream] = [], priority
        return self._answer("cuStreamCreateWithPriority", (flags, priority), stream)

    def cuStreamDestroy(self, hStream: t.CUstream) -> tuple[Any, ...]:
        if self._bad_stream(hStream):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        if self.streams.pop(hStream):
            self.mistakes.append(f"stream {int(hStream):#x} was destroyed with work on it")
        return self._answer("cuStreamDestroy", (hStream,))

    def cuEventCreate(self, Flags: int) -> tuple[Any, ...]:
        event = t.CUevent(next(self.machine.numbers))
        self.events[event] = None
        return self._answer("cuEventCreate", (Flags,), event)

    def cuEventDestroy(self, hEvent: t.CUevent) -> tuple[Any, ...]:
        if self._bad_event(hEvent):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        del self.events[hEvent]
        return self._answer("cuEventDestroy", (hEvent,))

    def cuEventRecord(self, hEvent: t.CUevent, hStream: t.CUstream) -> tuple[Any, ...]:
        if self._bad_event(hEvent) or self._bad_stream(hStream):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        record = Record()

        def reach() -> None:
            record.done, record.time_us = True, self.machine.at_us

        self.events[hEvent] = record
        return self._enqueue("cuEventRecord", (hEvent, hStream), hStream, Operation("record", reach, record=record))

    def cuStreamWaitEvent(self, hStream: t.CUstream, hEvent: t.CUevent, Flags: int) -> tuple[Any, ...]:
        if self._bad_event(hEvent) or self._bad_stream(hStream):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        record = self.events[hEvent]
        if record is None:
            self.mistakes.append(f"a wait for event {int(hEvent):#x}, which nobody has recorded: CUDA does not wait")
        operation = Operation("wait", lambda: None, after=record)
        return self._enqueue("cuStreamWaitEvent", (hStream, hEvent, Flags), hStream, operation)

    def cuEventQuery(self, hEvent: t.CUevent) -> tuple[Any, ...]:
        if self.broken:
            return (t.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        if self._bad_event(hEvent):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        record = self.events[hEvent]
        return (OK if record is None or record.done else t.CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, hEvent: t.CUevent) -> tuple[Any, ...]:
        if self.broken:
            return (t.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        if self._bad_event(hEvent):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        self._wake()
        record = self.events[hEvent]
        if record is not None and not record.done:
            self.mistakes.append("a synchronisation that would never return")
        return self._answer("cuEventSynchronize", (hEvent,))

    def cuEventElapsedTime(self, hStart: t.CUevent, hEnd: t.CUevent) -> tuple[Any, ...]:
        begin, end = self.events[hStart], self.events[hEnd]
        if begin is None or end is None:
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE, None)
        if not (begin.done and end.done):
            return (t.CUresult.CUDA_ERROR_NOT_READY, None)
        return (OK, (end.time_us - begin.time_us) / 1e3)

    def cuLaunchHostFunc(self, hStream: t.CUstream, fn: t.CUhostFn, userData: int) -> tuple[Any, ...]:
        self._typed(fn, t.CUhostFn)
        if self._bad_stream(hStream):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(fn))
        cost_us = self.machine.run_us.pop(0) if self.machine.run_us else 0.0
        operation = Operation("call", lambda: function(userData), cost_us=cost_us)
        return self._enqueue("cuLaunchHostFunc", (hStream, fn, userData), hStream, operation)
