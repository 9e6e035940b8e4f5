"""Feedback: every record once, in order; what was overwritten or damaged is counted, and never taken."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from afore.core.errors import ConfigError, WireError
from afore.core.target import Target
from afore.transport.feedback import FeedbackFlags, FeedbackLayout, FeedbackReader, FeedbackRecord, FeedbackWriter
from afore.transport.records import FEEDBACK

EPOCH = 6
LAYOUT = FeedbackLayout(num_workers=2, depth=4)


def make_record(sequence: int, worker: int = 0, epoch: int = EPOCH) -> FeedbackRecord:
    return FeedbackRecord(
        epoch=epoch,
        sequence=sequence,
        worker=worker,
        target=Target(1, 0, sequence),
        tile_us=1.5 * sequence,
        tiles=3,
        flags=FeedbackFlags.PRIMARIES,
    )


class Desk:
    """A region with its reader and writers; ``send`` is the one-sided write."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(LAYOUT.nbytes))
        self.reader = FeedbackReader(self.buffer, LAYOUT, EPOCH)
        self.writers = [FeedbackWriter(LAYOUT, worker) for worker in range(LAYOUT.num_workers)]

    def send(self, record: FeedbackRecord) -> int:
        offset, data = self.writers[record.worker].next(record)
        self.buffer[offset : offset + len(data)] = data
        return offset

    def take(self) -> list[int]:
        return [record.sequence for record in self.reader.take_all()]


counts = st.integers(0, (1 << 32) - 1)
microseconds = st.floats(allow_nan=False)


@given(
    st.builds(
        FeedbackRecord,
        epoch=st.just(EPOCH),
        sequence=st.integers(0, (1 << 64) - 1),
        worker=st.integers(0, 1),
        target=st.builds(Target, st.integers(0, 2047), st.integers(0, 4095), st.integers(0, 1 << 38)),
        tile_us=microseconds,
        copy_us=microseconds,
        window_us=microseconds,
        exposed_us=microseconds,
        slack_us=microseconds,
        copies=counts,
        tiles=counts,
        pairs=counts,
        replica_pairs=counts,
        flags=st.integers(0, 15).map(FeedbackFlags),
    )
)
def test_a_record_comes_back_as_it_was(record: FeedbackRecord) -> None:
    desk = Desk()
    desk.send(record)
    assert desk.reader.take_all() == [record]
    assert desk.reader.take_all() == []


def test_records_are_taken_once_by_worker_and_in_order() -> None:
    desk = Desk()
    assert desk.take() == []
    for sequence in range(3):
        desk.send(make_record(sequence, worker=1))
    desk.send(make_record(10))
    assert desk.take() == [10, 0, 1, 2]
    desk.send(make_record(11))
    assert desk.take() == [11]
    assert (desk.reader.overrun, desk.reader.torn, desk.reader.foreign) == (0, 0, 0)


def test_overwritten_records_are_counted_and_the_rest_is_taken() -> None:
    desk = Desk()
    for sequence in range(10):
        desk.send(make_record(sequence))
    assert desk.take() == [6, 7, 8, 9]
    assert desk.reader.overrun == 6
    desk.send(make_record(10))
    assert desk.take() == [10]


def test_a_record_that_is_still_landing_is_waited_for() -> None:
    desk = Desk()
    desk.send(make_record(0))
    offset, data = desk.writers[0].next(make_record(1))
    for cut in range(8, len(data), 8):
        desk.buffer[offset : offset + cut] = data[:cut]
        assert desk.take() == ([0] if cut == 8 else [])
    desk.buffer[offset : offset + len(data)] = data
    assert desk.take() == [1]
    assert desk.reader.torn == 0


def test_a_damaged_record_is_skipped_once_later_ones_have_come() -> None:
    desk = Desk()
    desk.send(make_record(0))
    offset = desk.send(make_record(1))
    desk.buffer[offset + 40] ^= 1
    assert desk.take() == [0]
    assert desk.take() == []
    desk.send(make_record(2))
    assert desk.take() == [2]
    assert (desk.reader.torn, desk.reader.overrun) == (1, 0)


def test_a_record_that_never_landed_is_skipped() -> None:
    desk = Desk()
    desk.send(make_record(0))
    desk.writers[0].next(make_record(1))
    assert desk.take() == [0]
    desk.send(make_record(2))
    assert desk.take() == [2]
    assert desk.reader.torn == 1


def test_records_of_another_epoch_are_counted_and_dropped() -> None:
    desk = Desk()
    desk.send(make_record(0, epoch=EPOCH - 1))
    desk.send(make_record(1))
    assert desk.take() == [1]
    assert desk.reader.foreign == 1


def test_layouts_and_regions_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="feedback"):
        FeedbackLayout(0)
    with pytest.raises(ConfigError, match="feedback"):
        FeedbackLayout(1, depth=1)
    with pytest.raises(WireError, match="needs"):
        FeedbackReader(memoryview(bytes(8)), LAYOUT, EPOCH)


@pytest.mark.slow
def test_ten_thousand_mutations_never_yield_a_record_that_was_not_sent() -> None:
    generator = random.Random(3)
    for _ in range(2_000):
        desk = Desk()
        for sequence in range(generator.randrange(1, 9)):
            desk.send(make_record(sequence))
            for _ in range(generator.randrange(2)):
                position = generator.randrange(LAYOUT.depth * FEEDBACK.nbytes)
                desk.buffer[position : position + 8] = generator.randbytes(8)
        for _ in range(5):
            desk.buffer[generator.randrange(len(desk.buffer))] ^= 1 << generator.randrange(8)
            taken = desk.reader.take_all()
            assert all(record == make_record(record.sequence) for record in taken)


class FeedbackMachine(RuleBasedStateMachine):
    """Any mix of writes and readings: what is not taken is exactly what was overwritten."""

    @initialize()
    def start(self) -> None:
        self.desk = Desk()
        self.sent = [0, 0]
        self.taken: list[list[int]] = [[], []]

    @rule(worker=st.integers(0, 1), count=st.integers(1, 6))
    def send(self, worker: int, count: int) -> None:
        for _ in range(count):
            self.desk.send(make_record(self.sent[worker], worker))
            self.sent[worker] += 1

    @rule()
    def take(self) -> None:
        for record in self.desk.reader.take_all():
            self.taken[record.worker].append(record.sequence)
        for worker, sent in enumerate(self.sent):
            last = self.taken[worker][-LAYOUT.depth :]
            kept = list(range(max(0, sent - LAYOUT.depth), sent))
            assert last[len(last) - len(kept) :] == kept
            assert self.taken[worker] == sorted(set(self.taken[worker]))
        lost = sum(self.sent) - sum(map(len, self.taken))
        assert self.desk.reader.overrun == lost
        assert self.desk.reader.torn == 0


TestFeedbackMachine = FeedbackMachine.TestCase
TestFeedbackMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
