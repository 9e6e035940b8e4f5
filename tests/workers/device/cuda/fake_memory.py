"""Memory, copies and what other processes open, of the strict stand-in for ``cuda.bindings.driver``."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

from tests.workers.device.cuda import fake_types as t
from tests.workers.device.cuda.fake_base import FakeBase
from tests.workers.device.cuda.fake_machine import Allocation, Operation


class FakeMemory(FakeBase):
    """Device memory is the host's; every address must lie within an allocation, or in registered memory."""

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
        operation = Operation("copy", lambda: _move(dst, src, ByteCount), cost_us=self.machine.copy_us)
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

        return self._enqueue(
            "cuMemcpyBatchAsync",
            (tuple(spans), hStream),
            hStream,
            Operation("copies", run, cost_us=self.machine.copy_us),
        )

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


def _move(destination: int, source: int, nbytes: int) -> None:
    ctypes.memmove(int(destination), int(source), nbytes)
