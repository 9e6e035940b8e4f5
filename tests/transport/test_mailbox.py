"""The mailbox: a vector counts only whole, of this epoch, from its source, for the target that is expected."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from afore.core.demand import DemandVector
from afore.core.errors import ConfigError, VersionMismatch, WireError
from afore.core.target import Phase, Target
from afore.transport import bells
from afore.transport.mailbox import Mailbox, MailboxLayout, VectorState, pack_demand, read_header
from afore.transport.records import DEMAND_HEADER, MAILBOX_HEADER

EPOCH = 5
LAYOUT = MailboxLayout(num_attention=2, num_microbatches=3, num_experts=7)
TARGET = Target(layer=4, microbatch=1, step=9)


def counts(seed: int = 1) -> DemandVector:
    return np.random.default_rng(seed).integers(0, 50, LAYOUT.num_experts, dtype=np.int32)


def make() -> tuple[memoryview, Mailbox]:
    buffer = memoryview(bytearray(LAYOUT.nbytes))
    return buffer, Mailbox(buffer, LAYOUT, EPOCH)


def put(buffer: memoryview, attention: int, microbatch: int, data: bytes) -> None:
    offset = LAYOUT.offset(attention, microbatch)
    buffer[offset : offset + len(data)] = data


def test_slots_do_not_overlap_and_fit() -> None:
    offsets = [LAYOUT.offset(a, m) for a in range(2) for m in range(3)]
    assert offsets == sorted(offsets)
    ends = [offset + LAYOUT.vector_nbytes for offset in offsets]
    assert offsets[0] >= MAILBOX_HEADER.nbytes
    assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False))
    assert ends[-1] <= LAYOUT.nbytes


def test_immediates_name_their_slot() -> None:
    for attention in range(2):
        for microbatch in range(3):
            assert LAYOUT.from_immediate(LAYOUT.immediate(attention, microbatch)) == (attention, microbatch)
    with pytest.raises(WireError, match="bell REPLY was rung at a mailbox"):
        LAYOUT.from_immediate(bells.REPLY(0, 0))
    with pytest.raises(WireError, match="attention-2: rang for microbatch 0, which has no slot"):
        LAYOUT.from_immediate(bells.DEMAND(2, 0))
    with pytest.raises(WireError, match="microbatch 3"):
        LAYOUT.from_immediate(bells.DEMAND(0, 3))


@given(st.lists(st.integers(0, (1 << 31) - 1), min_size=7, max_size=7), st.sampled_from(Phase))
def test_a_whole_vector_is_taken(values: list[int], phase: Phase) -> None:
    buffer, mailbox = make()
    assert mailbox.take(1, 1, TARGET) is None
    assert mailbox.peek(1, 1).state is VectorState.EMPTY
    demand_E = np.array(values, dtype=np.int32)
    put(buffer, 1, 1, pack_demand(EPOCH, TARGET, 1, phase, demand_E))
    taken_E = mailbox.take(1, 1, TARGET)
    assert taken_E is not None
    assert taken_E.dtype == np.int32
    np.testing.assert_array_equal(taken_E, demand_E)
    seen = mailbox.peek(1, 1, TARGET)
    assert (seen.state, seen.target, seen.source, seen.phase) == (VectorState.OK, TARGET, 1, phase)
    assert seen.total == sum(values)


def test_what_is_taken_is_a_copy() -> None:
    buffer, mailbox = make()
    put(buffer, 0, 1, pack_demand(EPOCH, TARGET, 0, Phase.DECODE, counts()))
    taken_E = mailbox.take(0, 1, TARGET)
    assert taken_E is not None
    buffer[:] = bytes(len(buffer))
    np.testing.assert_array_equal(taken_E, counts())
    taken_E += 1  # the scheduler sums into it


@pytest.mark.parametrize(
    ("epoch", "target", "source", "state"),
    [
        (EPOCH + 1, TARGET, 0, VectorState.FOREIGN_EPOCH),
        (EPOCH, Target(5, 1, 9), 0, VectorState.OTHER_TARGET),
        (EPOCH, Target(4, 1, 8), 0, VectorState.OTHER_TARGET),
        (EPOCH, Target(4, 2, 9), 0, VectorState.OTHER_TARGET),
        (EPOCH, TARGET, 1, VectorState.WRONG_SOURCE),
    ],
)
def test_what_is_not_expected_does_not_count(epoch: int, target: Target, source: int, state: VectorState) -> None:
    buffer, mailbox = make()
    put(buffer, 0, 1, pack_demand(epoch, target, source, Phase.DECODE, counts()))
    assert mailbox.take(0, 1, TARGET) is None
    assert mailbox.peek(0, 1, TARGET).state is state


def test_a_vector_before_its_announcement_is_held() -> None:
    buffer, mailbox = make()
    put(buffer, 0, 1, pack_demand(EPOCH, TARGET, 0, Phase.DECODE, counts()))
    assert mailbox.take(0, 1, Target(3, 1, 9)) is None
    assert mailbox.take(0, 1, TARGET) is not None


def test_a_vector_of_another_model_does_not_count() -> None:
    buffer, mailbox = make()
    put(buffer, 0, 1, pack_demand(EPOCH, TARGET, 0, Phase.DECODE, counts()[:6]))
    assert mailbox.take(0, 1, TARGET) is None
    assert mailbox.peek(0, 1).state is VectorState.TORN


def test_a_vector_that_is_none_is_not_sent() -> None:
    with pytest.raises(WireError, match="attention-1: its demand of l4/m1/s9 is no vector of counts"):
        pack_demand(EPOCH, TARGET, 1, Phase.DECODE, np.array([1, -1], dtype=np.int32))
    with pytest.raises(WireError, match=r"shape \(1, 2\)"):
        pack_demand(EPOCH, TARGET, 1, Phase.DECODE, np.array([[1, 1]], dtype=np.int32))


def test_the_region_describes_itself() -> None:
    buffer, _ = make()
    assert read_header(buffer) == (LAYOUT, EPOCH)
    Mailbox(buffer, LAYOUT, EPOCH)
    with pytest.raises(WireError, match="another mailbox already"):
        Mailbox(buffer, LAYOUT, EPOCH + 1)
    with pytest.raises(WireError, match="asks for"):
        read_header(buffer[:-64])
    with pytest.raises(WireError, match="needs"):
        Mailbox(buffer[:-64], LAYOUT, EPOCH)
    with pytest.raises(WireError, match="no mailbox"):
        read_header(memoryview(bytes(1000)))
    with pytest.raises(WireError, match="no mailbox"):
        read_header(memoryview(b""))
    struct.pack_into("<I", buffer, MAILBOX_HEADER.offsets["num_experts"], 0)
    with pytest.raises(WireError, match="makes no sense"):
        read_header(buffer)
    struct.pack_into("<I", buffer, MAILBOX_HEADER.offsets["version"], 9)
    with pytest.raises(VersionMismatch, match="version 9"):
        read_header(buffer)
    with pytest.raises(ConfigError, match=r"mailbox\.num_experts: 0"):
        MailboxLayout(1, 1, 0)


@pytest.mark.slow
def test_ten_thousand_mutations_are_never_taken() -> None:
    generator = random.Random(7)
    buffer, mailbox = make()
    data = pack_demand(EPOCH, TARGET, 0, Phase.DECODE, counts())
    older = pack_demand(EPOCH, Target(3, 1, 9), 0, Phase.DECODE, counts(2))
    torn = 0
    for _ in range(10_000):
        raw = bytearray(data)
        match generator.randrange(4):
            case 0:
                raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
            case 1:
                cut = generator.randrange(len(raw))
                raw[:cut] = older[:cut]
            case 2:
                start, end = sorted(generator.randrange(len(raw) + 1) for _ in range(2))
                raw[start:end] = older[start:end]
            case _:
                start, end = sorted(generator.randrange(len(raw) + 1) for _ in range(2))
                raw[start:end] = generator.randbytes(end - start)
        put(buffer, 0, 1, bytes(raw))
        taken_E = mailbox.take(0, 1, TARGET)
        seen = mailbox.peek(0, 1, TARGET)
        if bytes(raw) == data:
            assert taken_E is not None
        else:
            assert taken_E is None
            assert seen.state is not VectorState.OK
        torn += seen.state is VectorState.TORN
    assert torn > 5_000


class MailboxMachine(RuleBasedStateMachine):
    """Vectors whose bytes land in any order, piece by piece, over what the slot held before."""

    @initialize()
    def start(self) -> None:
        self.buffer, self.mailbox = make()
        self.holds: dict[tuple[int, int], bytes] = {}
        self.landing: dict[tuple[int, int], tuple[bytes, list[int], Target]] = {}
        self.whole: dict[tuple[int, int], tuple[Target, DemandVector]] = {}
        self.step = 0

    @rule(attention=st.integers(0, 1), microbatch=st.integers(0, 2), seed=st.integers(0, 3), data=st.data())
    def begin(self, attention: int, microbatch: int, seed: int, data: st.DataObject) -> None:
        slot = (attention, microbatch)
        if slot in self.landing:
            return
        self.step += 1
        target = Target(0, microbatch, self.step)
        packed = pack_demand(EPOCH, target, attention, Phase.DECODE, counts(seed))
        order = data.draw(st.permutations(range(0, len(packed), 12)))
        self.landing[slot] = (packed, list(order), target)
        self.whole.pop(slot, None)
        self.seed = seed

    @rule(attention=st.integers(0, 1), microbatch=st.integers(0, 2), pieces=st.integers(1, 3))
    def land(self, attention: int, microbatch: int, pieces: int) -> None:
        slot = (attention, microbatch)
        if slot not in self.landing:
            return
        packed, order, target = self.landing[slot]
        offset = LAYOUT.offset(*slot)
        for _ in range(min(pieces, len(order))):
            start = order.pop()
            piece = packed[start : start + 12]
            self.buffer[offset + start : offset + start + len(piece)] = piece
        if not order:
            del self.landing[slot]
            vector_E = np.frombuffer(packed, np.int32, offset=DEMAND_HEADER.nbytes)
            self.whole[slot] = (target, vector_E)

    @rule(attention=st.integers(0, 1), microbatch=st.integers(0, 2))
    def take(self, attention: int, microbatch: int) -> None:
        slot = (attention, microbatch)
        if slot in self.landing:
            _, order, target = self.landing[slot]
            # While pieces are missing it may only be taken if what they will bring is there already.
            taken_E = self.mailbox.take(attention, microbatch, target)
            if taken_E is not None:
                packed = self.landing[slot][0]
                offset = LAYOUT.offset(*slot)
                assert bytes(self.buffer[offset : offset + len(packed)]) == packed
                assert order
        elif slot in self.whole:
            target, vector_E = self.whole[slot]
            taken_E = self.mailbox.take(attention, microbatch, target)
            assert taken_E is not None
            np.testing.assert_array_equal(taken_E, vector_E)
            assert self.mailbox.take(attention, microbatch, Target(1, microbatch, target.step)) is None
        else:
            assert self.mailbox.take(attention, microbatch, Target(0, microbatch, 1)) is None


TestMailboxMachine = pytest.mark.slow(MailboxMachine.TestCase)
TestMailboxMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
