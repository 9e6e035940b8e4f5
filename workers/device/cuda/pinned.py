"""Regions of host memory that GPUs reach where they lie: pinned for as long as a group uses them."""

from __future__ import annotations

import numpy as np

from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.errors import CudaError

_ALREADY = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"


class PinnedRegions:
    """What this process has pinned; others in it may have pinned the same."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._mine: list[int] = []
        self.reason = "it is in no region"
        """Why the last one that could not be pinned could not."""

    def add(self, memory: memoryview | None) -> bool:
        """Pins a region; whether GPUs reach it now. Where they do not, ``reason`` says why."""
        if memory is None or memory.nbytes == 0:
            return False
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        try:
            self._driver.register(address, memory.nbytes, read_only=memory.readonly)
        except CudaError as error:
            self.reason = error.problem
            return error.code == _ALREADY
        self._mine.append(address)
        return True

    def close(self) -> None:
        """Unpins what was pinned here; no copy may be under way. Idempotent."""
        while self._mine:
            self._driver.unregister(self._mine.pop())
