"""A strict stand-in for ``cuda.bindings.driver``: the few calls that AFORE makes, over host memory.

Streams run what they are given in order, each operation as soon as what it waits for is done; ``hold`` stops a stream, so that
tests can look at what is under way. Every handle must be live and of the right type, every address within an allocation, and
what CUDA would swallow in silence (a wait for an event that nobody has recorded, use of the default stream, pageable memory,
freeing what another process still maps) is written down as a mistake. ``calls`` has everything, in order.
"""

from __future__ import annotations

from typing import Any

from tests.workers.device.cuda import fake_types as t
from tests.workers.device.cuda.fake_base import OK
from tests.workers.device.cuda.fake_machine import Uuid
from tests.workers.device.cuda.fake_memory import FakeMemory
from tests.workers.device.cuda.fake_streams import FakeStreams


class FakeCalls(FakeStreams, FakeMemory):
    """The calls of one process of ``machine``."""

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
        return self._told("cuDeviceGetName", b"Fake GPU\0".ljust(length, b"\0"))

    def cuDeviceGetUuid(self, dev: t.CUdevice) -> tuple[Any, ...]:
        return self._told("cuDeviceGetUuid", Uuid(bytes([int(dev)]) * 16))

    def cuDeviceTotalMem(self, dev: t.CUdevice) -> tuple[Any, ...]:
        return self._told("cuDeviceTotalMem", self.machine.room_nbytes)

    def cuDeviceGetAttribute(self, attrib: t.CUdevice_attribute, dev: t.CUdevice) -> tuple[Any, ...]:
        return self._told("cuDeviceGetAttribute", {75: 9, 76: 0, 16: 132}[int(attrib)])

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
