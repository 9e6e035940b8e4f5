"""Regions in memory without a name in any file system: nothing can be left behind, however their owner ends.

The layout is that of ``shm_segments``, header page first, and the file can be opened over ``/proc/<pid>/fd`` for as long as its
process lives: tools look into these regions as into those of shared memory.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from afore.core.errors import HostError
from afore.transport.host import TABLE_FULL, host_error
from afore.transport.publish import publishing_words
from afore.transport.shm_segments import HEADER_BYTES, LIVE, REVOKED, STATE_WORD, clean_label, write_header


class PrivateSegment:
    """A region's memory: a memfd (memfd_create(2)), zeroed, its pages taken at once."""

    def __init__(self, *, label: str, region: int, nbytes: int, address: str) -> None:
        """Raises ``HostError`` (no memory, no descriptors)."""
        total = HEADER_BYTES + nbytes
        _require_memory(label, total)
        try:
            fd = os.memfd_create(f"afore-{clean_label(label)}-{region}", os.MFD_CLOEXEC)
        except OSError as error:
            raise host_error(error, "memory", f"cannot make region {label!r}", "see why the kernel refuses") from error
        try:
            os.posix_fallocate(fd, 0, total)
            self._memory = mmap.mmap(fd, total)
        except OSError as error:
            if error.errno in TABLE_FULL:
                raise host_error(error, "memory", f"cannot map region {label!r}", "") from error
            raise _no_memory(label, total, f" ({error.strerror})") from error
        finally:
            os.close(fd)
        self._whole = memoryview(self._memory)
        self._state = publishing_words(self._whole[:HEADER_BYTES])
        write_header(self._whole, region=region, nbytes=nbytes, label=label, address=address)
        self._state[STATE_WORD] = LIVE
        self.view = self._whole[HEADER_BYTES:]
        self.open = True

    def close(self) -> None:
        """Unmaps as soon as no view is left. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._state[STATE_WORD] = REVOKED
        self._state.release()
        for view in (self.view, self._whole):
            with suppress(BufferError):
                view.release()
        # An array over the region keeps it mapped until that array goes; the mapping then closes itself.
        with suppress(BufferError):
            self._memory.close()


def _available_bytes() -> int | None:
    with suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _require_memory(label: str, total: int) -> None:
    # Taking pages that are not there would wake the kernel's killer before it fails.
    available = _available_bytes()
    if available is not None and total > available:
        raise _no_memory(label, total, f", {available:,} are available")


def _no_memory(label: str, total: int, why: str) -> HostError:
    return HostError(
        "memory",
        f"region {label!r} needs {total:,} bytes{why}",
        "use fewer workers, slots or KV blocks on this machine",
    )
