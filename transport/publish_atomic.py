"""Compiled release stores, acquire loads and fences, for machines that reorder stores (``publish`` loads this only there).

The source is LLVM's atomic instructions through a numba intrinsic; about 200 ns a call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from afore.transport.publish import WORD_BYTES


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def _store(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _load(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", WORD_BYTES)

    return types.uint64(types.uint64), generate


@intrinsic
def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit(nogil=True)
def store_release_at(address: int, value: int) -> None:
    """Stores ``value`` at ``address`` (aligned to 8) with release: for compiled callers, which publish with their last store."""
    _store(np.uint64(address), np.uint64(value))


@njit(types.void(types.uint64, types.uint64), cache=True)
def _store_at(address: int, value: int) -> None:
    _store(address, value)


@njit(types.uint64(types.uint64), cache=True)
def _load_at(address: int) -> int:
    return int(_load(address))


@njit(types.void(), cache=True)
def fence() -> None:
    """A sequentially consistent fence."""
    _fence()


class AtomicWords:
    """``publish.Words`` over a buffer of bytes, by compiled atomics."""

    __slots__ = ("_address", "_length", "_view")

    def __init__(self, buffer: memoryview) -> None:
        self._view = buffer[:]
        self._length = buffer.nbytes // WORD_BYTES
        # The array is dropped at once: an export that stayed would keep the mapping from being closed.
        self._address = int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data) if self._length else 0
        if self._address % WORD_BYTES:
            raise ValueError(f"buffer: starts at an address that is no multiple of {WORD_BYTES}; align it")

    def _at(self, index: int) -> int:
        # Raises ValueError once the view is released; the address alone would be a crash.
        length = self._view.nbytes // WORD_BYTES
        if not 0 <= index < length:
            raise IndexError(f"word {index} of {length}")
        return self._address + index * WORD_BYTES

    def __getitem__(self, index: int, /) -> int:
        return int(_load_at(self._at(index)))

    def __setitem__(self, index: int, value: int, /) -> None:
        if not 0 <= value <= ctypes.c_uint64(-1).value:
            raise ValueError(f"value {value}: does not fit 64 bits unsigned")
        if self._view.readonly:
            raise TypeError("cannot modify read-only memory")
        _store_at(self._at(index), value)

    def __len__(self) -> int:
        return self._length

    def release(self) -> None:
        self._view.release()
