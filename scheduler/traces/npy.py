"""Arrays out of bytes that others wrote: nothing is run, and nothing is allocated that the bytes do not hold."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

MOST_DIMENSIONS = 8
MOST_HEADER = 1 << 16


def array_of(data: bytes) -> NDArray[Any]:
    """The array of a whole ``.npy`` file (a read-only view of ``data``). Raises ``ValueError`` saying what is wrong."""
    head = io.BytesIO(data)
    shape, fortran, dtype = header_of(head)
    body = memoryview(data)[head.tell() :]
    if _nbytes(shape, dtype) != len(body):
        raise ValueError(
            f"an array of shape {shape}, {dtype}, has {_nbytes(shape, dtype):,} bytes; {len(body):,} are there"
        )
    flat = np.frombuffer(body, dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def header_of(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran's order, dtype) of a ``.npy`` file, which then stands at its first value. ``ValueError``."""
    try:
        version = npy_format.read_magic(file)
        read = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"its .npy version is {version}")
        shape, fortran, dtype = read(file, max_header_size=MOST_HEADER)
    except ValueError:
        raise
    except Exception as error:  # a literal that is none: numpy lets several kinds through
        raise ValueError(f"its header is damaged ({type(error).__name__})") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are pickles: they could carry code")
    if len(shape) > MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape) or dtype.itemsize == 0:
        raise ValueError(f"its shape {str(shape)[:80]} cannot be")
    return shape, fortran, dtype


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    total = dtype.itemsize
    for n in shape:
        total *= n
    return total


def bytes_of(array: NDArray[Any]) -> bytes:
    """The array as a ``.npy`` file."""
    out = io.BytesIO()
    npy_format.write_array(out, np.ascontiguousarray(array), allow_pickle=False)
    return out.getvalue()
