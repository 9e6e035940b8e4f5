"""What a plan ring or a mailbox holds at a moment, for tools: read from a copy of the region, nothing is attached or changed."""

from __future__ import annotations

from dataclasses import dataclass

from afore.core.plan import PlanEntry, Verdict
from afore.transport import mailbox
from afore.transport.entry import EntryCodec, Refusal
from afore.transport.mailbox import MailboxLayout, Peeked, VectorState
from afore.transport.records import READER_LINE, SLOT_LINE, VERDICT_BITS
from afore.transport.ring_layout import RingHeader, read_header


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """One slot of a ring."""

    slot: int
    sequence: int | None
    """Of the entry it holds; None before its first."""
    entry: PlanEntry | None
    """None where it is empty or cannot be read; without shares and copies where only its header can."""
    problem: str
    """Why it cannot be read; empty when it can."""
    verdicts: tuple[Verdict, ...]
    published_ns: int


@dataclass(frozen=True, slots=True)
class ReaderSnapshot:
    """One reader of a ring."""

    rank: int
    cursor: int
    """Sequence that it reads next."""
    behind: int
    """Entries it has not moved past."""
    seen_ns: int
    """Its last sign of life; 0 before the first."""


@dataclass(frozen=True, slots=True)
class RingSnapshot:
    """A whole ring."""

    header: RingHeader
    last_sequence: int | None
    """Of the latest entry; None before the first."""
    slots: tuple[SlotSnapshot, ...]
    readers: tuple[ReaderSnapshot, ...]

    @property
    def torn(self) -> bool:
        """Whether some slot could not be read: it may have been written at that moment, so look again."""
        return any(slot.problem for slot in self.slots)


def ring_snapshot(region: bytes) -> RingSnapshot:
    """Reads a copy of a ring's region. Raises ``WireError`` and ``VersionMismatch`` as ``read_header``."""
    header = read_header(memoryview(region))
    layout = header.layout
    codec = EntryCodec(layout.limits)
    slots = tuple(_slot(region, header, codec, slot) for slot in range(layout.num_slots))
    published = [slot.sequence for slot in slots if slot.sequence is not None]
    last = max(published, default=None)
    readers = []
    for rank in range(layout.num_readers):
        cursor, seen_ns = READER_LINE.unpack_from(region, layout.reader_offset(rank))
        readers.append(ReaderSnapshot(rank, cursor, 0 if last is None else max(0, last + 1 - cursor), seen_ns))
    return RingSnapshot(header, last, slots, tuple(readers))


def _slot(region: bytes, header: RingHeader, codec: EntryCodec, slot: int) -> SlotSnapshot:
    layout = header.layout
    published, stamp_ns = SLOT_LINE.unpack_from(region, layout.slot_offset(slot))
    if published == 0:
        return SlotSnapshot(slot, None, None, "", (), 0)
    sequence = published - 1
    at = layout.entry_offset(slot)
    decoded = codec.decode(region[at : at + layout.entry_nbytes], sequence, header.epoch)
    verdicts = tuple(_verdict(region, layout.verdict_offset(slot, r), sequence) for r in range(layout.num_readers))
    if isinstance(decoded, Refusal):
        return SlotSnapshot(slot, sequence, decoded.entry, decoded.reason, verdicts, stamp_ns)
    return SlotSnapshot(slot, sequence, decoded, "", verdicts, stamp_ns)


def _verdict(region: bytes, offset: int, sequence: int) -> Verdict:
    cell = int.from_bytes(region[offset : offset + 8], "little")
    if cell >> VERDICT_BITS != sequence + 1:
        return Verdict.NONE
    code = cell & ((1 << VERDICT_BITS) - 1)
    return Verdict(code) if code in tuple(Verdict) else Verdict.BAD_CRC


@dataclass(frozen=True, slots=True)
class VectorSnapshot:
    """One slot of a mailbox."""

    attention: int
    microbatch: int
    seen: Peeked


@dataclass(frozen=True, slots=True)
class MailboxSnapshot:
    """A whole mailbox."""

    layout: MailboxLayout
    epoch: int
    slots: tuple[VectorSnapshot, ...]

    @property
    def torn(self) -> bool:
        """Whether some vector does not match its CRC: it may have been landing at that moment, so look again."""
        return any(slot.seen.state is VectorState.TORN for slot in self.slots)


def mailbox_snapshot(region: bytes) -> MailboxSnapshot:
    """Reads a copy of a mailbox's region. Raises ``WireError`` and ``VersionMismatch`` as ``mailbox.read_header``."""
    layout, epoch = mailbox.read_header(memoryview(region))
    slots = []
    for attention in range(layout.num_attention):
        for microbatch in range(layout.num_microbatches):
            at = layout.offset(attention, microbatch)
            raw = region[at : at + layout.vector_nbytes]
            seen = mailbox.peek_vector(raw, layout, attention, microbatch, epoch)
            slots.append(VectorSnapshot(attention, microbatch, seen))
    return MailboxSnapshot(layout, epoch, tuple(slots))
