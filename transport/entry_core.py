"""Compiled counterparts of ``mailbox.take``, ``entry.encode`` and the ring's store: vectors out, an entry into its slot.

For a compiled caller that goes from demand to entry in one call: nothing here allocates or touches a Python object. The plain
versions are the reference, byte for byte. Regions come as arrays over their memory: the mailbox as 32-bit words, the ring as
64-bit words. Little-endian machines only, as all records are.

Letters: A attention workers, E experts, N workers, R redundant slots of the worker that has most, X shares.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from afore.core.plan import EntryKind
from afore.core.target import LAYER_BITS, MICROBATCH_BITS, Phase
from afore.transport.mailbox import MailboxLayout
from afore.transport.publish_atomic import store_release_at
from afore.transport.records import (
    CACHE_LINE,
    COPY,
    DEMAND_CRC_FROM,
    DEMAND_HEADER,
    ENTRY_CRC_FROM,
    ENTRY_HEADER,
    ENTRY_MAGIC,
    MAILBOX_HEADER,
    SHARE,
    SLOT_LINE,
    WORD,
    align,
)
from afore.transport.ring_layout import RingLayout, entry_dtype

Words32 = NDArray[np.uint32]
Words64 = NDArray[np.uint64]
Integers64 = NDArray[np.int64]
# Without reference counts: only for callers of the same kind, which hold no array beyond the call.
compiled = njit(nogil=True, error_model="numpy", _nrt=False)

HALF: Final = 4
"""Bytes of a 32-bit word."""

# Where ``wire_shape`` keeps what it says; positions in 32-bit words are called ``…_AT32``, in 64-bit words ``…_AT64``.
W_EPOCH, W_ATTENTION, W_MICROBATCHES, W_EXPERTS, W_MAILBOX_AT32, W_VECTOR_SLOT32, W_VECTOR32 = 0, 1, 2, 3, 4, 5, 6
W_RING_AT64, W_RING_SLOT64, W_RING_SLOTS, W_COPIES_AT64, W_SHARES_AT64 = 7, 8, 9, 10, 11
W_SIZE = 12

_DEMAND_CRC32 = DEMAND_CRC_FROM // HALF
_DEMAND_EXPERTS32 = DEMAND_HEADER.offsets["num_experts"] // HALF
_DEMAND_EPOCH32 = DEMAND_HEADER.offsets["epoch"] // HALF
_DEMAND_TARGET32 = DEMAND_HEADER.offsets["target"] // HALF
_DEMAND_SOURCE32 = DEMAND_HEADER.offsets["source"] // HALF
_DEMAND_HEADER32 = DEMAND_HEADER.nbytes // HALF

_LINE64 = CACHE_LINE // WORD
_STAMP64 = SLOT_LINE.offsets["stamp_ns"] // WORD
_MAGIC32 = ENTRY_HEADER.offsets["magic"] // HALF
_HEADER_CRC32 = ENTRY_HEADER.offsets["header_crc"] // HALF
_BODY_CRC32 = ENTRY_HEADER.offsets["body_crc"] // HALF
_KIND32 = ENTRY_HEADER.offsets["kind"] // HALF  # kind, phase, start and the reserved byte
_EPOCH64 = ENTRY_HEADER.offsets["epoch"] // WORD
_SEQUENCE64 = ENTRY_HEADER.offsets["sequence"] // WORD
_TARGET64 = ENTRY_HEADER.offsets["target"] // WORD
_CANCELS64 = ENTRY_HEADER.offsets["cancels"] // WORD
_DEMAND32 = ENTRY_HEADER.offsets["demand_crc"] // HALF
_SHARES32 = ENTRY_HEADER.offsets["num_shares"] // HALF
_COPIES32 = ENTRY_HEADER.offsets["num_copies"] // HALF
_ATTENTION32 = ENTRY_HEADER.offsets["num_attention"] // HALF
_HEADER32 = ENTRY_HEADER.nbytes // HALF
_CRC_FROM32 = ENTRY_CRC_FROM // HALF
_COPY64 = COPY.nbytes // WORD
_SHARE64 = SHARE.nbytes // WORD
_PLAN = int(EntryKind.PLAN) | int(Phase.DECODE) << 8
_START_SHIFT = 16
_NO_CANCEL = 2**64 - 1
_ONES = 0xFFFFFFFF


def wire_shape(mailbox: MailboxLayout, ring: RingLayout, epoch: int) -> Integers64:
    """What the compiled functions must know of an epoch's mailbox and ring, as one int64 vector (``W_…``)."""
    fields: Any = entry_dtype(ring).fields
    shape = np.zeros(W_SIZE, np.int64)
    shape[W_EPOCH], shape[W_ATTENTION] = epoch, mailbox.num_attention
    shape[W_MICROBATCHES], shape[W_EXPERTS] = mailbox.num_microbatches, mailbox.num_experts
    shape[W_MAILBOX_AT32] = align(MAILBOX_HEADER.nbytes) // HALF
    shape[W_VECTOR_SLOT32], shape[W_VECTOR32] = mailbox.slot_nbytes // HALF, mailbox.vector_nbytes // HALF
    shape[W_RING_AT64], shape[W_RING_SLOT64] = ring.slots_offset // WORD, ring.slot_nbytes // WORD
    shape[W_RING_SLOTS] = ring.num_slots
    shape[W_COPIES_AT64], shape[W_SHARES_AT64] = fields["copies"][1] // WORD, fields["shares"][1] // WORD
    return shape


def can_compile(*regions: memoryview) -> bool:
    """Whether compiled code may work on these regions: byte order, and an address that words can be read at."""
    return sys.byteorder == "little" and all(
        np.frombuffer(region, np.uint8).ctypes.data % WORD == 0 for region in regions
    )


def wire_stamp() -> int:
    """Checksum of the files whose compiled functions and constants a cached caller contains: numba's cache key has only its own."""
    checksum = 0
    for name in ("entry_core.py", "records.py", "publish_atomic.py"):
        checksum = zlib.crc32((Path(__file__).parent / name).read_bytes(), checksum)
    return checksum


def _crc_tables() -> Words32:
    """Eight tables of CRC-32 (zlib's polynomial, reflected), one behind the other: table k is for a byte with k bytes behind it."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1).astype(np.uint32)
    tables = [table]
    for _ in range(7):
        before = tables[-1]
        tables.append((before >> 8) ^ table[before & 0xFF])
    return np.concatenate(tables).astype(np.uint32)


_TABLES: Final = _crc_tables()


@compiled
def crc32_words(words: Words32, start: int, count: int, crc: int) -> int:
    """``zlib.crc32`` of ``count`` 32-bit words from ``start``, continued from ``crc``; eight bytes at a time."""
    value = np.int64(crc) ^ _ONES
    at = start
    end = start + count
    while at + 1 < end:
        a = value ^ np.int64(words[at])
        b = np.int64(words[at + 1])
        value = (
            np.int64(_TABLES[1792 + (a & 255)])
            ^ np.int64(_TABLES[1536 + ((a >> 8) & 255)])
            ^ np.int64(_TABLES[1280 + ((a >> 16) & 255)])
            ^ np.int64(_TABLES[1024 + ((a >> 24) & 255)])
            ^ np.int64(_TABLES[768 + (b & 255)])
            ^ np.int64(_TABLES[512 + ((b >> 8) & 255)])
            ^ np.int64(_TABLES[256 + ((b >> 16) & 255)])
            ^ np.int64(_TABLES[(b >> 24) & 255])
        )
        at += 2
    if at < end:
        a = value ^ np.int64(words[at])
        value = (
            np.int64(_TABLES[768 + (a & 255)])
            ^ np.int64(_TABLES[512 + ((a >> 8) & 255)])
            ^ np.int64(_TABLES[256 + ((a >> 16) & 255)])
            ^ np.int64(_TABLES[(a >> 24) & 255])
        )
    return int(value ^ _ONES)


@compiled
def _is_word(words: Words32, at: int, value: int) -> bool:
    """Whether the 64-bit number in two 32-bit words is ``value``."""
    low, high = np.int64(words[at]), np.int64(words[at + 1])
    return bool(low == (value & _ONES) and high == ((value >> 32) & _ONES))


@compiled
def take_vector(
    mailbox: Words32, shape: Integers64, attention: int, target: int, raw: Words32, demand: NDArray[np.int32]
) -> bool:
    """Adds the vector of ``attention`` to ``demand`` [E] where its slot holds that of ``target``, whole; says whether.

    ``raw`` is scratch of one vector: the slot is checked and used from a private copy, so that no write slips in between.
    """
    microbatch = (target >> LAYER_BITS) & ((1 << MICROBATCH_BITS) - 1)
    at = shape[W_MAILBOX_AT32] + (attention * shape[W_MICROBATCHES] + microbatch) * shape[W_VECTOR_SLOT32]
    if not _is_word(mailbox, at + _DEMAND_TARGET32, target):
        return False
    count = shape[W_VECTOR32]
    for i in range(count):
        raw[i] = mailbox[at + i]
    if (
        not _is_word(raw, _DEMAND_TARGET32, target)
        or not _is_word(raw, _DEMAND_EPOCH32, shape[W_EPOCH])
        or np.int64(raw[_DEMAND_SOURCE32]) != attention
        or np.int64(raw[_DEMAND_EXPERTS32]) != shape[W_EXPERTS]
        or np.int64(raw[0]) != crc32_words(raw, _DEMAND_CRC32, count - _DEMAND_CRC32, 0)
    ):
        return False
    for e in range(demand.size):
        demand[e] += np.int32(raw[_DEMAND_HEADER32 + e])
    return True


@compiled
def publish_plan(
    ring: Words64,
    shape: Integers64,
    sequence: int,
    stamp_ns: int,
    target: int,
    start: int,
    tokens: NDArray[np.int32],
    demand_crc: int,
    copies: NDArray[np.int32],
    num_copies: int,
    shares: NDArray[np.int32],
    num_shares: int,
    generation: Integers64,
    slots_per_worker: int,
) -> None:
    """Writes a decode target's PLAN entry into the slot of ``sequence``, both CRCs included, and publishes it with its last store.

    ``tokens`` [A]; ``copies`` flat (expert, worker, slot)…; ``shares`` flat (expert, worker, slot, count)…; ``generation`` [N·R]
    of each slot's binding, those of ``copies`` included. The caller has seen that the ring has room and that all of it fits.
    """
    slot = shape[W_RING_AT64] + sequence % shape[W_RING_SLOTS] * shape[W_RING_SLOT64]
    at = slot + _LINE64
    ring32 = ring.view(np.uint32)
    at32 = 2 * at
    copies_at, shares_at = at + shape[W_COPIES_AT64], at + shape[W_SHARES_AT64]
    layer = target & ((1 << LAYER_BITS) - 1)

    ring32[at32 + _MAGIC32] = ENTRY_MAGIC
    ring32[at32 + _KIND32] = _PLAN | start << _START_SHIFT
    ring[at + _EPOCH64] = shape[W_EPOCH]
    ring[at + _SEQUENCE64] = sequence
    ring[at + _TARGET64] = target
    ring[at + _CANCELS64] = _NO_CANCEL
    ring32[at32 + _DEMAND32] = demand_crc
    ring32[at32 + _SHARES32] = num_shares
    ring32[at32 + _COPIES32] = num_copies
    ring32[at32 + _ATTENTION32] = tokens.size
    for a in range(tokens.size):
        ring32[at32 + _HEADER32 + a] = tokens[a]
    header_end32 = at32 + _HEADER32 + tokens.size
    for i in range(header_end32, 2 * copies_at):
        ring32[i] = 0

    for i in range(num_copies):
        to32 = 2 * (copies_at + i * _COPY64)
        ring32[to32] = layer
        ring32[to32 + 1] = copies[3 * i]
        ring32[to32 + 2] = copies[3 * i + 1]
        ring32[to32 + 3] = copies[3 * i + 2]
    copies_end = copies_at + num_copies * _COPY64
    for i in range(copies_end, shares_at):
        ring[i] = 0
    for i in range(num_shares):
        to = shares_at + i * _SHARE64
        worker, cell = shares[4 * i + 1], shares[4 * i + 2]
        ring32[2 * to] = shares[4 * i]
        ring32[2 * to + 1] = worker
        ring32[2 * to + 2] = cell
        ring32[2 * to + 3] = shares[4 * i + 3]
        ring[to + 2] = generation[worker * slots_per_worker + cell]

    body = crc32_words(ring32, 2 * copies_at, 2 * num_copies * _COPY64, 0)
    body = crc32_words(ring32, 2 * shares_at, 2 * num_shares * _SHARE64, body)
    ring32[at32 + _BODY_CRC32] = body
    first32 = at32 + _CRC_FROM32
    ring32[at32 + _HEADER_CRC32] = crc32_words(ring32, first32, header_end32 - first32, 0)
    ring[slot + _STAMP64] = stamp_ns
    store_release_at(ring.ctypes.data + slot * WORD, sequence + 1)
