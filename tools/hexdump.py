"""Hexdumps of binary records with every field named: offset, bytes as they lie in memory, name, value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from afore.core.target import Target
from afore.transport import records
from afore.transport.mailbox import MailboxLayout
from afore.transport.records import Record
from afore.transport.ring_layout import RingLayout

BYTES_PER_LINE = 16


def fields(region: bytes, at: int, record: Record) -> Iterator[str]:
    """One line for each field of the record at ``at``."""
    values = record.read(region, at)
    ends = [*list(record.offsets.values())[1:], record.nbytes]
    for (name, offset), end in zip(record.offsets.items(), ends, strict=True):
        data = region[at + offset : at + end]
        yield line(at + offset, data, f"{name} = {_shown(name, values[name], data)}")


def _shown(name: str, value: int | float, data: bytes) -> str:
    if name == "magic":
        return repr(data.decode("ascii", "replace"))
    if name == "target" and isinstance(value, int) and value:
        with suppress(ValueError):
            return f"{value:#x} ({Target.from_word(value)})"
    return f"{value} ({value:#x})" if isinstance(value, int) and value > 9 else str(value)


def line(at: int, data: bytes, text: str) -> str:
    """``00000040  0a 00 00 00              text``"""
    return f"  {at:08x}  {data.hex(' '):<{BYTES_PER_LINE * 3 - 1}}  {text}"


def _array(region: bytes, at: int, count: int, name: str) -> Iterator[str]:
    """int32 values, four on a line."""
    for first in range(0, count, 4):
        size = 4 * min(4, count - first)
        data = region[at + 4 * first : at + 4 * first + size]
        values = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, size, 4)]
        yield line(at + 4 * first, data, f"{name}[{first}:{first + size // 4}] = {' '.join(map(str, values))}")


def ring(region: bytes, layout: RingLayout) -> Iterator[str]:
    """Header, readers, and each slot with its used copies, shares and verdict cells."""
    yield "header"
    yield from fields(region, 0, records.RING_HEADER)
    for rank in range(layout.num_readers):
        yield f"reader ffn-{rank}"
        yield from fields(region, layout.reader_offset(rank), records.READER_LINE)
    copies_at = records.align(records.ENTRY_HEADER.nbytes + 4 * layout.num_attention, records.WORD)
    shares_at = copies_at + records.COPY.nbytes * layout.max_copies
    for slot in range(layout.num_slots):
        if not any(region[layout.slot_offset(slot) : layout.slot_offset(slot) + layout.slot_nbytes]):
            yield f"slot {slot}: never written"
            continue
        yield f"slot {slot}"
        yield from fields(region, layout.slot_offset(slot), records.SLOT_LINE)
        entry = layout.entry_offset(slot)
        header = records.ENTRY_HEADER.read(region, entry)
        yield from fields(region, entry, records.ENTRY_HEADER)
        yield from _array(region, entry + records.ENTRY_HEADER.nbytes, layout.num_attention, "tokens_A")
        # Counts of a torn entry may be anything.
        for index in range(min(int(header["num_copies"]), layout.max_copies)):
            yield f"  copies[{index}]"
            yield from fields(region, entry + copies_at + records.COPY.nbytes * index, records.COPY)
        for index in range(min(int(header["num_shares"]), layout.max_shares)):
            yield f"  shares[{index}]"
            yield from fields(region, entry + shares_at + records.SHARE.nbytes * index, records.SHARE)
        for rank in range(layout.num_readers):
            at = layout.verdict_offset(slot, rank)
            cell = int.from_bytes(region[at : at + records.WORD], "little")
            of, verdict = (cell >> records.VERDICT_BITS) - 1, cell & ((1 << records.VERDICT_BITS) - 1)
            text = f"verdict[ffn-{rank}] = {verdict} on sequence {of}" if cell else f"verdict[ffn-{rank}] = none"
            yield line(at, region[at : at + records.WORD], text)


def mailbox(region: bytes, layout: MailboxLayout) -> Iterator[str]:
    """Header, and each slot with its counts."""
    yield "header"
    yield from fields(region, 0, records.MAILBOX_HEADER)
    for attention in range(layout.num_attention):
        for microbatch in range(layout.num_microbatches):
            at = layout.offset(attention, microbatch)
            name = f"slot attention-{attention} microbatch {microbatch}"
            if not any(region[at : at + layout.vector_nbytes]):
                yield f"{name}: never written"
                continue
            yield name
            yield from fields(region, at, records.DEMAND_HEADER)
            yield from _array(region, at + records.DEMAND_HEADER.nbytes, layout.num_experts, "counts_E")
