"""Strangers at the door: garbage, liars, other versions and those who say nothing cost a bounded time and harm nobody."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

import pytest

from afore.core.control import WIRE_VERSION
from afore.core.errors import AuthenticationFailed, PeerLost, VersionMismatch, WireError
from afore.transport.api import Channel, Fabric, Lane
from afore.transport.handshake import Purpose, introduce
from afore.transport.sockets import close_all, receive_exactly, send_all
from tests.transport.conformance.helpers import TIMEOUT_US, take, until
from tests.transport.conformance.worlds import MESSAGE_LIMIT, StreamWorld


class Echo:
    """A listener whose handler answers, and what it has met."""

    def __init__(self, world: StreamWorld, fabric: Fabric | None = None) -> None:
        self.world = world
        self.fabric = fabric or world.fabric("listener")
        self.address = world.channel_address("hub")
        self.errors: list[str] = []

    async def start(self) -> Echo:
        await self.fabric.listen(self.address, self._handle)
        return self

    async def _handle(self, channel: Channel) -> None:
        try:
            while True:
                await channel.send(await channel.receive(timeout_us=None), timeout_us=TIMEOUT_US)
        except (WireError, PeerLost) as error:
            self.errors.append(type(error).__name__)
            raise

    async def still_serves(self) -> None:
        """A decent client of its channels and one of its links get what they came for."""
        friend = self.world.fabric("friend")
        channel = await friend.dial(self.address, timeout_us=TIMEOUT_US)
        await channel.send({"hello": "world"}, timeout_us=TIMEOUT_US)
        assert await channel.receive(timeout_us=TIMEOUT_US) == {"hello": "world"}
        region = self.fabric.register(8, label="r")
        link = await friend.connect(self.fabric.address, Lane.DEMAND, timeout_us=TIMEOUT_US)
        await link.write(region.key, 0, b"x", notify=1, timeout_us=TIMEOUT_US)
        await take(region, 1)
        await friend.close()

    async def approached_by(self, fabric: Fabric, purpose: str) -> None:
        """``fabric`` comes for a link or a channel."""
        if purpose == "link":
            await fabric.connect(self.fabric.address, Lane.DATA, timeout_us=TIMEOUT_US)
        else:
            await fabric.dial(self.address, timeout_us=TIMEOUT_US)

    async def proven_stranger(self) -> socket.socket:
        """A raw connection after an honest handshake, to send what no channel would."""
        sock = await self.world.stranger(self.address)
        await introduce(sock, self.world.identity(), Purpose.CHANNEL, Lane.CONTROL, peer="listener")
        return sock


async def ended_by_listener(sock: socket.socket) -> None:
    """Reads until the other side ends the connection."""
    with sock, pytest.raises(PeerLost):
        await asyncio.wait_for(receive_exactly(sock, 1 << 20, "listener"), TIMEOUT_US * 1e-6)


GARBAGE = {
    "nothing": b"",
    "one byte": b"A",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "half a magic": b"AFORE\r\n",
    "magic and noise": b"AFORE\r\n\x1a" + b"\xff" * 4096,
    "a hello too long": b"AFORE\r\n\x1a" + struct.pack("<HBBHH", 1, 2, 2, 0, 65535) + b"x" * 65535,
    "a hello too short": b"AFORE\r\n\x1a" + struct.pack("<HBBHH", 1, 2, 2, 0, 3) + b"xyz" * 100,
    "a lane that there is not": b"AFORE\r\n\x1a" + struct.pack("<HBBHH", 1, 1, 9, 0, 40) + b"x" * 40,
    "a wrong proof": b"AFORE\r\n\x1a"
    + struct.pack("<HBBHH", 1, 2, 2, 0, 40)
    + b"x" * 40
    + b"AFORE\r\n\x1a"
    + struct.pack("<HBBHH", 1, 2, 2, 0, 32)
    + b"p" * 32,
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("stay", [True, False], ids=["stay", "leave"])
async def test_garbage_is_turned_away(stream_world: StreamWorld, kind: str, stay: bool) -> None:
    echo = await Echo(stream_world).start()
    for address in (echo.address, echo.fabric.address):
        sock = await stream_world.stranger(address)
        with suppress(PeerLost):  # turned away before it had said everything
            await send_all(sock, GARBAGE[kind], "listener")
        if stay and kind not in ("nothing", "one byte", "half a magic"):
            await ended_by_listener(sock)
        sock.close()
    assert echo.errors == []
    await echo.still_serves()


@pytest.mark.slow
async def test_those_who_say_nothing_are_ended_and_hold_nobody_up(stream_world: StreamWorld) -> None:
    echo = await Echo(stream_world, stream_world.hasty_fabric()).start()
    silent = [await stream_world.stranger(echo.address) for _ in range(50)]
    trickling = await stream_world.stranger(echo.address)
    await send_all(trickling, b"AFO", "listener")
    await echo.still_serves()
    # One deadline bounds the whole handshake, however lively its bytes trickle in.
    for sock in [*silent, trickling]:
        await ended_by_listener(sock)
    await echo.still_serves()


@pytest.mark.parametrize("purpose", ["link", "channel"])
async def test_another_secret_fails_on_both_sides(stream_world: StreamWorld, purpose: str) -> None:
    echo = await Echo(stream_world).start()
    odd = stream_world.odd_fabric(secret=b"another secret, just as long....")
    with pytest.raises(AuthenticationFailed, match="secret"):
        await echo.approached_by(odd, purpose)
    await until(lambda: bool(stream_world.refusals(echo.fabric)))
    assert stream_world.refusals(echo.fabric) == {"AuthenticationFailed": 1}
    await echo.still_serves()


async def test_a_client_that_accepts_any_server_is_still_refused(stream_world: StreamWorld) -> None:
    echo = await Echo(stream_world).start()
    liar = stream_world.identity(secret=b"another secret, just as long....")
    sock = await stream_world.stranger(echo.address)
    with pytest.raises(AuthenticationFailed):
        await introduce(sock, liar, Purpose.CHANNEL, Lane.CONTROL, peer="listener")
    await ended_by_listener(sock)
    await echo.still_serves()


@pytest.mark.parametrize("purpose", ["link", "channel"])
async def test_another_version_is_refused_with_both_named(stream_world: StreamWorld, purpose: str) -> None:
    echo = await Echo(stream_world).start()
    odd = stream_world.odd_fabric(version=4711)
    with pytest.raises(VersionMismatch, match=rf"version {WIRE_VERSION}, .* 4711;"):
        await echo.approached_by(odd, purpose)
    friend = stream_world.fabric("friend")
    with pytest.raises(VersionMismatch, match=rf"version 4711, .* {WIRE_VERSION};"):
        await friend.connect(odd.address, Lane.DATA, timeout_us=TIMEOUT_US)
    await echo.still_serves()


async def test_a_listener_for_channels_takes_no_links(stream_world: StreamWorld) -> None:
    echo = await Echo(stream_world).start()
    friend = stream_world.fabric("friend")
    with pytest.raises(PeerLost, match="kind of connection"):
        await friend.connect(echo.address, Lane.DATA, timeout_us=TIMEOUT_US)
    with pytest.raises(PeerLost, match="kind of connection"):
        await friend.dial(echo.fabric.address, timeout_us=TIMEOUT_US)


@pytest.mark.parametrize("nbytes", [MESSAGE_LIMIT + 1, 2**32 - 1])
async def test_a_huge_length_ends_the_channel_before_a_byte_is_kept(stream_world: StreamWorld, nbytes: int) -> None:
    echo = await Echo(stream_world).start()
    sock = await echo.proven_stranger()
    await send_all(sock, struct.pack("<I", nbytes), "listener")
    await ended_by_listener(sock)
    assert echo.errors == ["WireError"]
    await echo.still_serves()


@pytest.mark.parametrize(
    "body",
    [b"\xc1", b"\x01", b"\x93\x01\x02\x03", b"\x81\xa1a", b"\x81\x01\x02", b"\x81\xa1a\xd6\xff\0\0\0\0", b"\x80\x80", b"",
     b"\x81\xa1a\xdd\xff\xff\xff\xff", b"\x81\xa1a" + b"\x91" * 5000],
    ids=["reserved", "no map", "list", "cut", "int key", "timestamp", "two", "empty", "huge list", "too deep"],
)  # fmt: skip
async def test_a_body_that_is_no_message_is_a_wire_error(stream_world: StreamWorld, body: bytes) -> None:
    echo = await Echo(stream_world).start()
    sock = await echo.proven_stranger()
    await send_all(sock, struct.pack("<I", len(body)) + body, "listener")
    await ended_by_listener(sock)
    assert echo.errors == ["WireError"]
    await echo.still_serves()


@pytest.mark.parametrize("sent", [b"\x05", struct.pack("<I", 100), struct.pack("<I", 100) + b"x" * 99])
async def test_a_stream_cut_inside_a_message_is_peer_lost(stream_world: StreamWorld, sent: bytes) -> None:
    echo = await Echo(stream_world).start()
    sock = await echo.proven_stranger()
    await send_all(sock, sent, "listener")
    sock.close()
    await until(lambda: bool(echo.errors))
    assert echo.errors == ["PeerLost"]
    await echo.still_serves()


async def test_bytes_over_a_link_s_connection_end_that_link_only(stream_world: StreamWorld) -> None:
    echo = await Echo(stream_world).start()
    sock = await stream_world.stranger(echo.fabric.address)
    reply_bytes, max_fds = stream_world.link_terms
    _, fds = await introduce(
        sock,
        stream_world.identity(),
        Purpose.LINK,
        Lane.DATA,
        peer="listener",
        reply_bytes=reply_bytes,
        max_fds=max_fds,
    )
    close_all(fds)
    await send_all(sock, b"!" * 100, "listener")
    await ended_by_listener(sock)
    await echo.still_serves()
