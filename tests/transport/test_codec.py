"""The codec of control messages: strict both ways, and symmetric."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import WireError
from afore.transport import codec
from afore.transport.codec import ITEM_LIMIT, MESSAGE_LIMIT, decode_message, encode_message

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


@given(values, st.integers(0, 40), st.integers(0, 70_000))
def test_what_a_message_really_holds_is_never_refused(value: object, times: int, many: int) -> None:
    message = {"m": [value] * times, "long": [0] * many, "map": {str(key): key for key in range(times * 20)}}
    body = msgpack.packb(message, use_bin_type=True)
    codec._require_honest(body, "p")
    assert decode_message(body, limit=MESSAGE_LIMIT, peer="p") == message


@pytest.mark.parametrize("head", [b"\xdd\x00\x10\x00\x00", b"\xdc\xff\xff", b"\xdf\x00\x08\x00\x00\xa1k"])
@pytest.mark.parametrize("pad", [0, 1 << 20], ids=["short", "padded"])
def test_lists_within_lists_make_room_for_nothing_that_is_not_there(head: bytes, pad: int) -> None:
    body = b"\x82\xa1p\xc6" + pad.to_bytes(4, "big") + bytes(pad) + b"\xa1k" + head * 1000
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="not plain msgpack"):
            decode_message(body, limit=MESSAGE_LIMIT, peer="p")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


def test_a_sender_learns_of_what_a_reader_would_refuse() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for value in ([None] * (ITEM_LIMIT + 1), deep, {3: 4}, msgpack.ExtType(1, b"x"), msgpack.Timestamp(1)):
        with pytest.raises(WireError):
            encode_message({"v": value}, limit=64 << 20, peer="p")
    assert len(encode_message({"v": [None] * ITEM_LIMIT}, limit=64 << 20, peer="p")) > ITEM_LIMIT
