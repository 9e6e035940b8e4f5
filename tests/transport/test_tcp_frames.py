"""What travels over a tcp link, cut in every way: the same bytes, notifications and refusals come out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.errors import WireError
from afore.transport.records import (
    FRAME,
    FRAME_MAGIC,
    FRAME_NOTIFIES,
    FRAME_READS,
    NEWS,
    NEWS_CREDIT,
    NEWS_MAGIC,
    NEWS_READ,
    NEWS_REVOKED,
    NEWS_UNREAD,
    READ_LIMIT,
)
from afore.transport.tcp_frames import PAYLOAD_LIMIT, STAGING_BYTES, FrameReader, NewsReader

REGION_BYTES = 40_000
TOKENS = {1: 11, 2: 22}
"""Regions that are open, by number."""


class Ground:
    """Where frames land, and what was said."""

    def __init__(self) -> None:
        self.memory = {region: bytearray(REGION_BYTES) for region in TOKENS}
        self.said: list[tuple[object, ...]] = []

    def find(self, region: int, token: int) -> memoryview | None:
        return memoryview(self.memory[region]) if TOKENS.get(region) == token else None

    def told(self, region: int, immediate: int) -> None:
        # What is told lies there: the bytes at this moment are part of what was said.
        self.said.append((region, immediate, bytes(self.memory[region])))

    def dropped(self) -> None:
        self.said.append(("dropped",))

    def asked(self, memory: memoryview | None, request: int) -> None:
        self.said.append(("asked", request, None if memory is None else bytes(memory)))


@dataclass(frozen=True)
class Write:
    region: int
    token: int
    offset: int
    payload: bytes
    notify: int | None

    def encoded(self) -> bytes:
        flags = 0 if self.notify is None else FRAME_NOTIFIES
        head = FRAME.pack(FRAME_MAGIC, flags, self.region, self.notify or 0, self.token, self.offset, len(self.payload))
        return head + self.payload


def feed(reader: FrameReader, stream: bytes, cuts: list[int]) -> None:
    """Gives ``stream`` to ``reader`` as a network that delivers ``cuts`` bytes at a time, round and round, would."""
    at = turn = 0
    while at < len(stream):
        room = reader.room()
        assert len(room)
        part = stream[at : at + min(len(room), cuts[turn % len(cuts)])]
        room[: len(part)] = part
        reader.received(len(part))
        at += len(part)
        turn += 1


sizes = st.sampled_from([0, 1, 7, 40, 511, STAGING_BYTES - 40, STAGING_BYTES, STAGING_BYTES + 1, 20_000]) | st.integers(
    0, 100
)
writes = st.builds(
    lambda region, token, offset, nbytes, byte, notify: Write(region, token, offset, bytes([byte]) * nbytes, notify),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([11, 22, 33]),
    st.integers(0, 1000),
    sizes,
    st.integers(1, 255),
    st.none() | st.integers(0, 2**32 - 1),
)
cuts_of = st.lists(st.sampled_from([1, 3, 39, 40, 41, 1000, STAGING_BYTES, 1 << 20]), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=60)
@given(batch=st.lists(writes, max_size=8), cuts=cuts_of)
def test_however_a_stream_is_cut_it_says_the_same(batch: list[Write], cuts: list[int]) -> None:
    ground, expected = Ground(), Ground()
    for write in batch:
        target = expected.find(write.region, write.token)
        if target is not None:
            target[write.offset : write.offset + len(write.payload)] = write.payload
            if write.notify is not None:
                expected.told(write.region, write.notify)
        elif write.notify is not None:
            expected.dropped()
    reader = FrameReader("p", ground)
    feed(reader, b"".join(write.encoded() for write in batch), cuts)
    assert not reader.amid
    assert ground.said == expected.said
    assert ground.memory == expected.memory


@pytest.mark.parametrize("cut", [1, 40, 1 << 20])
def test_a_read_behind_a_notification_says_nothing_but_the_read(cut: int) -> None:
    ground = Ground()
    told = Write(1, 11, 0, b"first", 7)
    asked = FRAME.pack(FRAME_MAGIC, FRAME_READS, 1, 3, 11, 0, 5)
    feed(FrameReader("p", ground), told.encoded() + asked + told.encoded() + asked, [cut])
    assert [said[:2] for said in ground.said] == [(1, 7), ("asked", 3)] * 2


@pytest.mark.parametrize("received", [0, 1, 39, 40, 41, 40 + 8000, 40 + STAGING_BYTES, 40 + 29_999])
def test_a_region_that_closes_amid_a_frame_gets_no_further_byte(received: int) -> None:
    ground = Ground()
    reader = FrameReader("p", ground)
    stream = Write(1, 11, 0, b"x" * 30_000, 5).encoded() + Write(2, 22, 0, b"after", 6).encoded()
    feed(reader, stream[:received], [1 << 20])
    assert reader.amid == bool(received)
    reader.revoke(1)
    open_ones = ground.find
    ground.find = lambda region, token: None if region == 1 else open_ones(region, token)  # type: ignore[method-assign]
    before = bytes(ground.memory[1])
    feed(reader, stream[received:], [1 << 20])
    assert ground.memory[1] == before
    assert ground.said[0] == ("dropped",)
    assert ground.said[1][:2] == (2, 6)
    assert ground.memory[2][:5] == b"after"


@pytest.mark.parametrize(
    "head",
    [
        FRAME.pack(FRAME_MAGIC ^ 1, 0, 1, 0, 11, 0, 0),
        FRAME.pack(FRAME_MAGIC, 4, 1, 0, 11, 0, 0),
        FRAME.pack(FRAME_MAGIC, FRAME_READS | FRAME_NOTIFIES, 1, 0, 11, 0, 0),
        FRAME.pack(FRAME_MAGIC, FRAME_READS, 1, 0, 11, 1, REGION_BYTES),
        FRAME.pack(FRAME_MAGIC, FRAME_READS, 3, 0, 11, 0, READ_LIMIT + 1),
        FRAME.pack(FRAME_MAGIC, 0, 1, 0, 11, REGION_BYTES, 1),
        FRAME.pack(FRAME_MAGIC, 0, 1, 0, 11, 0, REGION_BYTES + 1),
        FRAME.pack(FRAME_MAGIC, 0, 1, 0, 11, 2**64 - 1, 1),
        FRAME.pack(FRAME_MAGIC, 0, 3, 0, 11, 0, PAYLOAD_LIMIT),
        bytes(40),
    ],
    ids=["magic", "flags", "both", "read beyond", "read too much", "offset", "size", "wraps", "endless", "zeros"],
)
def test_what_no_writer_sends_is_a_wire_error_and_touches_nothing(head: bytes) -> None:
    ground = Ground()
    with pytest.raises(WireError):
        feed(FrameReader("p", ground), head + b"\xff" * 100, [1 << 20])
    assert ground.said == []
    assert not any(any(memory) for memory in ground.memory.values())


class Ear:
    """Hears an owner's news."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.answer = bytearray()
        self.answers: list[bytes] = []

    def credit(self, count: int) -> None:
        self.heard.append(("credit", count))

    def revoked(self, token: int) -> None:
        self.heard.append(("revoked", token))

    def answered(self, request: int) -> memoryview | None:
        self.heard.append(("read", request))
        self.answer = bytearray(request % 100)
        return memoryview(self.answer)

    def wanted(self) -> int:
        return len(self.answer)

    def filled(self) -> None:
        self.answers.append(bytes(self.answer))

    def unread(self, request: int) -> None:
        self.heard.append(("unread", request))


@settings(max_examples=30)
@given(
    news=st.lists(
        st.tuples(st.sampled_from(["credit", "revoked", "read", "unread"]), st.integers(0, 2**64 - 1)), max_size=20
    ),
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=5),
)
def test_news_come_whole_however_they_are_cut(news: list[tuple[str, int]], cuts: list[int]) -> None:
    kinds = {"credit": NEWS_CREDIT, "revoked": NEWS_REVOKED, "read": NEWS_READ, "unread": NEWS_UNREAD}
    answers = [bytes(range(value % 100)) for kind, value in news if kind == "read"]
    stream = b"".join(
        NEWS.pack(NEWS_MAGIC, kinds[kind], value) + (bytes(range(value % 100)) if kind == "read" else b"")
        for kind, value in news
    )
    ear = Ear()
    reader = NewsReader("p", ear)
    at = turn = 0
    while at < len(stream):
        reader.received(memoryview(stream)[at : at + cuts[turn % len(cuts)]])
        at += cuts[turn % len(cuts)]
        turn += 1
    assert ear.heard == news
    assert ear.answers == [answer for answer in answers if answer]


@pytest.mark.parametrize("raw", [NEWS.pack(NEWS_MAGIC ^ 1, 1, 1), NEWS.pack(NEWS_MAGIC, 9, 1), bytes(16)])
def test_news_that_nobody_tells_are_a_wire_error(raw: bytes) -> None:
    ear = Ear()
    with pytest.raises(WireError):
        NewsReader("p", ear).received(raw)
    assert ear.heard == []
