"""A strict stand-in for ``cuda.bindings.driver``: the few calls that AFORE makes, over host memory.

Streams run what they are given in order, each operation as soon as what it waits for is done; ``hold`` stops a stream, so that
tests can look at what is under way. Every handle must be live and of the right type, every address within an allocation, and
what CUDA would swallow in silence (a wait for an event that nobody has recorded, use of the default stream, pageable memory,
freeing what another process still maps) is written down as a mistake. ``calls`` has everything, in order.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

from tests.workers.device.cuda import fake_types as t
from tests.workers.device.cuda.fake_machine import Allocation, Machine, Operation, Record, Uuid

OK = t.CUresult.CUDA_SUCCESS


class FakeCalls:
    """The calls of one process of ``machine``. ``forgetful``: names of calls that this driver does not have."""

    CUresult: Any = t.CUresult
    CUstream: Any = t.CUstream
    CUevent: Any = t.CUevent
    CUcontext: Any = t.CUcontext
    CUdeviceptr: Any = t.CUdeviceptr
    CUhostFn: Any = t.CUhostFn
    CUipcMemHandle: Any = t.CUipcMemHandle
    CUmemcpyAttributes: Any = t.CUmemcpyAttributes
    CUmemcpySrcAccessOrder: Any = t.CUmemcpySrcAccessOrder
    CUstream_flags: Any = t.CUstream_flags
    CUdevice_attribute: Any = t.CUdevice_attribute

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

    # Initialisation and devices

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        self._initialised = True
        return self._answer("cuInit", (flags,))

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._answer("cuDriverGetVersion", (), self.machine.version)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetCount", (), self.machine.gpus)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        if not self._initialised:
            return (t.CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
        if not 0 <= ordinal < self.machine.gpus:
            return (t.CUresult.CUDA_ERROR_INVALID_DEVICE, None)
        return (OK, t.CUdevice(ordinal))

    def cuDeviceGetName(self, length: int, dev: t.CUdevice) -> tuple[Any, ...]:
        return (OK, b"Fake GPU\0".ljust(length, b"\0"))

    def cuDeviceGetUuid(self, dev: t.CUdevice) -> tuple[Any, ...]:
        return (OK, Uuid(bytes([int(dev)]) * 16))

    def cuDeviceTotalMem(self, dev: t.CUdevice) -> tuple[Any, ...]:
        return (OK, self.machine.room_nbytes)

    def cuDeviceGetAttribute(self, attrib: t.CUdevice_attribute, dev: t.CUdevice) -> tuple[Any, ...]:
        return (OK, {75: 9, 76: 0, 16: 132}[int(attrib)])

    def cuDevicePrimaryCtxRetain(self, dev: t.CUdevice) -> tuple[Any, ...]:
        self._retained[int(dev)] = self._retained.get(int(dev), 0) + 1
        return self._answer("cuDevicePrimaryCtxRetain", (dev,), t.CUcontext(0x100 + int(dev)))

    def cuDevicePrimaryCtxRelease(self, dev: t.CUdevice) -> tuple[Any, ...]:
        self._retained[int(dev)] -= 1
        return self._answer("cuDevicePrimaryCtxRelease", (dev,))

    def cuCtxSetCurrent(self, ctx: t.CUcontext) -> tuple[Any, ...]:
        self._typed(ctx, t.CUcontext)
        self._current = int(ctx) - 0x100
        return self._answer("cuCtxSetCurrent", (ctx,))

    def cuDeviceCanAccessPeer(self, dev: t.CUdevice, peerDev: t.CUdevice) -> tuple[Any, ...]:
        pairs = self.machine.reachable
        return (OK, int(pairs is None or (int(dev), int(peerDev)) in pairs))

    def cuCtxEnablePeerAccess(self, peerContext: t.CUcontext, Flags: int) -> tuple[Any, ...]:
        self._typed(peerContext, t.CUcontext)
        if int(peerContext) in self._peers:
            return (t.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
        self._peers.add(int(peerContext))
        return self._answer("cuCtxEnablePeerAccess", (peerContext, Flags))

    # Streams and events

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
            record.done, record.time_us = True, self.machine.now_us

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
        operation = Operation("call", lambda: function(userData))
        return self._enqueue("cuLaunchHostFunc", (hStream, fn, userData), hStream, operation)

    # Memory

    def cuMemAlloc(self, bytesize: int) -> tuple[Any, ...]:
        if self._current < 0:
            return (t.CUresult.CUDA_ERROR_INVALID_CONTEXT, None)
        if bytesize > self.machine.room_nbytes:
            return (t.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        return self._allocate("cuMemAlloc", bytesize, "device", t.CUdeviceptr)

    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> tuple[Any, ...]:
        return self._allocate("cuMemHostAlloc", bytesize, "pinned", int)

    def cuMemFree(self, dptr: t.CUdeviceptr) -> tuple[Any, ...]:
        self._typed(dptr, t.CUdeviceptr)
        return self._free("cuMemFree", int(dptr), "device")

    def cuMemFreeHost(self, p: int) -> tuple[Any, ...]:
        return self._free("cuMemFreeHost", p, "pinned")

    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> tuple[Any, ...]:
        if "cuMemHostRegister" in self.failing:
            return (self.failing["cuMemHostRegister"],)
        if p in self.registered:
            return (t.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        self.registered[p] = bytesize
        return self._answer("cuMemHostRegister", (p, bytesize, Flags))

    def cuMemHostUnregister(self, p: int) -> tuple[Any, ...]:
        if self.registered.pop(p, None) is None:
            return (t.CUresult.CUDA_ERROR_INVALID_VALUE,)
        return self._answer("cuMemHostUnregister", (p,))

    def cuMemcpyAsync(
        self, dst: t.CUdeviceptr, src: t.CUdeviceptr, ByteCount: int, hStream: t.CUstream
    ) -> tuple[Any, ...]:
        if self._bad_stream(hStream):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        self._reachable(dst, ByteCount)
        self._reachable(src, ByteCount)
        operation = Operation("copy", lambda: _move(dst, src, ByteCount))
        return self._enqueue("cuMemcpyAsync", (dst, src, ByteCount, hStream), hStream, operation)

    def cuMemcpyBatchAsync(
        self,
        dsts: list[t.CUdeviceptr],
        srcs: list[t.CUdeviceptr],
        sizes: list[int],
        count: int,
        attrs: list[t.CUmemcpyAttributes],
        attrsIdxs: list[int],
        numAttrs: int,
        hStream: t.CUstream,
    ) -> tuple[Any, ...]:
        if "cuMemcpyBatchAsync" in self.missing:
            raise RuntimeError("Function cuMemcpyBatchAsync not found")
        if "cuMemcpyBatchAsync" in self.failing:
            return (self.failing["cuMemcpyBatchAsync"],)
        if self._bad_stream(hStream):
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        ordered = attrs and all(a.srcAccessOrder is not None for a in attrs)
        if not (
            len(dsts) == len(srcs) == len(sizes) == count > 0
            and attrsIdxs[0] == 0
            and numAttrs == len(attrs)
            and ordered
        ):
            return (t.CUresult.CUDA_ERROR_INVALID_VALUE,)
        spans = list(zip(dsts, srcs, sizes, strict=True))
        for dst, src, nbytes in spans:
            self._typed(dst, t.CUdeviceptr)
            self._typed(src, t.CUdeviceptr)
            self._reachable(dst, nbytes)
            self._reachable(src, nbytes)
        written = sorted((int(dst), int(dst) + nbytes) for dst, _, nbytes in spans)
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(written)):
            self.mistakes.append("a batch whose copies overlap: their order is not defined")

        def run() -> None:
            for dst, src, nbytes in reversed(spans):  # in no particular order
                _move(dst, src, nbytes)

        return self._enqueue("cuMemcpyBatchAsync", (tuple(spans), hStream), hStream, Operation("copies", run))

    # Between processes

    def cuIpcGetMemHandle(self, dptr: t.CUdeviceptr) -> tuple[Any, ...]:
        self._typed(dptr, t.CUdeviceptr)
        allocation = self.machine.allocations.get(int(dptr))
        if allocation is None or allocation.kind != "device":
            return (t.CUresult.CUDA_ERROR_INVALID_VALUE, None)
        handle = t.CUipcMemHandle()
        name = int(dptr).to_bytes(8, "little").ljust(64, b"h")
        ctypes.memmove(handle.getPtr(), name, 64)
        self.machine.exported[name] = int(dptr)
        return self._answer("cuIpcGetMemHandle", (dptr,), handle)

    def cuIpcOpenMemHandle(self, handle: t.CUipcMemHandle, Flags: int) -> tuple[Any, ...]:
        self._typed(handle, t.CUipcMemHandle)
        address = self.machine.exported.get(ctypes.string_at(handle.getPtr(), 64))
        if address is None or address not in self.machine.allocations:
            return (t.CUresult.CUDA_ERROR_INVALID_HANDLE, None)
        allocation = self.machine.allocations[address]
        if allocation.owner is self:
            return (t.CUresult.CUDA_ERROR_INVALID_CONTEXT, None)
        if self.machine.reachable is not None and "cuIpcOpenMemHandle" in self.failing:
            return (self.failing["cuIpcOpenMemHandle"], None)
        allocation.mapped += 1
        return self._answer("cuIpcOpenMemHandle", (handle, Flags), t.CUdeviceptr(address))

    def cuIpcCloseMemHandle(self, dptr: t.CUdeviceptr) -> tuple[Any, ...]:
        self._typed(dptr, t.CUdeviceptr)
        allocation = self.machine.allocations.get(int(dptr))
        if allocation is None or allocation.mapped == 0:
            return (t.CUresult.CUDA_ERROR_INVALID_VALUE,)
        allocation.mapped -= 1
        return self._answer("cuIpcCloseMemHandle", (dptr,))

    # Running

    def _enqueue(self, name: str, arguments: tuple[Any, ...], stream: int, operation: Operation) -> tuple[Any, ...]:
        if self.broken:
            return (t.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        if name in self.failing:
            return (self.failing[name],)
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
        self.machine.now_us = self.machine.tick(self.machine.now_us)
        work.pop(0).run()
        return True

    def _answer(self, name: str, arguments: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        if name in self.failing:
            return (self.failing[name], *(None for _ in values))
        self.calls.append((name, arguments))
        return (OK, *values)

    def _allocate(self, name: str, nbytes: int, kind: str, make: Callable[[int], Any]) -> tuple[Any, ...]:
        raw = ctypes.create_string_buffer(nbytes + 256)
        address = -(-ctypes.addressof(raw) // 256) * 256
        self.machine.allocations[address] = Allocation(raw, nbytes, kind, self)
        return self._answer(name, (nbytes,), make(address))

    def _free(self, name: str, address: int, kind: str) -> tuple[Any, ...]:
        allocation = self.machine.allocations.get(address)
        if allocation is None or allocation.kind != kind or allocation.owner is not self:
            return (t.CUresult.CUDA_ERROR_INVALID_VALUE,)
        if allocation.mapped:
            self.mistakes.append(f"{allocation.nbytes} bytes were freed while another process has them mapped")
        del self.machine.allocations[address]
        return self._answer(name, (address,))

    def _reachable(self, address: int, nbytes: int) -> None:
        if self.machine.within(address, nbytes) is None and not any(
            base <= address and address + nbytes <= base + size for base, size in self.registered.items()
        ):
            self.mistakes.append(f"a copy of {nbytes} bytes from or to memory that nobody has allocated or registered")

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


def _move(destination: int, source: int, nbytes: int) -> None:
    ctypes.memmove(int(destination), int(source), nbytes)
