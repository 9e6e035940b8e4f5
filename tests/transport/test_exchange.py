"""The exchange: inputs read in place, partial rows written back, and no slot rewritten while somebody may read it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from afore.core.errors import ConfigError, SlotError, WireError
from afore.core.target import Target
from afore.transport.exchange import (
    ExchangeLayout,
    InputReader,
    Inputs,
    InputSlots,
    Replies,
    ReplyBuffer,
    ReuseGuard,
    pack_reply,
)
from afore.transport.records import CACHE_LINE, REPLY_HEADER

EPOCH = 2
LAYOUT = ExchangeLayout(num_microbatches=2, num_ffn=3, max_tokens=5, hidden=7, top_k=3)
TARGET = Target(layer=1, microbatch=1, step=4)


def make_inputs(tokens: int, seed: int = 0) -> Inputs:
    generator = np.random.default_rng(seed)
    return (
        generator.standard_normal((tokens, LAYOUT.hidden), dtype=np.float32),
        generator.integers(0, 99, (tokens, LAYOUT.top_k), dtype=np.int32),
        generator.random((tokens, LAYOUT.top_k), dtype=np.float32),
    )


def region() -> memoryview:
    return memoryview(bytearray(LAYOUT.nbytes))


def assert_same(left: Inputs, right: Inputs) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_slots_tile_the_region_and_arrays_are_aligned() -> None:
    spans = [(LAYOUT.input_offset(m), LAYOUT.input_nbytes) for m in range(2)]
    spans += [(LAYOUT.reply_offset(m, w), LAYOUT.reply_nbytes) for m in range(2) for w in range(3)]
    end = 0
    for offset, nbytes in spans:
        assert offset == end
        assert offset % CACHE_LINE == 0
        end = offset + nbytes
    assert end == LAYOUT.nbytes
    assert LAYOUT.ids_offset % CACHE_LINE == LAYOUT.weights_offset % CACHE_LINE == 0


@given(st.integers(0, LAYOUT.max_tokens), st.integers(0, 100))
def test_inputs_are_read_in_place_once_they_are_published(tokens: int, seed: int) -> None:
    buffer = region()
    slots, reader = InputSlots(buffer, LAYOUT, EPOCH), InputReader(buffer.toreadonly(), LAYOUT, EPOCH)
    assert reader.read(1, TARGET) is None
    written = make_inputs(tokens, seed)
    slots.write(TARGET, *written)
    seen = reader.read(1, TARGET)
    assert seen is not None
    assert_same(seen, written)
    if tokens:
        slots.views(1)[0][0, 0] = 42.0
        assert seen[0][0, 0] == 42.0
        assert not seen[0].flags.writeable
    assert reader.read(0, TARGET) is None


def test_computing_straight_into_the_slot_is_the_same_as_writing() -> None:
    buffer = region()
    slots, reader = InputSlots(buffer, LAYOUT, EPOCH), InputReader(buffer, LAYOUT, EPOCH)
    written = make_inputs(4)
    slots.retract(1)
    for view, values in zip(slots.views(1), written, strict=True):
        view[:4] = values
    assert reader.read(1, TARGET) is None
    slots.publish(TARGET, 4)
    seen = reader.read(1, TARGET)
    assert seen is not None
    assert_same(seen, written)


def test_inputs_of_another_target_or_epoch_are_not_read() -> None:
    buffer = region()
    slots = InputSlots(buffer, LAYOUT, EPOCH)
    slots.write(TARGET, *make_inputs(2))
    assert InputReader(buffer, LAYOUT, EPOCH).read(1, Target(2, 1, 4)) is None
    assert InputReader(buffer, LAYOUT, EPOCH + 1).read(1, TARGET) is None
    slots.retract(1)
    assert InputReader(buffer, LAYOUT, EPOCH).read(1, TARGET) is None


def test_inputs_that_do_not_fit_are_refused() -> None:
    buffer = region()
    slots = InputSlots(buffer, LAYOUT, EPOCH)
    with pytest.raises(WireError, match=r"inputs of l1/m1/s4 have shapes \(6, 7\)"):
        slots.write(TARGET, *make_inputs(6))
    hidden_TD, ids_TK, weights_TK = make_inputs(3)
    with pytest.raises(WireError, match="have shapes"):
        slots.write(TARGET, hidden_TD, ids_TK[:2], weights_TK)
    with pytest.raises(WireError, match="6 tokens of l1/m1/s4 do not fit 5 rows"):
        slots.publish(TARGET, 6)
    assert InputReader(buffer, LAYOUT, EPOCH).read(1, TARGET) is None


def test_a_header_with_too_many_rows_is_a_typed_error() -> None:
    buffer = region()
    InputSlots(buffer, LAYOUT, EPOCH).write(TARGET, *make_inputs(2))
    struct.pack_into("<Q", buffer, LAYOUT.input_offset(1) + 16, 6)
    with pytest.raises(WireError, match="announces 6 rows"):
        InputReader(buffer, LAYOUT, EPOCH).read(1, TARGET)


@given(st.integers(0, LAYOUT.max_tokens), st.integers(0, 2), st.integers(0, 100))
def test_a_reply_is_taken_where_it_was_written(tokens: int, worker: int, seed: int) -> None:
    buffer = region()
    replies = Replies(buffer, LAYOUT, EPOCH)
    rows_TD = make_inputs(tokens, seed)[0]
    assert replies.take(1, worker, TARGET, tokens) is None
    data = pack_reply(LAYOUT, TARGET, worker, EPOCH, rows_TD)
    assert len(data) == LAYOUT.reply_used_nbytes(tokens) <= LAYOUT.reply_nbytes
    offset = LAYOUT.reply_offset(1, worker)
    buffer[offset : offset + len(data)] = data
    taken = replies.take(1, worker, TARGET, tokens)
    assert taken is not None
    assert taken[0] == (0, tokens)
    np.testing.assert_array_equal(taken[1], rows_TD)
    assert replies.take(1, worker, Target(2, 1, 4), tokens) is None
    assert replies.take(1, (worker + 1) % 3, TARGET, tokens) is None
    assert Replies(buffer, LAYOUT, EPOCH + 1).take(1, worker, TARGET, tokens) is None
    with pytest.raises(WireError, match=f"ffn-{worker}: replied {tokens} rows"):
        replies.take(1, worker, TARGET, tokens + 1)


def test_a_reply_computed_in_place_is_the_same_and_the_buffer_is_reused() -> None:
    staging = ReplyBuffer(LAYOUT, 2, EPOCH)
    for tokens, seed in ((5, 1), (2, 2), (0, 3), (4, 4)):
        rows_TD = make_inputs(tokens, seed)[0]
        staging.rows(tokens)[:] = rows_TD
        packed = bytes(staging.pack(TARGET, tokens))
        buffer = region()
        buffer[LAYOUT.reply_offset(1, 2) : LAYOUT.reply_offset(1, 2) + len(packed)] = packed
        taken = Replies(buffer, LAYOUT, EPOCH).take(1, 2, TARGET, tokens)
        assert taken is not None
        np.testing.assert_array_equal(taken[1], rows_TD)
        assert taken[1].ctypes.data % 4 == 0


@given(st.integers(0, LAYOUT.max_tokens), st.data())
def test_a_reply_may_have_a_part_of_the_rows_or_tell_of_rows_elsewhere(tokens: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, tokens))
    count = data.draw(st.integers(0, tokens - first))
    here = data.draw(st.booleans())
    buffer, reply = region(), ReplyBuffer(LAYOUT, 2, EPOCH)
    rows_TD = make_inputs(count, 3)[0]
    reply.rows(count)[:] = rows_TD
    packed = reply.pack(TARGET, tokens, (first, count), here=here)
    assert len(packed) == LAYOUT.reply_used_nbytes(count if here else 0)
    offset = LAYOUT.reply_offset(1, 2)
    buffer[offset : offset + len(packed)] = packed
    taken = Replies(buffer, LAYOUT, EPOCH).take(1, 2, TARGET, tokens)
    assert taken is not None
    assert taken[0] == (first, count)
    np.testing.assert_array_equal(taken[1], rows_TD[: count if here else 0])


def test_a_reply_of_rows_that_the_target_does_not_have_is_a_typed_error() -> None:
    buffer = region()
    packed = pack_reply(LAYOUT, TARGET, 0, EPOCH, make_inputs(3)[0])
    offset = LAYOUT.reply_offset(1, 0)
    buffer[offset : offset + len(packed)] = packed
    struct.pack_into("<I", buffer, offset + REPLY_HEADER.offsets["first"], 1)
    with pytest.raises(WireError, match="ffn-0: replied rows 1 to 4 of 3"):
        Replies(buffer, LAYOUT, EPOCH).take(1, 0, TARGET, 3)


def test_a_reply_of_which_only_one_end_has_landed_is_not_taken() -> None:
    buffer = region()
    replies = Replies(buffer, LAYOUT, EPOCH)
    offset = LAYOUT.reply_offset(1, 0)
    before = bytes(pack_reply(LAYOUT, Target(0, 1, 4), 0, EPOCH, make_inputs(3, 1)[0]))
    after = bytes(pack_reply(LAYOUT, TARGET, 0, EPOCH, make_inputs(3, 2)[0]))
    for cut in range(8, len(after), 4):
        for landed in (after[:cut] + before[cut:], before[:cut] + after[cut:]):
            buffer[offset : offset + len(landed)] = landed
            taken = replies.take(1, 0, TARGET, 3)
            if landed[:8] != after[:8] or landed[-16:-8] != after[-16:-8]:
                assert taken is None
    buffer[offset : offset + len(after)] = after
    assert replies.take(1, 0, TARGET, 3) is not None


def test_regions_and_shapes_that_cannot_be_are_refused() -> None:
    small = region()[:-64]
    for attach in (InputSlots, InputReader, Replies):
        with pytest.raises(WireError, match="exchange region has"):
            attach(small, LAYOUT, EPOCH)
    with pytest.raises(ConfigError, match=r"exchange\.max_tokens: 0"):
        ExchangeLayout(1, 1, 0, 1, 1)


# When a slot may be rewritten


def test_a_slot_is_free_after_all_replies() -> None:
    guard = ReuseGuard(num_microbatches=2, num_ffn=3)
    guard.writing(TARGET)
    assert not guard.replied(TARGET, 0)
    assert not guard.replied(TARGET, 2)
    with pytest.raises(SlotError, match="input slot 1 cannot take l2/m1/s4: ffn-1 may still read l1/m1/s4"):
        guard.writing(Target(2, 1, 4))
    guard.writing(Target(2, 0, 4))
    assert guard.replied(TARGET, 1)
    guard.writing(Target(2, 1, 4))
    assert guard.missing(1) == (0, 1, 2)


def test_a_slot_of_an_aborted_target_is_free_when_all_have_replied_or_passed() -> None:
    guard = ReuseGuard(2, 3)
    guard.writing(TARGET)
    guard.replied(TARGET, 0)
    guard.passed(TARGET, 1)
    assert guard.missing(1) == (1, 2), "passing counts only once the target is aborted"
    assert not guard.aborted(TARGET)
    assert guard.missing(1) == (2,)
    assert guard.passed(TARGET, 2)
    guard.writing(Target(1, 1, 5))


def test_news_of_an_earlier_target_changes_nothing() -> None:
    guard = ReuseGuard(2, 1)
    guard.writing(TARGET)
    guard.abandoned(TARGET)
    later = Target(1, 1, 5)
    guard.writing(later)
    guard.replied(TARGET, 0)
    guard.aborted(TARGET)
    guard.passed(TARGET, 0)
    guard.abandoned(TARGET)
    assert not guard.free(1)
    assert guard.replied(later, 0)


class GuardMachine(RuleBasedStateMachine):
    """Any order of writes, replies, aborts and passes: a write is allowed exactly when no worker may still read."""

    @initialize()
    def start(self) -> None:
        self.guard = ReuseGuard(1, 2)
        self.step = 0
        self.target: Target | None = None
        self.done: set[int] = set()
        self.passed: set[int] = set()
        self.aborted = False

    def may_read(self) -> bool:
        done = self.done | (self.passed if self.aborted else set())
        return self.target is not None and len(done) < 2

    @rule()
    def write(self) -> None:
        self.step += 1
        target = Target(0, 0, self.step)
        if self.may_read():
            with pytest.raises(SlotError):
                self.guard.writing(target)
        else:
            self.guard.writing(target)
            self.target, self.done, self.passed, self.aborted = target, set(), set(), False

    @rule(worker=st.integers(0, 1), age=st.integers(0, 1), what=st.sampled_from(["replied", "passed", "aborted"]))
    def hear(self, worker: int, age: int, what: str) -> None:
        if self.target is None or self.target.step <= age:
            return
        target = Target(0, 0, self.target.step - age)
        if what == "aborted":
            self.guard.aborted(target)
            self.aborted |= age == 0
        else:
            getattr(self.guard, what)(target, worker)
            if age == 0:
                (self.done if what == "replied" else self.passed).add(worker)

    @invariant()
    def agrees(self) -> None:
        assert self.guard.free(0) != self.may_read()


TestGuardMachine = GuardMachine.TestCase
TestGuardMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
