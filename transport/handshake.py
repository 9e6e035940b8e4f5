"""How two sides of a connection meet: wire version, purpose, and proof that both know the run's secret.

    client → server   preamble, nonce, the client's own address
    server → client   preamble, nonce, HMAC-SHA256(secret, "server" + all of the above)
    client → server   preamble, HMAC-SHA256(secret, "client" + all of the above)
    server → client   preamble, what the purpose needs (descriptors for a link)

A preamble is magic, wire version, purpose, lane, verdict and the length of what follows, 16 bytes that stay the same in every
version, so that two versions can name each other. Nothing that is not authenticated costs more than 2 KiB and the caller's
deadline.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import NoReturn

from afore.core.control import WIRE_VERSION
from afore.core.errors import AuthenticationFailed, ConfigError, PeerLost, TransportError, VersionMismatch, WireError
from afore.transport.api import Lane
from afore.transport.sockets import close_all, receive_exactly, receive_with_fds, send_all, send_with_fds

MAGIC = b"AFORE\r\n\x1a"
_PREAMBLE = struct.Struct("<8sHBBHH")
_NONCE_BYTES = 32
_MAC_BYTES = 32
ADDRESS_LIMIT = 1024
SECRET_MIN_BYTES = 16


class Purpose(enum.IntEnum):
    """What a connection is for."""

    LINK = 1
    CHANNEL = 2


class Verdict(enum.IntEnum):
    """What the server says to a preamble."""

    FINE = 0
    OTHER_VERSION = 1
    NOT_HERE = 2
    NOT_PROVEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a side is."""

    address: str
    """Its endpoint."""
    secret: bytes
    """What both sides know and nobody says."""
    version: int = WIRE_VERSION
    """The wire version that it speaks."""

    def __post_init__(self) -> None:
        if len(self.secret) < SECRET_MIN_BYTES:
            raise ConfigError(
                "secret", f"{len(self.secret)} bytes can be guessed", f"give {SECRET_MIN_BYTES} random bytes or more"
            )
        if len(self.address.encode()) > ADDRESS_LIMIT:
            raise ConfigError("address", f"it is longer than {ADDRESS_LIMIT} bytes", "choose a shorter one")


@dataclass(frozen=True, slots=True)
class Hello:
    """What a client said, once it is proven."""

    address: str
    purpose: Purpose
    lane: Lane


@dataclass(frozen=True, slots=True)
class Preamble:
    """What the fixed part of each side's words says; nothing of it is proven."""

    version: int
    purpose: int
    lane: int
    verdict: int
    nbytes: int


def _preamble(version: int, purpose: int, lane: int, nbytes: int, verdict: Verdict = Verdict.FINE) -> bytes:
    return _PREAMBLE.pack(MAGIC, version, purpose, lane, verdict, nbytes)


async def _receive_preamble(sock: socket.socket, peer: str) -> tuple[bytes, Preamble]:
    raw = await receive_exactly(sock, _PREAMBLE.size, peer)
    return raw, parse_preamble(raw, peer)


def parse_preamble(raw: bytes, peer: str) -> Preamble:
    """The preamble in 16 bytes. Raises ``WireError`` for another protocol's."""
    magic, version, purpose, lane, verdict, nbytes = _PREAMBLE.unpack(raw)
    if magic != MAGIC:
        raise WireError(peer, f"it does not speak this protocol (its first bytes are {magic!r})", "check the address")
    return Preamble(version, purpose, lane, verdict, nbytes)


def _proof(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, role + transcript, "sha256")


async def introduce(
    sock: socket.socket,
    me: Identity,
    purpose: Purpose,
    lane: Lane,
    *,
    peer: str,
    reply_bytes: int = 0,
    max_fds: int = 0,
) -> tuple[bytes, list[int]]:
    """The client's side. Returns the ``reply_bytes`` and the descriptors (the caller owns them) that the server sent at last.

    Raises ``VersionMismatch``, ``AuthenticationFailed``, ``PeerLost``, ``WireError``.
    """
    body = secrets.token_bytes(_NONCE_BYTES) + me.address.encode()
    hello = _preamble(me.version, purpose, lane, len(body)) + body
    await send_all(sock, hello, peer)
    raw, answer = await _receive_preamble(sock, peer)
    _require(answer, me, peer, _NONCE_BYTES + _MAC_BYTES)
    body = await receive_exactly(sock, _NONCE_BYTES + _MAC_BYTES, peer)
    transcript = hello + raw + body[:_NONCE_BYTES]
    genuine = hmac.compare_digest(body[_NONCE_BYTES:], _proof(me.secret, b"server", transcript))
    # Sent even to a server that failed, so that it too learns why: over its digest, so it cannot pass by accident.
    proof = _proof(me.secret, b"client", transcript + body[_NONCE_BYTES:])
    await send_all(sock, _preamble(me.version, purpose, lane, _MAC_BYTES) + proof, peer)
    if not genuine:
        raise _not_proven(peer)
    raw, fds = await receive_with_fds(sock, _PREAMBLE.size + reply_bytes, max_fds, peer)
    try:
        _require(parse_preamble(raw[: _PREAMBLE.size], peer), me, peer, reply_bytes)
    except BaseException:
        close_all(fds)
        raise
    return raw[_PREAMBLE.size :], fds


def _require(answer: Preamble, me: Identity, peer: str, nbytes: int) -> None:
    if answer.version != me.version:
        raise _other_version(peer, answer.version, me.version)
    if answer.verdict == Verdict.NOT_PROVEN:
        raise _not_proven(peer)
    if answer.verdict == Verdict.NOT_HERE:
        raise PeerLost(peer, "it does not take that kind of connection at this address", "check the address")
    if answer.verdict != Verdict.FINE or answer.nbytes != nbytes:
        raise WireError(peer, f"its answer has verdict {answer.verdict} and {answer.nbytes} bytes")


async def receive_hello(sock: socket.socket, me: Identity, purposes: frozenset[Purpose], *, peer: str) -> Hello:
    """The server's side up to its verdict, which ``admit`` sends. A client that fails is told why before this raises.

    Raises ``VersionMismatch``, ``AuthenticationFailed``, ``PeerLost``, ``WireError``.
    """
    raw, said = await _receive_preamble(sock, peer)
    if said.version != me.version:
        await _refuse(sock, me, said, Verdict.OTHER_VERSION, _other_version(peer, said.version, me.version))
    if said.purpose not in purposes or said.lane not in tuple(Lane):
        await _refuse(
            sock, me, said, Verdict.NOT_HERE, WireError(peer, f"no connection for {said.purpose}/{said.lane} here")
        )
    if not _NONCE_BYTES <= said.nbytes <= _NONCE_BYTES + ADDRESS_LIMIT:
        raise WireError(peer, f"a hello of {said.nbytes} bytes")
    body = await receive_exactly(sock, said.nbytes, peer)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    answer = _preamble(me.version, said.purpose, said.lane, _NONCE_BYTES + _MAC_BYTES)
    transcript = raw + body + answer + nonce
    mine = _proof(me.secret, b"server", transcript)
    await send_all(sock, answer + nonce + mine, peer)
    _, closing = await _receive_preamble(sock, peer)
    if closing.nbytes != _MAC_BYTES:
        raise WireError(peer, f"a proof of {closing.nbytes} bytes")
    proof = await receive_exactly(sock, _MAC_BYTES, peer)
    if not hmac.compare_digest(proof, _proof(me.secret, b"client", transcript + mine)):
        await _refuse(sock, me, said, Verdict.NOT_PROVEN, _not_proven(peer))
    try:
        address = body[_NONCE_BYTES:].decode()
    except UnicodeDecodeError as error:
        raise WireError(peer, "its address is not UTF-8") from error
    return Hello(address, Purpose(said.purpose), Lane(said.lane))


def admit(sock: socket.socket, me: Identity, hello: Hello, *, reply: bytes = b"", fds: tuple[int, ...] = ()) -> None:
    """Lets the client in, with what its purpose needs. Raises ``PeerLost``."""
    send_with_fds(sock, _preamble(me.version, hello.purpose, hello.lane, len(reply)) + reply, fds, hello.address)


async def _refuse(
    sock: socket.socket, me: Identity, said: Preamble, verdict: Verdict, error: TransportError
) -> NoReturn:
    try:
        await send_all(sock, _preamble(me.version, said.purpose, said.lane, 0, verdict), error.peer)
    except PeerLost:
        raise error from None
    raise error


def _not_proven(peer: str) -> AuthenticationFailed:
    return AuthenticationFailed(
        peer, "it could not prove that it knows this run's secret", "give both sides the same secret"
    )


def _other_version(peer: str, theirs: int, ours: int) -> VersionMismatch:
    return VersionMismatch(
        peer,
        f"it speaks wire version {theirs}, this side speaks {ours}",
        "install the same version of afore on both sides",
    )
