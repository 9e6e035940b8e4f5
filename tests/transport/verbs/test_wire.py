"""Records of the stream beside a link, tokens, and what failed completions become."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import PeerLost, RegionRevoked, WireError
from afore.transport.api import RegionKey
from afore.transport.verbs.status import (
    NAMES,
    NOT_READY_EXCEEDED,
    REMOTE_ACCESS,
    RETRIES_EXCEEDED,
    link_error,
    status_name,
)
from afore.transport.verbs.wire import (
    CREDITS_LIMIT,
    ENDPOINT_BYTES,
    FRAME_BYTES,
    NUMBER_LIMIT,
    EndpointRecord,
    Frame,
    FrameKind,
    make_token,
    message_bytes,
    read_token,
    unpack_message,
)

endpoints = st.builds(
    EndpointRecord,
    number=st.integers(1, NUMBER_LIMIT - 1),
    first_packet=st.integers(0, NUMBER_LIMIT - 1),
    lid=st.integers(0, 65_535),
    mtu=st.integers(1, 5),
    infiniband=st.booleans(),
    credits=st.integers(1, CREDITS_LIMIT),
    gid=st.binary(min_size=16, max_size=16),
)
frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    region=st.integers(0, 2**32 - 1),
    rkey=st.integers(0, 2**32 - 1),
    address=st.integers(0, 2**64 - 1),
    nbytes=st.integers(0, 2**64 - 1),
)


@given(endpoints | frames)
def test_messages_survive_their_journey(message: EndpointRecord | Frame) -> None:
    raw = message.pack()
    assert message_bytes(raw[0], "peer") == len(raw) in (ENDPOINT_BYTES, FRAME_BYTES)
    assert unpack_message(raw, "peer") == message


@given(st.binary(min_size=ENDPOINT_BYTES, max_size=ENDPOINT_BYTES))
def test_bytes_are_a_message_or_a_wire_error(raw: bytes) -> None:
    with suppress(WireError):
        message = unpack_message(raw[: message_bytes(raw[0], "peer")], "peer")
        assert unpack_message(message.pack(), "peer") == message


@pytest.mark.parametrize(
    ("field", "value"),
    [("number", 0), ("number", NUMBER_LIMIT), ("first_packet", NUMBER_LIMIT), ("mtu", 0), ("mtu", 6), ("credits", 0)],
)
def test_queue_pairs_that_cannot_be_are_refused(field: str, value: int) -> None:
    said: dict[str, Any] = {"number": 1, "first_packet": 2, "lid": 0, "mtu": 5, "infiniband": False, "credits": 8}
    EndpointRecord.unpack(EndpointRecord(**said, gid=bytes(16)).pack(), "peer")
    with pytest.raises(WireError, match="cannot be"):
        EndpointRecord.unpack(EndpointRecord(**said | {field: value}, gid=bytes(16)).pack(), "peer")


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_tokens_carry_key_and_address(rkey: int, address: int) -> None:
    key = RegionKey("verbs", "10.0.0.1:1", 1, 8, make_token(rkey, address))
    assert read_token(key) == (rkey, address)


@pytest.mark.parametrize("token", ["", "afore-x/../../etc/passwd", "12", "-1@2", "1@", "1@2 ", "123456789@1", "G@1"])
def test_other_tokens_are_none(token: str) -> None:
    assert read_token(RegionKey("verbs", "10.0.0.1:1", 1, 8, token)) is None


def test_failures_name_peer_operation_status_and_remedy() -> None:
    operation = "RDMA WRITE to region 7"
    lost = link_error("ffn-3", operation, RETRIES_EXCEEDED, patience="7 retries")
    assert type(lost) is PeerLost
    assert (lost.peer, lost.operation) == (
        "ffn-3",
        "RDMA WRITE to region 7 failed: transport retries exceeded (12) after 7 retries",
    )
    assert "doctor" in lost.hint
    assert type(link_error("ffn-3", operation, REMOTE_ACCESS, revoked=True)) is RegionRevoked
    assert type(link_error("ffn-3", operation, REMOTE_ACCESS)) is PeerLost
    assert "credits" in link_error("ffn-3", operation, NOT_READY_EXCEEDED).hint


@given(st.integers(0, 1000))
def test_every_status_has_a_name_and_an_error(status: int) -> None:
    assert status_name(status).endswith(f"({status})")
    error = link_error("ffn-3", "SEND", status)
    assert "ffn-3" in str(error)
    assert status_name(status) in str(error)
    assert error.hint
    assert len(set(NAMES)) == len(NAMES) == 24
