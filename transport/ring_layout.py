"""Where things are in a plan ring's region: header, one line for each reader, then the slots.

Everything that one process writes stands in cache lines of its own: the header and each slot's entry are the writer's, each
reader has one line for cursor and lease, and one line in each slot for its verdict. The number of verdicts that have arrived is
not stored: it is counted from the cells, so it cannot disagree with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from afore.core.errors import ConfigError, RegionRevoked, VersionMismatch, WireError
from afore.transport import records
from afore.transport.entry import INT32_MAX, EntryLimits
from afore.transport.records import CACHE_LINE, RING_HEADER, align

OWNER = "plan ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayout:
    """Shape of a plan ring; writer and readers must agree on all of it."""

    num_readers: int
    """N: FFN workers, which are the readers; workers named by copies and shares are below it."""
    num_slots: int
    """Entries the ring holds; more than M, or the writer waits for the slowest reader within a step."""
    num_attention: int
    """A: attention workers, whose T_a each entry carries."""
    max_shares: int
    """Most shares of an entry; N * R is always enough."""
    max_copies: int
    """Most copies of an entry: B, the planner's copy budget, or more."""
    num_experts: int = INT32_MAX
    """E: experts are below it; by default not checked."""
    num_redundant: int = INT32_MAX
    """Most redundant slots of any worker: slots are below it; by default not checked."""

    def __post_init__(self) -> None:
        lowest = {"num_readers": 1, "num_slots": 1, "num_attention": 1, "num_experts": 1}
        for name in self.__slots__:
            value = getattr(self, name)
            low = lowest.get(name, 0)
            if not low <= value <= INT32_MAX:
                raise ConfigError(f"ring.{name}", f"{value!r} is not from {low} to {INT32_MAX}")

    @property
    def limits(self) -> EntryLimits:
        """What its entries may hold."""
        return EntryLimits(
            num_readers=self.num_readers,
            num_attention=self.num_attention,
            max_shares=self.max_shares,
            max_copies=self.max_copies,
            num_experts=self.num_experts,
            num_redundant=self.num_redundant,
        )

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one entry in its slot."""
        return entry_dtype(self).itemsize

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: its line, the entry, N verdict lines."""
        return CACHE_LINE + self.entry_nbytes + CACHE_LINE * self.num_readers

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region."""
        return self.slots_offset + self.num_slots * self.slot_nbytes

    @property
    def slots_offset(self) -> int:
        """Where the slots begin."""
        return self.reader_offset(self.num_readers)

    def reader_offset(self, rank: int) -> int:
        """Offset of a reader's line (``records.READER_LINE``)."""
        return align(RING_HEADER.nbytes) + CACHE_LINE * rank

    def slot_offset(self, sequence: int) -> int:
        """Offset of the slot that holds ``sequence``: its line (``records.SLOT_LINE``), with the entry behind it.

        A mirror sends line and entry with one one-sided write of ``CACHE_LINE + entry_nbytes`` bytes.
        """
        return self.slots_offset + sequence % self.num_slots * self.slot_nbytes

    def entry_offset(self, sequence: int) -> int:
        """Offset of the entry of ``sequence``."""
        return self.slot_offset(sequence) + CACHE_LINE

    def verdict_offset(self, sequence: int, rank: int) -> int:
        """Offset of the verdict word of reader ``rank`` on ``sequence``."""
        return self.entry_offset(sequence) + self.entry_nbytes + CACHE_LINE * rank


def entry_dtype(layout: RingLayout) -> np.dtype[Any]:
    """The ring's entry as one numpy record, for a compiled core to fill: see ``records.ring_entry_dtype``."""
    return records.ring_entry_dtype(layout.num_attention, layout.max_copies, layout.max_shares)


@dataclass(frozen=True, slots=True)
class RingHeader:
    """What a ring says of itself."""

    layout: RingLayout
    epoch: int
    writer_pid: int


def write_header(buffer: memoryview, header: RingHeader) -> None:
    """Writes all of the header but its magic, which the writer publishes last."""
    layout = header.layout
    shape = (getattr(layout, name) for name in RING_HEADER.names if name in layout.__slots__)
    RING_HEADER.pack_into(buffer, 0, 0, records.RECORDS_VERSION, *shape, header.epoch, header.writer_pid)


def read_header(buffer: memoryview) -> RingHeader:
    """The header of the ring in ``buffer``. Raises ``WireError`` (no ring, or not all of it), ``VersionMismatch``."""
    fields: dict[str, Any] = RING_HEADER.read(buffer) if len(buffer) >= RING_HEADER.nbytes else {}
    if fields.get("magic") != records.RING_MAGIC:
        raise WireError(OWNER, "there is no plan ring in this region", "its writer creates it before readers attach")
    if fields["version"] != records.RECORDS_VERSION:
        raise VersionMismatch(
            OWNER, f"is of version {fields['version']}, this program of {records.RECORDS_VERSION}", "use one release"
        )
    try:
        layout = RingLayout(**{name: fields[name] for name in RingLayout.__slots__})
        nbytes = layout.nbytes
    except ValueError as error:
        raise WireError(OWNER, f"its header makes no sense: {error}") from None
    if len(buffer) < nbytes:
        raise WireError(OWNER, f"its header asks for {nbytes} bytes, the region has {len(buffer)}")
    return RingHeader(layout, fields["epoch"], fields["writer_pid"])


def check_header(buffer: memoryview, layout: RingLayout, epoch: int) -> None:
    """Raises as ``read_header``; ``WireError`` for another layout, ``RegionRevoked`` for another epoch."""
    header = read_header(buffer)
    if header.layout != layout:
        raise WireError(OWNER, f"has {header.layout}, this reader expects {layout}", "both come from one topology")
    if header.epoch != epoch:
        raise RegionRevoked(OWNER, f"belongs to epoch {header.epoch}, this is epoch {epoch}", "map the new ring")
