"""Memory of a GPU and pinned memory of the host, as tensors and arrays; everything is given back by one ``close``.

Allocations are the driver's own, not torch's pool: other processes can open them, and copies name their addresses.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from afore.workers.device.cuda.driver import Driver

_WORDS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}
_TORCH_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceMemory:
    """Allocations of one worker on GPU ``ordinal``. ``ordinal`` None: the driver's memory is the host's, as in tests."""

    def __init__(self, driver: Driver, ordinal: int | None) -> None:
        self._driver = driver
        self._ordinal = ordinal
        self._device: list[int] = []
        self._pinned: list[int] = []

    def allocate(self, nbytes: int) -> int:
        """Address of device memory, an allocation of its own. Raises ``CudaError``."""
        address = self._driver.allocate(max(1, nbytes))
        self._device.append(address)
        return address

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the device, with whatever lies there."""
        return self.view(self.allocate(math.prod(shape) * dtype.itemsize), shape, dtype)

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Device memory at ``address`` as a tensor, which does not own it."""
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        if self._ordinal is None:
            raw = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
            return torch.frombuffer(raw, dtype=dtype).view(shape)
        # Words of the same size: the interface has no name for bfloat16.
        words = torch.as_tensor(_Words(address, shape, dtype.itemsize), device=self.torch_device)
        assert words.data_ptr() == address, "torch has copied what it should look at"
        assert words.dtype == _TORCH_WORDS[dtype.itemsize], words.dtype
        return words.view(dtype)

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A new array of zeros in pinned host memory. Raises ``CudaError``."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        address = self._driver.allocate_pinned(max(1, nbytes))
        self._pinned.append(address)
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        array: npt.NDArray[Any] = raw.view(dtype).reshape(shape)
        array[...] = 0
        return array

    @property
    def torch_device(self) -> torch.device:
        """Where torch puts what goes with this memory."""
        return torch.device("cpu") if self._ordinal is None else torch.device("cuda", self._ordinal)

    def close(self) -> None:
        """Frees everything; the GPU must be done with it, and views are dangling afterwards. Idempotent."""
        for address in self._device:
            self._driver.free(address)
        for address in self._pinned:
            self._driver.free_pinned(address)
        self._device.clear()
        self._pinned.clear()


class _Words:
    """Memory as other libraries look at it without copying."""

    def __init__(self, address: int, shape: tuple[int, ...], itemsize: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": _WORDS[itemsize],
            "strides": None,
            "version": 3,
        }


def address_of(array: npt.NDArray[Any] | torch.Tensor) -> int:
    """Where an array or a tensor begins."""
    return array.data_ptr() if isinstance(array, torch.Tensor) else int(array.ctypes.data)
