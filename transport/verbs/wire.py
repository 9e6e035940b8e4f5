"""What the two sides of a verbs link say over the stream beside it, and in its notifications: fixed records, checked on arrival.

    owner  → writer   EndpointRecord (behind the handshake's verdict)
    writer → owner    EndpointRecord
    owner  → writer   READY: both queue pairs are connected
    then              frames: ASK, and GRANT, GONE or FOREIGN in answer; REVOKED, and LET_GO in answer

The first byte of each says its kind, and so its length.

A notification is an RDMA WRITE WITH IMMEDIATE for the link's *current* region; where the region differs, a SEND of
``NOTICE`` (region, immediate) after the write, which also makes that region current. A SEND for region 0 announces that the writer
waits for credit. Either takes one receive, in order, so both sides agree on the current region.
"""

from __future__ import annotations

import enum
import re
import struct
from dataclasses import dataclass

from afore.core.errors import WireError
from afore.core.record import record
from afore.transport.api import RegionKey
from afore.transport.verbs.binding import MTU_BYTES

NOTICE = struct.Struct("<II")
ANNOUNCEMENT = 0
"""The region number that a notice of a waiting writer has; regions are numbered from 1."""
ENDPOINT_KIND = 8
_ENDPOINT = struct.Struct("<B3xIIHBBI16s")
_FRAME = struct.Struct("<B3xIIQQ")
ENDPOINT_BYTES = _ENDPOINT.size
FRAME_BYTES = _FRAME.size
CREDITS_LIMIT = 1 << 14
"""Notifications of one link that may wait: one receive is posted for each."""
NUMBER_LIMIT = 1 << 24
"""Queue pair and packet numbers have 24 bits."""
_TOKEN = re.compile(r"([0-9a-f]{1,8})@([0-9a-f]{1,16})")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRecord:
    """One side's queue pair, as the other has to know it."""

    number: int
    first_packet: int
    lid: int
    mtu: int
    """Code of the largest MTU that this side wants."""
    infiniband: bool
    """The link layer; the other one is Ethernet."""
    credits: int
    """Notifications that this side (the owner) takes."""
    gid: bytes

    def pack(self) -> bytes:
        """As it travels."""
        return _ENDPOINT.pack(
            ENDPOINT_KIND, self.number, self.first_packet, self.lid, self.mtu, self.infiniband, self.credits, self.gid
        )

    @classmethod
    def unpack(cls, raw: bytes, peer: str) -> EndpointRecord:
        """Raises ``WireError`` for what no queue pair can be."""
        kind, number, first_packet, lid, mtu, infiniband, credits, gid = _ENDPOINT.unpack(raw)
        if not (
            kind == ENDPOINT_KIND
            and 0 < number < NUMBER_LIMIT
            and first_packet < NUMBER_LIMIT
            and mtu in MTU_BYTES
            and infiniband <= 1
            and 0 < credits <= CREDITS_LIMIT
        ):
            raise WireError(peer, f"its queue pair cannot be ({raw.hex()})")
        return cls(
            number=number,
            first_packet=first_packet,
            lid=lid,
            mtu=mtu,
            infiniband=bool(infiniband),
            credits=credits,
            gid=gid,
        )


class FrameKind(enum.IntEnum):
    """What a frame says of a region."""

    READY = 1
    """Owner: the link works (no region)."""
    ASK = 2
    """Writer: may I write with this key?"""
    GRANT = 3
    """Owner: yes; you will hear when it is closed."""
    GONE = 4
    """Owner: it was closed."""
    FOREIGN = 5
    """Owner: there never was such a region."""
    REVOKED = 6
    """Owner: it is closed now."""
    LET_GO = 7
    """Writer: nothing of mine is under way to it any more."""


_KINDS = frozenset(FrameKind)


@record
class Frame:
    """One frame; ``rkey``, ``address`` and ``nbytes`` count in ASK."""

    kind: FrameKind
    region: int = 0
    rkey: int = 0
    address: int = 0
    nbytes: int = 0

    def pack(self) -> bytes:
        """As it travels."""
        return _FRAME.pack(self.kind, self.region, self.rkey, self.address, self.nbytes)


def message_bytes(kind: int, peer: str) -> int:
    """Length of a message that begins with ``kind``. Raises ``WireError`` for a kind that there is not."""
    if kind == ENDPOINT_KIND:
        return ENDPOINT_BYTES
    if kind not in _KINDS:
        raise WireError(peer, f"a message of kind {kind} over a link")
    return FRAME_BYTES


def unpack_message(raw: bytes, peer: str) -> Frame | EndpointRecord:
    """A whole message. Raises ``WireError``."""
    if raw[0] == ENDPOINT_KIND:
        return EndpointRecord.unpack(raw, peer)
    kind, region, rkey, address, nbytes = _FRAME.unpack(raw)
    return Frame(FrameKind(kind), region, rkey, address, nbytes)


def make_token(rkey: int, address: int) -> str:
    """The part of a ``RegionKey`` that only verbs understands: remote key and virtual address."""
    return f"{rkey:x}@{address:x}"


def read_token(key: RegionKey) -> tuple[int, int] | None:
    """Remote key and virtual address; nothing where the token is not one of this fabric."""
    match = _TOKEN.fullmatch(key.token)
    return (int(match[1], 16), int(match[2], 16)) if match else None
