"""The types of ``cuda.bindings.driver`` that AFORE's calls take and give, as the strict stand-in has them."""

from __future__ import annotations

import ctypes
import enum
from typing import Any


class CUresult(enum.IntEnum):
    """The codes that occur here."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


OK = CUresult.CUDA_SUCCESS


class _Handle(int):
    """A typed number."""


class CUstream(_Handle): ...


class CUevent(_Handle): ...


class CUcontext(_Handle): ...


class CUdevice(_Handle): ...


class CUdeviceptr(_Handle): ...


class CUhostFn(_Handle): ...


class CUipcMemHandle:
    """64 bytes."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class CUmemcpyAttributes:
    """What a batch says of its copies."""

    srcAccessOrder: Any = None
    flags = 0


class CUmemcpySrcAccessOrder(enum.IntEnum):
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1


class CUstream_flags(enum.IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
