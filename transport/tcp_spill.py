"""Copies of what the kernel has not taken yet: memory that is used again, for fresh pages cost several times the copying."""

from __future__ import annotations

import mmap
from contextlib import suppress

from afore.transport.api import Buffer

SMALL_BYTES = 256 << 10
"""Up to here the allocator's own memory serves."""
_AREAS = 2
"""Areas that one stream keeps: while one is being sent, the next write is copied into the other."""


class Spill:
    """The copies of one stream.

    An area that is free keeps its pages until the kernel needs them elsewhere (``MADV_FREE``), so that it holds no memory from
    anybody who is short of it.
    """

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def copy(self, data: Buffer) -> memoryview:
        """A copy of ``data``; ``done`` once it is not needed any more."""
        nbytes = len(data)
        if nbytes <= SMALL_BYTES:
            return memoryview(bytes(data))
        fitting = [area for area in self._free if len(area) >= nbytes]
        if fitting:
            area = min(fitting, key=len)
            self._free.remove(area)
        else:
            area = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        copied = memoryview(area)[:nbytes]
        copied[:] = data
        return copied

    def done(self, copied: memoryview) -> None:
        """The memory of a copy, or of what is left of one, may serve the next; the largest are kept."""
        area = copied.obj
        if not isinstance(area, mmap.mmap):
            return
        self._free.append(area)
        if len(self._free) > _AREAS:
            self._free.remove(min(self._free, key=len))
        else:
            with suppress(OSError):  # a kernel without it: the pages stay
                area.madvise(mmap.MADV_FREE)
