"""The ring of immediates: every entry once and in order, bounded by credit, and never both sides asleep."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import WireError
from afore.transport.shm_ring import CREDITED, TAIL, WAITING, RingReader, RingWriter, create_ring_fd, ring_bytes


@contextmanager
def ring(slots: int) -> Iterator[tuple[RingWriter, RingReader]]:
    fd = create_ring_fd(slots)
    writer, reader = RingWriter(fd, slots, "owner"), RingReader(fd, slots, "writer")
    os.close(fd)
    yield writer, reader
    writer.close()
    reader.close()


@given(
    slots=st.sampled_from([1, 2, 8, 16]),
    steps=st.lists(st.sampled_from(["push", "drain", "take", "sleep"]), max_size=80),
)
def test_against_a_plain_queue(slots: int, steps: list[str]) -> None:
    with ring(slots) as (writer, reader):
        pushed = drained = taken = credited = 0
        published: deque[int] = deque()
        asleep = False
        for step in steps:
            if step == "push" and not asleep:
                assert writer.has_room() == (pushed - credited < slots)
                if writer.has_room():
                    writer.push(pushed << 32 | 2**32 - 1)
                    published.append(pushed << 32 | 2**32 - 1)
                    pushed += 1
            elif step == "sleep" and not asleep:
                asleep = not writer.has_room_or_announce()
                assert asleep == (pushed - credited == slots)
            elif step == "drain":
                assert list(reader.drain()) == list(published)
                drained += len(published)
                published.clear()
            elif step == "take" and taken < drained:
                taken += 1
                reader.taken += 1
            if reader.taken >= reader.due:
                # Only a reader that rings a sleeping writer, and rings nobody else.
                assert reader.give_credit() == asleep
                asleep = False
                credited = taken
            # Credit is held back only from a writer that has plenty, and never the last of it.
            assert taken == credited or (drained - credited <= slots // 2 and taken - credited < max(1, slots // 4))
            # Nobody sleeps while there is room that the other side knows of.
            assert not (asleep and drained == pushed and taken > credited)


def test_a_push_without_credit_is_a_defect_and_harms_nothing() -> None:
    with ring(2) as (writer, reader):
        writer.push(1)
        writer.push(2)
        with pytest.raises(AssertionError):
            writer.push(3)
        assert list(reader.drain()) == [1, 2]


@pytest.mark.parametrize("tail", [5, 2**63, 2**64 - 1])
def test_a_ring_that_cannot_be_is_refused(tail: int) -> None:
    with ring(4) as (writer, reader):
        writer.push(7)
        assert list(reader.drain()) == [7]
        writer._words[TAIL] = tail
        with pytest.raises(WireError, match="jumps"):
            reader.drain()
        writer._words[TAIL] = 0
        with pytest.raises(WireError, match="jumps"):
            reader.drain()


@pytest.mark.parametrize("slots", [0, 3, -4, 1 << 20])
def test_sizes_that_cannot_be_are_refused(slots: int) -> None:
    fd = create_ring_fd(4)
    with pytest.raises(WireError, match="slots"):
        RingReader(fd, slots, "p")
    os.close(fd)


def test_a_ring_of_another_size_is_refused_and_none_can_be_resized() -> None:
    fd = create_ring_fd(4)
    with pytest.raises(WireError, match="slots"):
        RingWriter(fd, 1024, "p")
    for size in (0, 2 * ring_bytes(4)):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_words_that_change_lie_in_cache_lines_of_their_own() -> None:
    assert len({word * 8 // 64 for word in (TAIL, CREDITED, WAITING)}) == 3
