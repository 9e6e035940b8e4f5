"""The plan ring: what is published is what is read, in order, once, and nothing else is ever taken for an entry."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from afore.core.errors import ConfigError, PlanError, RegionRevoked, VersionMismatch, WireError
from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share, Verdict
from afore.core.target import Phase, Target
from afore.transport import records
from afore.transport.entry import EntryCodec, Refusal
from afore.transport.records import CACHE_LINE, ENTRY_HEADER, RING_HEADER
from afore.transport.ring import ReaderLag, RingReader, RingWriter
from afore.transport.ring_layout import RingLayout, entry_dtype, read_header

EPOCH = 3
LAYOUT = RingLayout(
    num_readers=3, num_slots=4, num_attention=2, max_shares=6, max_copies=3, num_experts=16, num_redundant=2
)


def make_ring(layout: RingLayout = LAYOUT) -> tuple[memoryview, RingWriter, list[RingReader]]:
    buffer = memoryview(bytearray(layout.nbytes))
    writer = RingWriter(buffer, layout, EPOCH, pid=4711)
    return buffer, writer, [RingReader(buffer, layout, rank, EPOCH) for rank in range(layout.num_readers)]


def make_entry(sequence: int = 0, **changes: Any) -> PlanEntry:
    entry = PlanEntry(
        kind=EntryKind.PLAN,
        epoch=EPOCH,
        sequence=sequence,
        target=Target(layer=1, microbatch=2, step=sequence),
        phase=Phase.DECODE,
        tokens_A=(5, 0),
        demand_crc=0xDEADBEEF,
        shares=(Share(3, 1, 0, 4, sequence), Share(9, 2, 1, 7, -1)),
        copies=(Copy(1, 3, 1, 0),),
        start=CopyStart.ARRIVAL,
        cancels=-1,
    )
    return replace(entry, **changes)


def entries(sequence: int, layout: RingLayout = LAYOUT) -> st.SearchStrategy[PlanEntry]:
    int32 = st.integers(0, (1 << 31) - 1)
    experts = st.integers(0, layout.num_experts - 1)
    workers = st.integers(0, layout.num_readers - 1)
    slots = st.integers(0, layout.num_redundant - 1)
    share = st.builds(Share, experts, workers, slots, st.integers(1, (1 << 31) - 1), st.integers(-1, sequence))
    copy = st.builds(Copy, int32, experts, workers, slots)
    common: dict[str, st.SearchStrategy[Any]] = {
        "epoch": st.just(EPOCH),
        "sequence": st.just(sequence),
        "target": st.builds(Target, st.integers(0, 2047), st.integers(0, 4095), st.integers(0, (1 << 39) - 3)),
        "phase": st.sampled_from(Phase),
        "tokens_A": st.tuples(*[int32] * layout.num_attention),
        "demand_crc": st.integers(0, (1 << 32) - 1),
        "start": st.sampled_from(CopyStart),
        "cancels": st.just(-1),
        "shares": st.just(()),
        "copies": st.just(()),
    }
    copies = st.lists(copy, max_size=layout.max_copies).map(tuple)
    shares = st.lists(share, max_size=layout.max_shares).map(tuple)
    kinds = [
        st.builds(PlanEntry, kind=st.just(EntryKind.PLAN), **{**common, "copies": copies, "shares": shares}),
        st.builds(PlanEntry, kind=st.just(EntryKind.COPIES), **{**common, "copies": copies, "tokens_A": st.just(())}),
    ]
    if sequence:
        cancels = st.integers(0, sequence - 1)
        kinds.append(st.builds(PlanEntry, kind=st.just(EntryKind.ABORT), **{**common, "cancels": cancels}))
    return st.one_of(kinds)


# Layout


def test_every_writer_has_cache_lines_of_its_own() -> None:
    spans = [(0, RING_HEADER.nbytes)]
    spans += [(LAYOUT.reader_offset(rank), 16) for rank in range(LAYOUT.num_readers)]
    for sequence in range(LAYOUT.num_slots):
        spans += [(LAYOUT.slot_offset(sequence), 16), (LAYOUT.entry_offset(sequence), LAYOUT.entry_nbytes)]
        spans += [(LAYOUT.verdict_offset(sequence, rank), 8) for rank in range(LAYOUT.num_readers)]
    lines: set[int] = set()
    for offset, nbytes in spans:
        own = set(range(offset // CACHE_LINE, (offset + nbytes - 1) // CACHE_LINE + 1))
        assert offset % CACHE_LINE == 0
        assert not own & lines
        lines |= own
    assert max(lines) * CACHE_LINE < LAYOUT.nbytes


def test_struct_and_numpy_agree_on_every_field() -> None:
    dtype: Any = entry_dtype(LAYOUT)
    for name, offset in ENTRY_HEADER.offsets.items():
        assert dtype.fields[name][1] == offset
    assert dtype.fields["tokens_A"][1] == ENTRY_HEADER.nbytes
    assert dtype["shares"].base.itemsize == records.SHARE.nbytes == struct.calcsize("<" + records.SHARE_CODE)
    assert dtype["copies"].base.itemsize == records.COPY.nbytes == struct.calcsize("<" + records.COPY_CODE)
    assert dtype.fields["shares"][1] % 8 == 0
    assert dtype.itemsize == LAYOUT.entry_nbytes


@pytest.mark.parametrize("field", ["num_readers", "num_slots", "num_attention"])
def test_an_impossible_layout_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"ring\.{field}: 0 is not"):
        replace(LAYOUT, **{field: 0})


def test_a_ring_without_redundant_slots_carries_empty_plans() -> None:
    layout = replace(LAYOUT, max_shares=0, max_copies=0, num_redundant=0)
    _, writer, readers = make_ring(layout)
    entry = make_entry(shares=(), copies=())
    writer.publish(entry)
    assert readers[0].peek() == entry


# Attaching


def test_readers_find_the_ring_s_own_description() -> None:
    buffer, _, _ = make_ring()
    header = read_header(buffer)
    assert (header.layout, header.epoch, header.writer_pid) == (LAYOUT, EPOCH, 4711)


def test_attaching_to_something_else_is_refused() -> None:
    buffer, _, _ = make_ring()
    with pytest.raises(WireError, match="there is no plan ring"):
        RingReader(memoryview(bytearray(LAYOUT.nbytes)), LAYOUT, 0, EPOCH)
    with pytest.raises(WireError, match="needs"):
        RingReader(buffer[:-CACHE_LINE], LAYOUT, 0, EPOCH)
    with pytest.raises(WireError, match="this reader expects"):
        RingReader(buffer, replace(LAYOUT, num_experts=17), 0, EPOCH)
    with pytest.raises(RegionRevoked, match="epoch 3, this is epoch 4"):
        RingReader(buffer, LAYOUT, 0, EPOCH + 1)
    with pytest.raises(WireError, match="not empty"):
        RingWriter(buffer, LAYOUT, EPOCH + 1)
    struct.pack_into("<I", buffer, RING_HEADER.offsets["version"], 99)
    with pytest.raises(VersionMismatch, match="version 99"):
        RingReader(buffer, LAYOUT, 0, EPOCH)


def test_a_header_that_promises_more_than_the_region_has_is_refused() -> None:
    buffer, _, _ = make_ring()
    struct.pack_into("<I", buffer, RING_HEADER.offsets["num_slots"], 1000)
    with pytest.raises(WireError, match="asks for"):
        read_header(buffer)
    struct.pack_into("<I", buffer, RING_HEADER.offsets["num_slots"], 0)
    with pytest.raises(WireError, match="makes no sense"):
        read_header(buffer)


# Publishing


@pytest.mark.slow
@given(st.integers(0, 50).flatmap(entries))
def test_what_is_published_is_read(entry: PlanEntry) -> None:
    codec = EntryCodec(LAYOUT.limits)
    raw = bytes(codec.encode(entry)).ljust(codec.nbytes, b"\xff")
    decoded = codec.decode(raw, entry.sequence, EPOCH)
    assert decoded == entry
    assert isinstance(decoded, PlanEntry)
    assert decoded.shares == tuple(Share(s.expert, s.worker, s.slot, s.count, s.generation) for s in decoded.shares)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sequence": 1}, "out of turn"),
        ({"epoch": 4}, "out of turn"),
        ({"shares": (Share(0, 0, 0, 1, -1),) * 7}, "7 shares and 1 copies; the ring holds 6 and 3: raise max_shares"),
        ({"copies": (Copy(0, 0, 0, 0),) * 4}, "2 shares and 4 copies"),
        ({"tokens_A": (1, 2, 3)}, "tokens of 3 attention workers"),
        ({"tokens_A": ()}, "tokens of 0 attention workers"),
        ({"tokens_A": (1, -2)}, "impossible token counts"),
        ({"cancels": 0}, "is no ABORT"),
        ({"kind": EntryKind.ABORT}, "cancels sequence -1"),
        ({"kind": EntryKind.COPIES}, "which COPIES cannot have"),
        ({"demand_crc": 1 << 32}, "demand CRC"),
        ({"shares": (Share(16, 0, 0, 1, -1),)}, "a share of an expert"),
        ({"shares": (Share(0, 3, 0, 1, -1),)}, "a share of an expert"),
        ({"shares": (Share(0, 0, 2, 1, -1),)}, "a share of an expert"),
        ({"shares": (Share(0, 0, 0, 0, -1),)}, "a share of an expert"),
        ({"shares": (Share(0, 0, 0, 1, 1),)}, "a share of an expert"),
        ({"shares": (Share(0, 0, 0, 1, -2),)}, "a share of an expert"),
        ({"shares": (Share(-1, 0, 0, 1, -1),)}, "negative or oversized"),
        ({"copies": (Copy(0, 16, 0, 0),)}, "a copy of an expert"),
        ({"copies": (Copy(0, 0, 3, 0),)}, "a copy of an expert"),
        ({"copies": (Copy(0, 0, 0, 2),)}, "a copy of an expert"),
        ({"copies": (Copy(1 << 31, 0, 0, 0),)}, "a copy of an expert"),
        ({"copies": (Copy(-1, 0, 0, 0),)}, "negative or oversized"),
    ],
)
def test_an_entry_that_readers_would_refuse_is_not_published(changes: dict[str, Any], complaint: str) -> None:
    buffer, writer, readers = make_ring()
    before = bytes(buffer)
    with pytest.raises(PlanError, match=complaint):
        writer.publish(make_entry(**changes))
    assert bytes(buffer) == before
    writer.publish(make_entry())
    assert readers[0].peek() == make_entry()


def test_a_record_that_a_core_fills_is_the_same_bytes() -> None:
    entry = make_entry()
    buffer, writer, readers = make_ring()
    writer.publish(entry)
    filled_buffer, filling, filled_readers = make_ring()
    record = filling.new_record()
    record[0]["kind"], record[0]["phase"], record[0]["start"] = entry.kind, entry.phase, entry.start
    record[0]["epoch"], record[0]["sequence"], record[0]["target"] = EPOCH, 0, entry.target.word()
    record[0]["cancels"], record[0]["demand_crc"] = -1, entry.demand_crc
    record[0]["tokens_A"] = entry.tokens_A
    record[0]["num_shares"], record[0]["num_copies"] = len(entry.shares), len(entry.copies)
    for index, s in enumerate(entry.shares):
        record[0]["shares"][index] = (s.expert, s.worker, s.slot, s.count, s.generation)
    for index, c in enumerate(entry.copies):
        record[0]["copies"][index] = (c.layer, c.expert, c.worker, c.slot)
    filling.publish_record(record)
    assert bytes(filled_buffer) == bytes(buffer)
    assert filled_readers[2].peek() == readers[2].peek() == entry
    with pytest.raises(PlanError, match="out of turn"):
        filling.publish_record(record)
    record[0]["sequence"], record[0]["num_shares"] = 1, 7
    with pytest.raises(PlanError, match="7 shares"):
        filling.publish_record(record)


@pytest.mark.slow
def test_numba_fills_a_record() -> None:
    @numba.njit
    def fill(record: Any, sequence: int, word: int) -> None:
        entry = record[0]
        entry.kind, entry.epoch, entry.sequence, entry.target, entry.cancels = 1, 3, sequence, word, -1
        entry.tokens_A[1] = 8
        entry.num_shares = 2
        for index in range(2):
            entry.shares[index].expert = index
            entry.shares[index].count = 5 + index
            entry.shares[index].generation = -1

    _, writer, readers = make_ring()
    record = writer.new_record()
    fill(record, 0, Target(0, 0, 0).word())
    writer.publish_record(record)
    entry = readers[0].peek()
    assert isinstance(entry, PlanEntry)
    assert entry.shares == (Share(0, 0, 0, 5, -1), Share(1, 0, 0, 6, -1))
    assert entry.tokens_A == (0, 8)


# Reading


def test_nothing_is_read_before_it_is_published_and_each_entry_once() -> None:
    _, writer, readers = make_ring()
    reader = readers[0]
    assert reader.peek() is None
    writer.publish(make_entry(0))
    writer.publish(make_entry(1))
    assert reader.peek() == make_entry(0)
    reader.store_verdict(0, Verdict.ACCEPTED)
    reader.advance(10)
    assert reader.peek() == make_entry(1)
    reader.store_verdict(1, Verdict.ACCEPTED)
    reader.advance(11)
    assert reader.peek() is None


def test_the_last_verdict_completes_the_set_and_refusals_are_seen_by_all() -> None:
    _, writer, readers = make_ring()
    writer.publish(make_entry())
    assert not readers[1].store_verdict(0, Verdict.ACCEPTED)
    assert not readers[0].store_verdict(0, Verdict.BINDING_DISAGREES)
    assert writer.verdicts(0) == (Verdict.BINDING_DISAGREES, Verdict.ACCEPTED, Verdict.NONE)
    assert readers[2].store_verdict(0, Verdict.ACCEPTED)
    expected = (Verdict.BINDING_DISAGREES, Verdict.ACCEPTED, Verdict.ACCEPTED)
    assert [reader.verdicts(0) for reader in readers] == [expected] * 3
    readers[0].advance(0)
    with pytest.raises(PlanError, match="has moved past sequence 0"):
        readers[0].verdicts(0)


def test_verdicts_of_a_slot_s_previous_entry_do_not_count() -> None:
    layout = replace(LAYOUT, num_slots=1)
    _, writer, readers = make_ring(layout)
    for sequence in range(3):
        writer.publish(make_entry(sequence))
        assert set(writer.verdicts(sequence)) == {Verdict.NONE}
        with pytest.raises(PlanError, match="is not in the ring"):
            writer.verdicts(sequence - 1)
        for reader in readers:
            assert reader.store_verdict(sequence, Verdict.ACCEPTED) == (reader is readers[-1])
            reader.advance(0)


def test_a_slot_is_reused_only_after_every_reader() -> None:
    _, writer, readers = make_ring()
    for sequence in range(LAYOUT.num_slots):
        assert writer.room()
        writer.publish(make_entry(sequence))
    assert not writer.room()
    with pytest.raises(PlanError, match="full: ffn-2 is 4 entries behind"):
        writer.publish(make_entry(4))
    for reader in readers:
        assert not writer.room()
        reader.store_verdict(0, Verdict.ACCEPTED)
        reader.advance(0)
    assert writer.room()
    writer.publish(make_entry(4))
    assert not writer.room()


def test_lagging_readers_are_named_with_the_time_they_could_have_moved() -> None:
    _, writer, readers = make_ring()
    for reader in readers:
        reader.touch(100)
    assert writer.lagging(10_000) == []
    writer.publish(make_entry(0), stamp_ns=9_000)
    writer.publish(make_entry(1), stamp_ns=9_500)
    readers[1].store_verdict(0, Verdict.ACCEPTED)
    readers[1].advance(9_100)
    readers[2].touch(9_900)
    assert writer.lagging(10_000) == [ReaderLag(0, 2, 1_000), ReaderLag(1, 1, 500), ReaderLag(2, 2, 100)]


def test_a_cursor_ahead_of_the_writer_is_damage() -> None:
    buffer, writer, _ = make_ring()
    struct.pack_into("<Q", buffer, LAYOUT.reader_offset(1), 5)
    with pytest.raises(WireError, match="ffn-1"):
        writer.lagging(0)


def publish_raw(buffer: memoryview, raw: bytes, sequence: int = 0) -> None:
    offset = LAYOUT.entry_offset(sequence)
    buffer[offset : offset + len(raw)] = raw
    struct.pack_into("<Q", buffer, LAYOUT.slot_offset(sequence), sequence + 1)


def refusal_of(reader: RingReader) -> Refusal:
    refusal = reader.peek()
    assert isinstance(refusal, Refusal)
    return refusal


def test_refusals_say_what_they_deserve() -> None:
    codec = EntryCodec(LAYOUT.limits)
    buffer, _, readers = make_ring()
    publish_raw(buffer, bytes(codec.encode(make_entry(epoch=9))))
    assert refusal_of(readers[0]).verdict is Verdict.FOREIGN_EPOCH
    publish_raw(buffer, bytes(codec.encode(make_entry(4))))
    assert refusal_of(readers[0]).verdict is Verdict.OUT_OF_ORDER
    publish_raw(buffer, bytes(codec.encode(make_entry(0))))
    assert readers[0].peek() == make_entry(0)
    struct.pack_into("<Q", buffer, LAYOUT.slot_offset(0), 5)
    refusal = refusal_of(readers[0])
    assert (refusal.verdict, refusal.sequence) == (Verdict.OUT_OF_ORDER, 0)
    assert "already holds sequence 4" in refusal.reason


def test_an_entry_with_a_broken_plan_still_names_its_target() -> None:
    codec = EntryCodec(LAYOUT.limits)
    raw = bytearray(codec.encode(make_entry(0)))
    raw[-1] ^= 1
    buffer, _, readers = make_ring()
    publish_raw(buffer, bytes(raw))
    refusal = refusal_of(readers[0])
    assert refusal.verdict is Verdict.BAD_CRC
    assert refusal.entry == make_entry(0, shares=(), copies=())
    raw[ENTRY_HEADER.offsets["target"]] ^= 1
    publish_raw(buffer, bytes(raw))
    refusal = refusal_of(readers[0])
    assert (refusal.verdict, refusal.entry) == (Verdict.BAD_CRC, None)


@pytest.mark.parametrize(
    ("field", "value"), [("kind", 0), ("kind", 4), ("phase", 2), ("start", 2), ("target", 0), ("cancels", 3)]
)
def test_header_fields_without_a_meaning_are_refused_though_the_crc_holds(field: str, value: int) -> None:
    buffer, writer, readers = make_ring()
    record = writer.new_record()
    valid = EntryCodec(LAYOUT.limits)
    raw = bytes(valid.encode(make_entry(0)))
    record.view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
    record[0][field] = value
    publish_raw(buffer, bytes(valid.seal(record)))
    refusal = refusal_of(readers[0])
    assert (refusal.verdict, refusal.entry) == (Verdict.BAD_CRC, None)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("shares", "expert", 16),
        ("shares", "expert", -1),
        ("shares", "worker", 3),
        ("shares", "slot", 2),
        ("shares", "count", 0),
        ("shares", "count", -5),
        ("shares", "generation", 1),
        ("copies", "layer", -1),
        ("copies", "expert", 16),
        ("copies", "worker", -1),
        ("copies", "slot", 2),
    ],
)
def test_plan_fields_out_of_range_are_refused_though_the_crc_holds(part: str, field: str, value: int) -> None:
    _, writer, readers = make_ring()
    record = writer.new_record()
    codec = EntryCodec(LAYOUT.limits)
    raw = bytes(codec.encode(make_entry(0)))
    record.view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
    record[0][part][0][field] = value
    writer.publish_record(record)
    refusal = refusal_of(readers[0])
    assert (refusal.verdict, refusal.entry) == (Verdict.BAD_CRC, make_entry(0, shares=(), copies=()))
    assert "that cannot be" in refusal.reason


@pytest.mark.slow
def test_ten_thousand_mutations_are_never_taken_for_an_entry() -> None:
    generator = random.Random(20)
    buffer, writer, readers = make_ring()
    for sequence in range(3):
        writer.publish(make_entry(sequence))
    reader = readers[0]
    clean = bytes(buffer)
    start, end = LAYOUT.slot_offset(0), LAYOUT.verdict_offset(0, 0)
    refused = 0
    for _ in range(10_000):
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            position = generator.randrange(start, end)
            match generator.randrange(4):
                case 0:
                    buffer[position] ^= 1 << generator.randrange(8)
                case 1:
                    buffer[position] = generator.randrange(256)
                case 2:
                    length = min(generator.randrange(64), end - position)
                    buffer[position : position + length] = generator.randbytes(length)
                case _:
                    other = LAYOUT.slot_offset(generator.randrange(1, 3))
                    buffer[position:end] = clean[other + position - start : other + end - start]
        seen = reader.peek()
        assert seen is None or isinstance(seen, Refusal) or seen == make_entry(0)
        refused += isinstance(seen, Refusal)
        if isinstance(seen, Refusal) and seen.entry is not None:
            assert seen.entry == make_entry(0, shares=(), copies=())
        buffer[:] = clean
    assert refused > 5_000


@pytest.mark.slow
@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_a_region_of_random_bytes_is_never_a_ring(generator: random.Random) -> None:
    buffer = memoryview(bytearray(generator.randbytes(LAYOUT.nbytes)))
    with pytest.raises(WireError):
        RingReader(buffer, LAYOUT, 0, EPOCH)
    good, _, _ = make_ring()
    buffer[: LAYOUT.reader_offset(0)] = good[: LAYOUT.reader_offset(0)]
    struct.pack_into("<Q", buffer, LAYOUT.reader_offset(0), generator.randrange(100))
    reader = RingReader(buffer, LAYOUT, 0, EPOCH)
    for published in (reader.sequence, reader.sequence + 1, generator.getrandbits(64)):
        struct.pack_into("<Q", buffer, LAYOUT.slot_offset(reader.sequence), published)
        assert reader.peek() is None or isinstance(reader.peek(), Refusal)
    assert all(isinstance(verdict, Verdict) for verdict in reader.verdicts(reader.sequence))


class RingMachine(RuleBasedStateMachine):
    """Any order of publications, readings, verdicts and moves, against a list of entries and a set of cursors."""

    @initialize(num_slots=st.integers(1, 4))
    def start(self, num_slots: int) -> None:
        self.layout = replace(LAYOUT, num_slots=num_slots)
        self.buffer, self.writer, self.readers = make_ring(self.layout)
        self.published: list[PlanEntry] = []
        self.cursors = [0] * self.layout.num_readers
        self.judged: dict[tuple[int, int], Verdict] = {}

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        entry = data.draw(entries(len(self.published), self.layout))
        room = len(self.published) - min(self.cursors) < self.layout.num_slots
        assert self.writer.room() == room
        if room:
            self.writer.publish(entry)
            self.published.append(entry)
        else:
            with pytest.raises(PlanError, match="full"):
                self.writer.publish(entry)

    @rule(rank=st.integers(0, 2))
    def peek(self, rank: int) -> None:
        cursor = self.cursors[rank]
        expected = self.published[cursor] if cursor < len(self.published) else None
        assert self.readers[rank].peek() == expected

    @rule(rank=st.integers(0, 2), verdict=st.sampled_from([Verdict.ACCEPTED, Verdict.BINDING_DISAGREES]))
    def judge(self, rank: int, verdict: Verdict) -> None:
        cursor = self.cursors[rank]
        if cursor == len(self.published) or (rank, cursor) in self.judged:
            return
        self.judged[rank, cursor] = verdict
        complete = all((other, cursor) in self.judged for other in range(3))
        assert self.readers[rank].store_verdict(cursor, verdict) == complete

    @precondition(lambda self: any((rank, cursor) in self.judged for rank, cursor in enumerate(self.cursors)))
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        ready = [rank for rank, cursor in enumerate(self.cursors) if (rank, cursor) in self.judged]
        rank = data.draw(st.sampled_from(ready))
        self.readers[rank].advance(0)
        self.cursors[rank] += 1

    @invariant()
    def verdicts_and_lags_are_what_happened(self) -> None:
        first = max(0, len(self.published) - self.layout.num_slots)
        for sequence in range(first, len(self.published)):
            expected = tuple(self.judged.get((rank, sequence), Verdict.NONE) for rank in range(3))
            assert self.writer.verdicts(sequence) == expected
            for rank, cursor in enumerate(self.cursors):
                if cursor <= sequence:
                    assert self.readers[rank].verdicts(sequence) == expected
        lags = {lag.rank: lag.behind for lag in self.writer.lagging(0)}
        behind = {rank: len(self.published) - cursor for rank, cursor in enumerate(self.cursors)}
        assert lags == {rank: count for rank, count in behind.items() if count}


TestRingMachine = pytest.mark.slow(RingMachine.TestCase)
TestRingMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
