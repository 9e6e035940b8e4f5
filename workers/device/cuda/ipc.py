"""What an FFN worker publishes of its GPU memory, so that others can open it: a table of handles in a region that they map.

The region's key travels with all others when an epoch opens, and is read as they are: so a new epoch means opening anew.

    header    magic, process, GPU (its 16 bytes), number of allocations
    entries   address, bytes, the driver's 64 bytes
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from afore.core.errors import WireError
from afore.workers.device.cuda.driver import IPC_HANDLE_NBYTES, Driver
from afore.workers.device.cuda.errors import CudaError

_log = logging.getLogger(__name__)

NO_HANDLE = bytes(IPC_HANDLE_NBYTES)
"""Of an allocation that the driver did not export."""
MAGIC = 0x41464F52_45495043
_HEADER = struct.Struct("<QQ16sQ")
_ENTRY = struct.Struct(f"<QQ{IPC_HANDLE_NBYTES}s")


@dataclass(frozen=True, slots=True)
class Exported:
    """One allocation, as its owner knows it."""

    address: int
    nbytes: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class HandleTable:
    """All allocations of one worker."""

    process: int
    gpu: bytes
    allocations: tuple[Exported, ...]

    @staticmethod
    def nbytes(count: int) -> int:
        """Bytes of a table of ``count`` allocations."""
        return _HEADER.size + count * _ENTRY.size

    @classmethod
    def export(
        cls, driver: Driver, gpu: bytes, allocations: Sequence[tuple[int, int]], process: int | None = None
    ) -> HandleTable:
        """The table of (address, bytes) pairs of this process.

        Where the driver exports no memory (some containers and virtual machines), entries have no handle: the workers of this
        process need none, and others are told.
        """
        found = []
        for at, nbytes in allocations:
            try:
                handle = driver.export(at)
            except CudaError as error:
                _log.warning("other processes cannot open this one's GPU memory: %s", error)
                handle = NO_HANDLE
            found.append(Exported(at, nbytes, handle))
        return cls(os.getpid() if process is None else process, gpu, tuple(found))

    def write(self, buffer: memoryview) -> None:
        """Publishes it: the magic word last."""
        for index, one in enumerate(self.allocations):
            _ENTRY.pack_into(buffer, _HEADER.size + index * _ENTRY.size, one.address, one.nbytes, one.handle)
        _HEADER.pack_into(buffer, 0, 0, self.process, self.gpu, len(self.allocations))
        struct.pack_into("<Q", buffer, 0, MAGIC)

    @classmethod
    def read(cls, buffer: memoryview, owner: str, count: int) -> HandleTable:
        """The table of ``owner``, who must have published ``count`` allocations. Raises ``WireError``."""
        if buffer.nbytes < cls.nbytes(count):
            raise WireError(
                owner, f"its table of GPU memory has {buffer.nbytes} bytes", "do all roles serve one model?"
            )
        magic, process, gpu, found = _HEADER.unpack_from(buffer, 0)
        if magic != MAGIC:
            raise WireError(
                owner, "it has published no GPU memory", "start every FFN worker with --device cuda, on one machine"
            )
        if found != count:
            raise WireError(
                owner, f"it has {found} allocations, {count} were expected", "do all roles serve one model?"
            )
        entries = [_ENTRY.unpack_from(buffer, _HEADER.size + index * _ENTRY.size) for index in range(count)]
        return cls(process, gpu, tuple(Exported(*entry) for entry in entries))


class OpenedMemory:
    """Allocations of another worker, mapped here; in one process they need no mapping."""

    def __init__(self, driver: Driver, table: HandleTable, owner: str, process: int | None = None) -> None:
        """``process``: this one's number. Raises ``CudaError``, ``WireError`` where ``owner`` exports none."""
        self._driver = driver
        self._opened: list[int] = []
        self.addresses: list[int] = []
        """Where each allocation begins in this process."""
        here = table.process == (os.getpid() if process is None else process)
        try:
            for one in table.allocations:
                if here:
                    self.addresses.append(one.address)
                elif one.handle == NO_HANDLE:
                    raise WireError(
                        owner,
                        "its driver lets no other process open its GPU memory (CUDA IPC)",
                        "see its warning; run outside the container, or all roles in one process (Cluster.start(inproc=True))",
                    )
                else:
                    self._opened.append(driver.open(one.handle))
                    self.addresses.append(self._opened[-1])
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps them; copies out of them must be done. Idempotent."""
        while self._opened:
            self._driver.shut(self._opened.pop())
        self.addresses = []
