"""Credit and the accounts of the send queue: nothing runs out, nothing overlaps, nobody waits for ever."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import WireError
from afore.transport.verbs.credits import ANNOUNCEMENTS_IN_FLIGHT, MESSAGES_IN_FLIGHT, OwnerCredit, WriterCredit
from afore.transport.verbs.sending import RESERVE, SendQueue


class Ends:
    """A writer and an owner with two ordered wires between them, stepped one event at a time."""

    def __init__(self, credits: int) -> None:
        self.credits = credits
        self.writer, self.owner = WriterCredit(credits), OwnerCredit(credits)
        self.there: deque[str] = deque()
        self.back: deque[int] = deque()
        self.inbox = 0
        self.sent = self.taken = 0

    def step(self, what: str) -> None:
        if what == "write":
            if self.writer.free:
                self.writer.spend()
                self.sent += 1
                self.there.append("notification")
            elif self.writer.announce():
                self.there.append("announcement")
        elif what == "arrive" and self.there:
            if self.there.popleft() == "notification":
                self.inbox += 1
            elif self.owner.announced():
                self.back.append(self.owner.say())
        elif what == "take one" and self.inbox:
            self.take(1)
        elif what == "take all" and self.inbox:
            self.take(self.inbox)
        elif what == "hear" and self.back:
            self.writer.given(self.back.popleft(), "owner")
        assert len(self.there) <= self.credits + ANNOUNCEMENTS_IN_FLIGHT, "a receive too few"
        assert len(self.back) <= MESSAGES_IN_FLIGHT, "a receive of credit too few"

    def take(self, count: int) -> None:
        self.inbox -= count
        self.taken += count
        if self.owner.took(count):
            self.back.append(self.owner.say())


EVENTS = st.sampled_from(["write", "arrive", "take one", "take all", "hear"])


@given(st.integers(1, 9), st.lists(EVENTS, max_size=300))
def test_receives_never_run_out_and_a_waiting_writer_gets_on(credits: int, events: list[str]) -> None:
    ends = Ends(credits)
    for event in events:
        ends.step(event)
    # However it stands: once the owner takes what there is, one more notification can be sent.
    before = ends.sent
    for _ in range(20 * credits):
        for event in ("write", "arrive", "take one", "hear"):
            ends.step(event)
    assert ends.sent > before + credits


@given(st.integers(1, 9), st.integers(1, 400))
def test_an_owner_that_takes_only_part_starves_nobody(credits: int, rounds: int) -> None:
    ends = Ends(credits)
    for _ in range(credits):
        ends.step("write")
        ends.step("arrive")
    ends.step("take one")
    for event in ("write", "arrive", "hear"):
        ends.step(event)
    assert ends.writer.free == 1 or ends.sent == credits + 1


def test_counts_that_cannot_be_are_refused() -> None:
    writer = WriterCredit(4)
    writer.spend()
    for immediate in (0, 2 << 1, 5 << 1, ((1 << 31) - 1) << 1):
        with pytest.raises(WireError, match="peer owner: it took"):
            writer.given(immediate, "owner")
    writer.given(1 << 1, "owner")
    assert writer.free == 4


def test_counts_wrap() -> None:
    writer, owner = WriterCredit(2), OwnerCredit(2)
    writer._taken = owner._taken = owner._said = (1 << 31) - 1
    for _ in range(2):
        writer.spend()
    assert owner.took(2)
    writer.given(owner.say(), "owner")
    assert writer.free == 2


@given(
    st.integers(4, 20),
    st.integers(8, 64),
    st.lists(st.tuples(st.integers(0, 70), st.booleans()), max_size=200),
)
def test_staged_pieces_never_overlap_and_everything_completes(
    depth: int, size: int, events: list[tuple[int, bool]]
) -> None:
    queue = SendQueue(depth, size)
    staged: dict[int, tuple[int, int]] = {}
    signaled: deque[int] = deque()

    def complete() -> None:
        if signaled:
            queue.completed(signaled.popleft())
            for number in [one for one in staged if one <= queue.done]:
                del staged[number]

    def flush() -> None:
        if queue.needs_flush():
            assert queue.has_reserve()
            assert queue.post(signaled=True)
            signaled.append(queue.posted)

    for nbytes, completes in events:
        while not queue.has_room(2, nbytes):
            # What the link does for want of room; it must always help.
            flush()
            assert signaled, "nothing will ever complete"
            complete()
        if nbytes <= size:
            at = queue.stage(nbytes)
            assert 0 <= at <= size - nbytes
            for begin, end in staged.values():
                assert at + nbytes <= begin or end <= at or nbytes == 0 or begin == end
        sign = queue.post(signaled=nbytes > size)
        assert sign or nbytes <= size
        if nbytes <= size:
            staged[queue.posted] = (at, at + nbytes)
        if sign:
            signaled.append(queue.posted)
        assert queue.posted - queue.done <= depth + RESERVE
        if completes:
            complete()
    flush()
    while signaled:
        complete()
    assert queue.posted == queue.done


def test_what_is_held_comes_back_with_its_completion_or_at_the_end() -> None:
    queue = SendQueue(8, 64)
    queue.hold("first")
    assert queue.post(signaled=True)
    first = queue.posted
    queue.hold("second")
    assert not queue.post(signaled=False)
    assert queue.post(signaled=True)
    queue.hold("fourth")
    assert queue.completed(first) == ["first"]
    assert queue.done == first < queue.posted
    assert queue.abandon() == ["second", "fourth"]
    assert queue.posted == queue.done


@pytest.mark.parametrize("nbytes", [1, 300, 700, 1000])
def test_where_nothing_is_staged_the_next_piece_is_the_first(nbytes: int) -> None:
    queue = SendQueue(64, 1000)
    for _ in range(3):
        assert queue.has_room(1, nbytes)
        assert queue.stage(nbytes) == 0
        queue.post(signaled=True)
        queue.completed(queue.posted)
