"""The codec of control messages: strict both ways, and symmetric."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import WireError
from afore.transport.codec import ITEM_LIMIT, decode_message, encode_message

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12
)


@pytest.mark.slow
@given(message=st.dictionaries(text, values, max_size=6))
def test_messages_survive(message: dict[str, object]) -> None:
    body = encode_message(message, limit=1 << 20, peer="p")
    assert decode_message(body, limit=len(body), peer="p") == message
    with pytest.raises(WireError, match="over the limit"):
        decode_message(body, limit=len(body) - 1, peer="p")
    with pytest.raises(WireError, match="over the limit"):
        encode_message(message, limit=len(body) - 1, peer="p")


@given(
    body=st.binary(max_size=64) | st.lists(st.sampled_from(b"\x80\x81\x90\x91\xa1a\xc1\xd4\xdd\xff\x00\x01")).map(bytes)
)
def test_any_bytes_are_a_message_or_a_wire_error(body: bytes) -> None:
    try:
        message = decode_message(body, limit=1 << 20, peer="p")
    except WireError:
        return
    again = decode_message(encode_message(message, limit=1 << 20, peer="p"), limit=1 << 20, peer="p")
    assert repr(again) == repr(message)  # NaN is not equal to itself


@given(
    value=st.recursive(
        st.none(), lambda inner: st.tuples(inner).map(list) | inner.map(lambda v: {"k": v}), max_leaves=3
    )
)
def test_what_is_sent_can_be_read(value: object) -> None:
    body = encode_message({"v": value}, limit=1 << 20, peer="p")
    assert decode_message(body, limit=1 << 20, peer="p") == {"v": value}


def test_a_sender_learns_of_what_a_reader_would_refuse() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for value in ([None] * (ITEM_LIMIT + 1), deep, {3: 4}, msgpack.ExtType(1, b"x"), msgpack.Timestamp(1)):
        with pytest.raises(WireError):
            encode_message({"v": value}, limit=64 << 20, peer="p")
    assert len(encode_message({"v": [None] * ITEM_LIMIT}, limit=64 << 20, peer="p")) > ITEM_LIMIT
