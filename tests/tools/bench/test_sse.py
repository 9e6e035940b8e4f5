"""Server-sent events out of any pieces of a byte stream."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.tools.bench.sse import EventReader


def test_events_by_hand() -> None:
    reader = EventReader()
    assert reader.feed(b'data: {"a": 1}\n\nda') == [b'{"a": 1}']
    assert reader.feed(b"ta:no space\r\n\r\n: a comment\n\nevent: x\nid: 3\n\n") == [b"no space"]
    assert reader.feed(b"data: one\ndata: two\n\ndata: [DONE]\n") == [b"one\ntwo"]
    assert reader.feed(b"\n") == [b"[DONE]"]


payloads = st.lists(
    st.binary(min_size=1, max_size=20).filter(lambda data: b"\n" not in data and b"\r" not in data), max_size=8
)


@pytest.mark.slow
@given(payloads, st.lists(st.integers(0, 300), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_however_the_stream_is_cut_the_events_are_the_same(sent: list[bytes], cuts: list[int], end: bytes) -> None:
    stream = b"".join(b"data: " + data + end + end for data in sent)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = EventReader()
    found = [event for start, stop in pairwise(edges) for event in reader.feed(stream[start:stop])]
    assert found == sent


@pytest.mark.parametrize("received", [b"x" * 1000, b"data: x\n" * 100])
def test_an_event_without_end_is_refused(received: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afore.tools.bench.sse.MOST_BYTES", 2000)
    reader = EventReader()
    with pytest.raises(ValueError, match="an event of more than"):
        list(map(reader.feed, [received] * 10))
