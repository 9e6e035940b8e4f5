"""Memory that the device may touch: where it lies, and its registration."""

from __future__ import annotations

import ctypes
import errno
import mmap
from contextlib import suppress
from typing import Protocol, cast, runtime_checkable

from afore.core.errors import ConfigError, HostError
from afore.transport.host import host_error
from afore.transport.verbs.binding import LOCAL_WRITE, Memory, OpenDevice


@runtime_checkable
class Tensor(Protocol):
    """What a torch tensor has; torch is not imported for it."""

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...

    def element_size(self) -> int: ...

    def is_contiguous(self) -> bool: ...


def address_of(memory: object) -> tuple[int, memoryview]:
    """Where ``memory`` (a writable buffer, or a tensor in this machine's memory) begins, and its bytes. Raises ``ConfigError``."""
    if isinstance(memory, Tensor):
        device = str(getattr(memory, "device", "cpu"))
        if not device.startswith("cpu"):
            raise ConfigError("memory", f"a tensor on {device}", "give one in this machine's memory")
        if not memory.is_contiguous():
            raise ConfigError("memory", "a tensor that is not contiguous", "copy it into one piece first")
        nbytes = memory.numel() * memory.element_size()
        raw = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        return memory.data_ptr(), memoryview(raw).cast("B")
    try:
        view = memoryview(cast(bytearray, memory)).cast("B")
    except TypeError as error:
        raise ConfigError("memory", f"no memory in one piece ({error})", "give a contiguous buffer") from error
    if view.readonly:
        raise ConfigError("memory", "a buffer that is read-only", "give a writable one")
    return view_address(view), view


def view_address(view: memoryview) -> int:
    """Where a writable view of bytes begins; 0 for an empty one, which lies nowhere."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def register(device: OpenDevice, address: int, nbytes: int, access: int, what: str) -> Memory:
    """Registers memory for the device. Raises ``HostError`` with the remedy."""
    try:
        return device.register(address, nbytes, access)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
            raise HostError(
                "locked memory",
                f"cannot register {nbytes:,} bytes for {what} ({error})",
                "raise the limit (ulimit -l unlimited), or give the process CAP_IPC_LOCK",
            ) from error
        raise host_error(
            error, "RDMA device", f"cannot register {nbytes:,} bytes for {what}", "see the kernel's log"
        ) from error


class LocalMemory:
    """Zeroed anonymous memory of a link, registered: receives, inline payloads, staging."""

    def __init__(self, device: OpenDevice, nbytes: int, what: str) -> None:
        self._pages = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._pages)
        self.address = view_address(self.view)
        try:
            self._memory = register(device, self.address, nbytes, LOCAL_WRITE, what)
        except BaseException:
            self._unmap()
            raise
        self.lkey = self._memory.lkey

    def close(self) -> None:
        """Drops the registration, then the memory. Idempotent."""
        self._memory.close()
        self._unmap()

    def _unmap(self) -> None:
        with suppress(BufferError):
            self.view.release()
            self._pages.close()
