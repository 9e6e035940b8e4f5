"""Entries in as many bytes as they use, and decoded once for all who read the same."""

from __future__ import annotations

from dataclasses import replace

from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, PlanRules, Share, Verdict
from afore.core.target import Phase, Target
from afore.transport.entry import EntryCodec, EntryLimits, Refusal
from afore.transport.entry_once import Decoders

LIMITS = EntryLimits(num_readers=3, num_attention=2, max_shares=6, max_copies=3, num_experts=16, num_redundant=2)
EPOCH = 3
ENTRY = PlanEntry(
    kind=EntryKind.PLAN,
    epoch=EPOCH,
    sequence=4,
    target=Target(layer=1, microbatch=2, step=7),
    phase=Phase.DECODE,
    tokens_A=(5, 0),
    demand_crc=0xDEADBEEF,
    shares=(Share(3, 1, 0, 4, 4), Share(9, 2, 1, 7, -1), Share(9, 1, 1, 2, -1)),
    copies=(Copy(1, 3, 1, 0),),
    start=CopyStart.NOW,
    cancels=-1,
)


def slot(entry: PlanEntry) -> bytes:
    """An entry in a slot whose other bytes are of another."""
    codec = EntryCodec(LIMITS)
    return bytes(codec.encode(entry)).ljust(codec.nbytes, b"\xff")


def test_what_is_used_of_a_slot_is_enough() -> None:
    codec = EntryCodec(LIMITS)
    for entry in (ENTRY, replace(ENTRY, shares=()), replace(ENTRY, shares=(), copies=())):
        memory = memoryview(b"\xff" * 64 + slot(entry))
        used = codec.used_nbytes(memory, 64)
        assert used < codec.nbytes
        assert codec.decode(bytes(memory[64 : 64 + used]), 4, EPOCH) == entry


def test_an_entry_that_was_longer_when_its_header_was_copied_is_refused() -> None:
    codec, raw = EntryCodec(LIMITS), slot(ENTRY)
    short = codec.used_nbytes(memoryview(slot(replace(ENTRY, shares=ENTRY.shares[:1]))), 0)
    refusal = codec.decode(raw[:short], 4, EPOCH)
    assert isinstance(refusal, Refusal)
    assert (refusal.verdict, refusal.entry) == (Verdict.BAD_CRC, replace(ENTRY, shares=(), copies=()))


def test_no_header_asks_for_more_than_a_slot_has() -> None:
    codec = EntryCodec(LIMITS)
    assert codec.used_nbytes(memoryview(b"\xff" * codec.nbytes), 0) == codec.nbytes


def test_the_same_bytes_are_decoded_once_and_others_are_not_taken_for_them() -> None:
    decoders = Decoders()
    first, second = decoders.of(LIMITS), decoders.of(LIMITS)
    found = first.decode(slot(ENTRY), 4, EPOCH)
    assert second.decode(slot(ENTRY), 4, EPOCH) is found
    assert decoders.decoded == 1
    assert second.decode(slot(replace(ENTRY, demand_crc=1)), 4, EPOCH) == replace(ENTRY, demand_crc=1)
    assert isinstance(second.decode(slot(ENTRY), 5, EPOCH), Refusal), "of another sequence"
    assert isinstance(second.decode(slot(ENTRY), 4, EPOCH + 1), Refusal), "of another epoch"
    assert decoders.decoded == 4
    for sequence in range(40):
        entry = replace(ENTRY, sequence=sequence, shares=(), copies=())
        assert first.decode(slot(entry), sequence, EPOCH) == entry
    assert second.decode(slot(ENTRY), 4, EPOCH) == found, "decoded anew once it is forgotten"


class Counting:
    """Rules that know how often they were asked."""

    def __init__(self, kept: bool) -> None:
        self.kept, self.asked = kept, 0

    def kept_by(self, entry: PlanEntry) -> bool:
        self.asked += 1
        return self.kept


def test_what_is_looked_up_in_an_entry_is_its_workers_and_no_part_of_it() -> None:
    entry = replace(ENTRY)
    assert entry.shares_of(1) == (ENTRY.shares[0], ENTRY.shares[2])
    assert (entry.shares_of(0), entry.copies_of(1), entry.copies_of(2)) == ((), ENTRY.copies, ())
    assert entry.shares_X4().tolist() == [[3, 1, 0, 4], [9, 2, 1, 7], [9, 1, 1, 2]]
    assert not entry.shares_X4().flags.writeable
    assert entry == ENTRY
    assert replace(entry, shares=()).shares_of(1) == (), "another entry looks for itself"
    rules: list[PlanRules] = [Counting(True), Counting(False)]
    assert [entry.keeps(one) for one in (*rules, rules[1])] == [True, False, False]
    assert [one.asked for one in rules if isinstance(one, Counting)] == [1, 1]
