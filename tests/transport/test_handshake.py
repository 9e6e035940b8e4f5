"""The handshake, both sides at once over a socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from afore.core.errors import AuthenticationFailed, ConfigError, PeerLost, TransportError, VersionMismatch, WireError
from afore.transport.api import Lane
from afore.transport.handshake import Hello, Identity, Purpose, admit, introduce, receive_hello
from afore.transport.sockets import close_all, receive_exactly, send_all
from afore.transport.unix_sockets import require_same_user

SECRET = b"the secret of this run, long enough"
BOTH = frozenset(Purpose)


def identity(name: str = "x", secret: bytes = SECRET, version: int = 7) -> Identity:
    return Identity(address=name, secret=secret, version=version)


async def meet(
    client: Identity, server: Identity, *, purpose: Purpose = Purpose.LINK, purposes: frozenset[Purpose] = BOTH
) -> list[Any]:
    """What each side gets: its result or its error."""
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
    gift = os.eventfd(5, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    async def serve() -> Hello:
        hello = await receive_hello(far, server, purposes, peer="client")
        admit(far, server, hello, reply=b"four", fds=(gift,))
        return hello

    async def come() -> int:
        reply, fds = await introduce(near, client, purpose, Lane.DEMAND, peer="server", reply_bytes=4, max_fds=1)
        assert (reply, len(fds), os.get_inheritable(fds[0])) == (b"four", 1, False)
        value = os.eventfd_read(fds[0])
        close_all(fds)
        return value

    async def then_close(side: Any, sock: socket.socket) -> Any:
        try:
            return await side
        finally:
            sock.close()

    async with asyncio.timeout(20):
        results = await asyncio.gather(then_close(come(), near), then_close(serve(), far), return_exceptions=True)
    os.close(gift)
    return list(results)


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_two_who_share_a_secret_meet(purpose: Purpose) -> None:
    assert await meet(identity("cliént"), identity(), purpose=purpose) == [5, Hello("cliént", purpose, Lane.DEMAND)]


async def test_another_secret_fails_on_both_sides() -> None:
    for error in await meet(identity(), identity(secret=bytes(32))):
        assert isinstance(error, AuthenticationFailed)
        assert "secret" in str(error)


async def test_another_version_fails_on_both_sides_and_names_both() -> None:
    near, far = await meet(identity(version=8), identity())
    assert isinstance(near, VersionMismatch)
    assert isinstance(far, VersionMismatch)
    assert "speaks wire version 7, this side speaks 8" in str(near)
    assert "speaks wire version 8, this side speaks 7" in str(far)


async def test_a_purpose_that_is_not_served_is_said_so() -> None:
    near, far = await meet(identity(), identity(), purposes=frozenset({Purpose.CHANNEL}))
    assert isinstance(near, PeerLost)
    assert isinstance(far, WireError)


async def relayed(change: Callable[[int, bytes], bytes]) -> list[Any]:
    """A handshake through a middleman, who may change each packet (numbered, both ways)."""
    near, left = socket.socketpair()
    right, far = socket.socketpair()
    for sock in (near, left, right, far):
        sock.setblocking(False)
    count = iter(range(100))
    loop = asyncio.get_running_loop()

    async def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := await loop.sock_recv(source, 4096):
            await send_all(sink, change(next(count), data), "sink")
        sink.shutdown(socket.SHUT_WR)

    async def come() -> object:
        try:
            return await introduce(near, identity("client"), Purpose.CHANNEL, Lane.CONTROL, peer="server")
        finally:
            near.close()

    async def serve() -> Hello:
        try:
            hello = await receive_hello(far, identity("server"), BOTH, peer="client")
            admit(far, identity("server"), hello)
            return hello
        finally:
            far.close()

    pumps = [asyncio.create_task(pump(*ends)) for ends in ((left, right), (right, left))]
    async with asyncio.timeout(20):
        results = await asyncio.gather(come(), serve(), return_exceptions=True)
        await asyncio.gather(*pumps, return_exceptions=True)
    left.close()
    right.close()
    return list(results)


async def test_a_faithful_middleman_is_not_noticed() -> None:
    assert await relayed(lambda number, data: data) == [(b"", []), Hello("client", Purpose.CHANNEL, Lane.CONTROL)]


@pytest.mark.parametrize(
    ("number", "at"),
    [(0, 10), (0, 11), (0, 16), (0, 47), (0, 48), (1, 10), (1, 16), (1, 47), (1, 48), (1, 79), (2, 16), (2, 47)],
)
async def test_whatever_a_middleman_changes_fails_on_both_sides(number: int, at: int) -> None:
    def change(packet: int, data: bytes) -> bytes:
        if packet != number:
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    for result in await relayed(change):
        assert isinstance(result, TransportError)


async def test_a_recorded_client_cannot_be_replayed() -> None:
    packets: list[bytes] = []

    def record(number: int, data: bytes) -> bytes:
        packets.append(data)
        return data

    await relayed(record)
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
    await send_all(near, packets[0] + packets[2], "server")
    with pytest.raises(AuthenticationFailed):
        await receive_hello(far, identity("server"), BOTH, peer="client")
    near.close()
    far.close()


async def test_a_server_cannot_pass_the_client_s_own_proof_back() -> None:
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
    coming = asyncio.create_task(introduce(near, identity(), Purpose.LINK, Lane.DATA, peer="server"))
    hello = await receive_exactly(far, 16 + 32 + 1, "client")
    answer = hello[:14] + (64).to_bytes(2, "little")
    await send_all(far, answer + bytes(64), "client")
    proof = await receive_exactly(far, 16 + 32, "client")
    near_again, far_again = socket.socketpair()
    for sock in (near_again, far_again):
        sock.setblocking(False)
    again = asyncio.create_task(introduce(near_again, identity(), Purpose.LINK, Lane.DATA, peer="server"))
    await receive_exactly(far_again, 16 + 32 + 1, "client")
    await send_all(far_again, answer + bytes(32) + proof[16:], "client")
    for task in (coming, again):
        with pytest.raises(AuthenticationFailed):
            await task
    for sock in (near, far, near_again, far_again):
        sock.close()


def test_identities_that_protect_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="guessed"):
        identity(secret=b"short")
    with pytest.raises(ConfigError, match="longer"):
        identity("x" * 2000)


def test_another_user_is_refused() -> None:
    near, far = socket.socketpair()
    with near, far:
        require_same_user(near, "far", os.geteuid())
        with pytest.raises(AuthenticationFailed, match=f"runs as user {os.geteuid()}"):
            require_same_user(near, "far", os.geteuid() + 1)
