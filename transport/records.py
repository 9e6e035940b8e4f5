"""Every binary record that crosses processes: names, struct formats, magics, versions, sizes. Little-endian, no hidden padding.

Regions that tools inspect (plan ring, mailbox) begin with a self-describing header. A record guarded by a CRC-32 (zlib's
polynomial) says in its docstring which bytes the CRC covers.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np

RECORDS_VERSION: Final = 3
"""Raised with every change in this file; a region of another version is refused."""

CACHE_LINE: Final = 64
WORD: Final = 8


def align(nbytes: int, unit: int = CACHE_LINE) -> int:
    """``nbytes`` rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


_NUMPY: Final = {"B": "u1", "I": "<u4", "i": "<i4", "Q": "<u8", "q": "<i8", "d": "<f8"}


class Record:
    """A fixed record: (name, struct code) in order, packed without padding; ``dtype`` is the same for numpy."""

    __slots__ = ("dtype", "names", "nbytes", "offsets", "pack", "pack_into", "unpack_from")

    def __init__(self, *fields: tuple[str, str]) -> None:
        layout = struct.Struct("<" + "".join(code for _, code in fields))
        self.dtype: np.dtype[Any] = np.dtype([(name, _NUMPY[code]) for name, code in fields])
        self.names: tuple[str, ...] = tuple(name for name, _ in fields)
        self.nbytes: int = layout.size
        self.offsets: dict[str, int] = {}
        end = 0
        for name, code in fields:
            self.offsets[name] = end
            end += struct.calcsize("<" + code)
        self.pack = layout.pack
        self.pack_into = layout.pack_into
        self.unpack_from = layout.unpack_from

    def read(self, buffer: bytes | bytearray | memoryview, offset: int = 0) -> dict[str, int | float]:
        """The record at ``offset`` by field name: for tools; hot paths unpack into a tuple."""
        return dict(zip(self.names, self.unpack_from(buffer, offset), strict=True))


def magic(text: bytes) -> int:
    """Eight (or four) characters as the word that they are in memory."""
    return int.from_bytes(text, "little")


# Plan ring. Region: RING_HEADER, one line for each reader, then the slots; offsets are ``RingLayout``'s.

RING_MAGIC: Final = magic(b"AFORERNG")
RING_HEADER: Final = Record(
    ("magic", "Q"),
    ("version", "I"),
    ("num_readers", "I"),
    ("num_slots", "I"),
    ("num_attention", "I"),
    ("max_shares", "I"),
    ("max_copies", "I"),
    ("num_experts", "I"),
    ("num_redundant", "I"),
    ("epoch", "Q"),
    ("writer_pid", "Q"),
)
"""The magic is stored last, with release: whoever sees it sees the rest."""

READER_LINE: Final = Record(("cursor", "Q"), ("stamp_ns", "Q"))
"""Written by one reader only. ``cursor``: the sequence it reads next. ``stamp_ns``: when it last moved or said that it lives."""

SLOT_LINE: Final = Record(("published", "Q"), ("stamp_ns", "Q"))
"""``published`` is sequence + 1, stored last with release; 0 before the slot's first entry. ``stamp_ns``: when."""

ENTRY_MAGIC: Final = magic(b"PLNE")
ENTRY_HEADER: Final = Record(
    ("magic", "I"),
    ("header_crc", "I"),
    ("body_crc", "I"),
    ("kind", "B"),
    ("phase", "B"),
    ("start", "B"),
    ("reserved", "B"),
    ("epoch", "Q"),
    ("sequence", "Q"),
    ("target", "Q"),
    ("cancels", "q"),
    ("demand_crc", "I"),
    ("num_shares", "I"),
    ("num_copies", "I"),
    ("num_attention", "I"),
)
"""Followed by tokens_A (int32), copies and shares. ``header_crc`` covers everything after itself up to the end of tokens_A
(so ``body_crc`` too); ``body_crc`` the used copies, then the used shares. Two, so that an entry whose plan is broken still
names its target, which then runs on primaries.
"""
ENTRY_CRC_FROM: Final = ENTRY_HEADER.offsets["body_crc"]
COPY: Final = Record(("layer", "i"), ("expert", "i"), ("worker", "i"), ("slot", "i"))
COPY_CODE: Final = "4I"
SHARE: Final = Record(("expert", "i"), ("worker", "i"), ("slot", "i"), ("count", "i"), ("generation", "q"))
SHARE_CODE: Final = "4Iq"
"""For many at once. Unsigned, unlike the record: a negative number is refused when packed, and is out of range when unpacked."""

VERDICT_BITS: Final = 8
"""A verdict cell is (sequence + 1) << 8 | verdict: a verdict on the slot's previous entry is never taken for one on this."""


def ring_entry_dtype(num_attention: int, max_copies: int, max_shares: int) -> np.dtype[Any]:
    """The entry as one numpy record: header fields, ``tokens_A`` [A], ``copies`` [max_copies], ``shares`` [max_shares].

    A compiled core fills a [1] array of it (numba takes nested records). Used copies and shares come first, so that an entry
    is a prefix of the record: what lies behind the last used share is not written.
    """
    copies_at = align(ENTRY_HEADER.nbytes + 4 * num_attention, WORD)
    shares_at = copies_at + COPY.nbytes * max_copies
    header: dict[str, Any] = {name: ENTRY_HEADER.dtype[name] for name in ENTRY_HEADER.names}
    formats = [
        *header.values(),
        ("<i4", (num_attention,)),
        (COPY.dtype, (max_copies,)),
        (SHARE.dtype, (max_shares,)),
    ]
    return np.dtype(
        {
            "names": [*header, "tokens_A", "copies", "shares"],
            "formats": formats,
            "offsets": [*ENTRY_HEADER.offsets.values(), ENTRY_HEADER.nbytes, copies_at, shares_at],
            "itemsize": align(shares_at + SHARE.nbytes * max_shares),
        }
    )


# Demand mailbox. Region: MAILBOX_HEADER in its own line, then a slot for each (attention worker, microbatch).
# Where the policy wants predictions, a second region of the same form has those of each microbatch's next target.

MAILBOX_MAGIC: Final = magic(b"AFOREMBX")
MAILBOX_HEADER: Final = Record(
    ("magic", "Q"),
    ("version", "I"),
    ("num_attention", "I"),
    ("num_microbatches", "I"),
    ("num_experts", "I"),
    ("epoch", "Q"),
)
DEMAND_HEADER: Final = Record(
    ("crc", "I"),
    ("num_experts", "I"),
    ("epoch", "Q"),
    ("target", "Q"),
    ("source", "I"),
    ("phase", "I"),
)
"""Followed by the counts (int32 [E]). ``crc`` covers everything after itself, counts included."""
DEMAND_CRC_FROM: Final = DEMAND_HEADER.offsets["num_experts"]
COUNT_DTYPE: Final[np.dtype[np.int32]] = np.dtype("<i4")

# Exchange. Input slot: INPUT_HEADER line, hidden, ids, weights. Reply slot: REPLY_HEADER line, rows, REPLY_TRAILER.

INPUT_HEADER: Final = Record(("target", "Q"), ("epoch", "Q"), ("tokens", "Q"))
"""``target`` is stored last, with release."""
MIRROR_HEADER: Final = Record(("first", "Q"), ("target", "Q"), ("epoch", "Q"), ("tokens", "Q"), ("last", "Q"))
"""What an attention worker writes of it into another node's mirror. ``first`` and ``last``: the number of this write into the slot,
from 1; where they are not both the number of the notification, a later write is landing."""
REPLY_HEADER: Final = Record(
    ("target", "Q"), ("epoch", "Q"), ("tokens", "I"), ("worker", "I"), ("first", "I"), ("count", "I"), ("here", "I")
)
"""``tokens``: rows of the target; of these the reply has ``count``, from ``first`` on; ``here`` of them lie behind the header (all,
or none where they lie in a GPU's memory)."""
REPLY_TRAILER: Final = Record(("target", "Q"), ("epoch", "Q"))
"""Right behind the rows (aligned to 8): both ends name the target."""
HIDDEN_DTYPE: Final[np.dtype[np.float32]] = np.dtype("<f4")
ID_DTYPE: Final[np.dtype[np.int32]] = np.dtype("<i4")

# Feedback. Region: a ring of FEEDBACK records for each FFN worker.

FEEDBACK: Final = Record(
    ("crc", "I"),
    ("worker", "I"),
    ("number", "Q"),
    ("epoch", "Q"),
    ("sequence", "Q"),
    ("target", "Q"),
    ("tile_us", "d"),
    ("copy_us", "d"),
    ("window_us", "d"),
    ("exposed_us", "d"),
    ("slack_us", "d"),
    ("copies", "I"),
    ("tiles", "I"),
    ("pairs", "I"),
    ("replica_pairs", "I"),
    ("flags", "I"),
    ("reserved", "I"),
)
"""``number`` counts the worker's records from 1, 0 means never written; ``crc`` covers everything after itself."""
FEEDBACK_CRC_FROM: Final = FEEDBACK.offsets["worker"]
FEEDBACK_NBYTES: Final = align(FEEDBACK.nbytes)

# Streams of the tcp fabric. Writer to owner: FRAME, then ``nbytes`` of payload. Owner to writer: NEWS. Neither lies in a region.

FRAME_MAGIC: Final = magic(b"AFWR")
FRAME: Final = Record(
    ("magic", "I"),
    ("flags", "I"),
    ("region", "I"),
    ("immediate", "I"),
    ("token", "Q"),
    ("offset", "Q"),
    ("nbytes", "Q"),
)
"""One write. ``token`` is the region's random number: a key of an earlier life of the owner does not have it."""
FRAME_NOTIFIES: Final = 1
"""Flag: the owner gets ``immediate`` once the payload lies in the region."""

FRAME_READS: Final = 2
"""Flag: no payload follows; the writer wants ``nbytes`` from there, and ``immediate`` numbers its request."""
READ_LIMIT: Final = 1 << 20
"""Bytes of one request: what an owner may have to keep for a peer that does not take it."""

NEWS_MAGIC: Final = magic(b"AFNW")
NEWS: Final = Record(("magic", "I"), ("kind", "I"), ("value", "Q"))
NEWS_CREDIT: Final = 1
"""``value`` notifications were taken."""
NEWS_REVOKED: Final = 2
"""The region whose token is ``value`` is closed, or was of an earlier life of its owner."""
NEWS_READ: Final = 3
"""What request ``value`` asked for follows, all of it."""
NEWS_UNREAD: Final = 4
"""Request ``value`` asked a region that is closed."""
LINK_TERMS: Final = Record(("credits", "I"))
"""The owner's last word in a link's handshake: notifications that may wait at its regions."""
