"""The internal form: a zip file that ``numpy.load`` opens as any ``.npz``, written and read chunk by chunk.

    header.json         ``TraceHeader.to_json``
    000000.rows.npy     a structured array, one element a row (``row_dtype``)
    000000.shares.npy   int32 [X, 4]: the rows' shares one after another, ``row.shares`` of each; left out where there are none
    000000.copies.npy   int32 [X, 5], ``row.copies`` of each
    000000.ids.npy      int32 [X, K] (or the smallest unsigned type that holds E - 1), ``row.ids`` of each
    000001.rows.npy     …
    end.json            {"rows": …, "chunks": …, "digest": BLAKE2b of all members' bytes before, in order}

Members are stored or deflated, with their sizes before them, so that a file that was cut off still has its whole chunks. Its
writer calls it ``NAME.partial`` until it is finished.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.scheduler.traces.records import TraceHeader

HEADER: Final = "header.json"
END: Final = "end.json"
CHUNK_BYTES: Final = 256 << 10
"""Of rows: what a writer collects before it writes."""
MOST_ROWS: Final = 1 << 14
"""Of a chunk."""
MOST_MEMBER: Final = 256 << 20
"""Bytes of a member, unpacked: a reader refuses more before it unpacks it."""
PARTIAL: Final = ".partial"
DIGEST_BYTES: Final = 16

HAS_DEMAND, HAS_IDS, HAS_ANSWER, ASSIGNED, HAS_PROTECTED, HAS_COSTS = (1 << bit for bit in range(6))
"""``row.flags``."""
PARTS: Final = ("shares", "copies", "ids")
"""What rows have a varying number of, in the members' order."""


SCALARS: Final = (
    "step",
    "now_ns",
    "costs",
    "tokens",
    "shares",
    "copies",
    "ids",
    "layer",
    "microbatch",
    "source",
    "event",
    "phase",
    "flags",
)
"""Columns that are no vectors of E or of N·R, in the rows' order."""


def row_dtype(header: TraceHeader) -> np.dtype[Any]:
    """A row of a trace with this header."""
    return np.dtype(
        [
            ("step", "<i8"),
            ("now_ns", "<i8"),
            ("costs", "<f8", (3,)),
            ("tokens", "<i4"),
            ("shares", "<i4"),
            ("copies", "<i4"),
            ("ids", "<i4"),
            ("layer", "<i2"),
            ("microbatch", "<i2"),
            ("source", "<u2"),
            ("event", "u1"),
            ("phase", "u1"),
            ("flags", "u1"),
            ("protected", "u1", (-(-header.workers * header.slots // 8),)),
            ("counts", "<i4", (header.experts,)),
        ]
    )


def rows_per_chunk(header: TraceHeader) -> int:
    """So many rows are written together."""
    return int(min(MOST_ROWS, max(1, CHUNK_BYTES // row_dtype(header).itemsize)))


def ids_dtype(header: TraceHeader) -> np.dtype[Any]:
    """The smallest type that holds an expert's number."""
    return np.dtype("u1" if header.experts <= 1 << 8 else "<u2")


def packed(mask_NR: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """U_t as bits."""
    return np.packbits(mask_NR.reshape(-1))


def unpacked(bits: NDArray[np.uint8], header: TraceHeader) -> NDArray[np.bool_]:
    """The inverse: bool [N, R]."""
    shape = (header.workers, header.slots)
    return np.unpackbits(bits, count=shape[0] * shape[1]).astype(np.bool_).reshape(shape)
