"""What only tcp has: configuration, keys, back-pressure, peers that break the rules, and lives that follow one another."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from afore.core.errors import (
    AccessRefused,
    ConfigError,
    DeadlineExceeded,
    HostError,
    PeerLost,
    RegionRevoked,
    WireError,
)
from afore.core.link_options import TcpOptions
from afore.transport import tcp_link
from afore.transport.api import Lane, Link, Region, RegionKey
from afore.transport.handshake import Identity, Purpose, admit, introduce, receive_hello
from afore.transport.private_segment import PrivateSegment
from afore.transport.records import (
    FRAME,
    FRAME_MAGIC,
    FRAME_NOTIFIES,
    FRAME_READS,
    LINK_TERMS,
    NEWS,
    NEWS_CREDIT,
    NEWS_MAGIC,
)
from afore.transport.shm_segments import read_header
from afore.transport.sockets import receive_exactly, send_all
from afore.transport.tcp import TcpConfig, TcpFabric
from afore.transport.tcp_keys import new_key, require_genuine
from afore.transport.tcp_link import TcpLink
from afore.transport.tcp_sockets import connect_tcp
from tests.transport.conformance.helpers import raises_soon

SECRET = b"the secret of this run, long enough"
T_US = 20e6
Make = Callable[..., TcpFabric]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes endpoints, and closes them."""
    made: list[TcpFabric] = []

    def one(**options: Any) -> TcpFabric:
        made.append(TcpFabric(TcpConfig(**{"secret": SECRET} | options)))
        return made[-1]

    yield one
    for fabric in made:
        await fabric.close()


async def linked(make: Make, nbytes: int = 4096, **options: Any) -> tuple[Link, Region]:
    near, far = make(), make(**options)
    region = far.register(nbytes, label="r")
    return await near.connect(far.address, Lane.DATA, timeout_us=T_US), region


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"listen": "nowhere"}, "tcp.listen"),
        ({"listen": "10.0.0.1:0"}, "secret_file"),
        ({"listen": "0.0.0.0:0"}, "tcp.listen"),
        ({"listen": "[::]:0", "secret": SECRET}, "tcp.listen"),
        ({"advertise": "nowhere"}, "tcp.advertise"),
        ({"credits": 0}, "tcp.credits"),
        ({"unsent_bytes": 0}, "tcp.unsent_bytes"),
        ({"message_limit": 0}, "tcp.message_limit"),
        ({"handshake_timeout_us": 0.0}, "tcp.handshake_timeout_us"),
        ({"greetings_limit": 0}, "tcp.greetings_limit"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TcpConfig(**options)
    assert caught.value.field == field


async def test_without_a_secret_nobody_beyond_this_machine_is_met(make: Make) -> None:
    open_one = make(secret=None)
    friend = make(secret=None)
    await (await friend.connect(open_one.address, Lane.DATA, timeout_us=T_US)).close()
    for attempt in (
        open_one.connect("10.0.0.1:7", Lane.DATA, timeout_us=T_US),
        open_one.dial("node-1:7", timeout_us=T_US),
        open_one.listen("0.0.0.0:0", lambda channel: channel.close()),
    ):
        with pytest.raises(ConfigError, match="no secret"):
            await attempt
    with pytest.raises(ConfigError, match="guessed"):
        make(secret=b"short")


async def test_an_endpoint_may_be_reached_at_another_address_than_it_listens_at(make: Make) -> None:
    fabric = make(listen="127.0.0.1:0", advertise="localhost:0")
    assert fabric.address == "localhost:" + fabric.listens_at.rpartition(":")[2]
    region = fabric.register(8, label="r")
    link = await make().connect(fabric.address, Lane.DATA, timeout_us=T_US)
    await link.write(region.key, 0, b"here", notify=1, timeout_us=T_US)
    await region.notified(timeout_us=T_US)
    assert bytes(region.buffer[:4]) == b"here"


def test_keys_prove_who_made_them_and_for_what() -> None:
    key, number = new_key(SECRET, "a:1", 7, 4096)
    assert require_genuine(SECRET, key, "a:1") == number
    other, _ = new_key(SECRET, "a:1", 7, 4096)
    assert other.token != key.token
    forged = [
        dataclasses.replace(key, **change)
        for change in (
            {"fabric": "shm"},
            {"address": "b:1"},
            {"region": 8},
            {"nbytes": 4097},
            {"token": other.token[:17] + key.token[17:]},
            {"token": ""},
        )
    ]
    for attempt in forged:
        with pytest.raises(AccessRefused):
            require_genuine(SECRET, attempt, "a:1")
    with pytest.raises(AccessRefused):
        require_genuine(b"another", key, "a:1")


async def test_a_key_of_an_earlier_life_writes_nothing(make: Make) -> None:
    near, first = make(), make()
    old = first.register(8, label="r").key
    await first.close()
    second = make(listen=first.address)
    region = second.register(8, label="r")
    assert (old.address, old.region, old.nbytes) == (region.key.address, region.key.region, region.key.nbytes)
    link = await near.connect(second.address, Lane.DATA, timeout_us=T_US)
    await link.write(old, 0, b"stale", notify=1, timeout_us=T_US)
    await link.write(region.key, 0, b"f", notify=2, timeout_us=T_US)
    assert [told.immediate for told in await region.notified(timeout_us=T_US)] == [2]
    assert bytes(region.buffer) == b"f" + bytes(7)
    await raises_soon(RegionRevoked, partial(link.write, old, 0, b"stale", timeout_us=T_US))


async def test_a_writer_waits_while_its_peer_does_not_read(make: Make) -> None:
    """The owner is a socket that never reads: what the kernel does not take is bounded, and so is the wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        me = Identity(address=address, secret=SECRET)
        loop = asyncio.get_running_loop()

        async def owner() -> socket.socket:
            sock, _ = await loop.sock_accept(server)
            sock.setblocking(False)
            hello = await receive_hello(sock, me, frozenset(Purpose), peer="client")
            admit(sock, me, hello, reply=LINK_TERMS.pack(64))
            return sock

        accepting = asyncio.create_task(owner())
        near = make(unsent_bytes=1 << 16)
        link = await near.connect(address, Lane.DATA, timeout_us=T_US)
        silent = await accepting
        key, number = new_key(SECRET, address, 1, 1 << 20)
        sent = 0
        with pytest.raises(DeadlineExceeded, match="does not read"):  # noqa: PT012  # how much fits is the kernel's affair
            while True:
                await link.write(key, 0, sent.to_bytes(8, "little") * (1 << 14), timeout_us=20_000)
                sent += 1
        cancelled = asyncio.create_task(link.write(key, 0, b"never", timeout_us=T_US))
        waiting = asyncio.create_task(link.write(key, 0, b"last", notify=9, timeout_us=T_US))
        await asyncio.sleep(0)
        cancelled.cancel()
        # It reads again: everything that was accepted is there, whole and in order, and nothing that was not.
        for expected in range(sent):
            head = FRAME.pack(FRAME_MAGIC, 0, 1, 0, number, 0, 1 << 17)
            assert await receive_exactly(silent, FRAME.nbytes, "near") == head
            assert await receive_exactly(silent, 1 << 17, "near") == expected.to_bytes(8, "little") * (1 << 14)
        assert await receive_exactly(silent, FRAME.nbytes, "near") == FRAME.pack(
            FRAME_MAGIC, FRAME_NOTIFIES, 1, 9, number, 0, 4
        )
        await waiting
        silent.close()
        with pytest.raises(PeerLost):  # noqa: PT012  # the end is noticed in its own time
            while True:
                await link.write(key, 0, b"x", timeout_us=T_US)
                await asyncio.sleep(0)


async def raw_link(make: Make, **options: Any) -> tuple[socket.socket, TcpFabric, Region, int]:
    """A writer that keeps to no rule, after an honest handshake; with the region's token."""
    far = make(credits=4, **options)
    region = far.register(64, label="r")
    sock = await connect_tcp(far.address, TcpOptions())
    await introduce(
        sock,
        Identity(address="rogue:1", secret=SECRET),
        Purpose.LINK,
        Lane.DATA,
        peer="far",
        reply_bytes=LINK_TERMS.nbytes,
    )
    return sock, far, region, require_genuine(SECRET, region.key, far.address)


@pytest.mark.parametrize("kind", ["bounds", "noise", "no credit"])
async def test_a_writer_that_breaks_the_rules_loses_its_link_and_nothing_else_happens(make: Make, kind: str) -> None:
    sock, far, region, number = await raw_link(make)
    bell = FRAME.pack(FRAME_MAGIC, FRAME_NOTIFIES, 1, 3, number, 0, 0)
    said = {
        "bounds": FRAME.pack(FRAME_MAGIC, FRAME_NOTIFIES, 1, 3, number, 60, 8) + b"\xff" * 8,
        "noise": b"\xff" * 100,
        "no credit": bell * 5,
    }[kind]
    await send_all(sock, said, "far")
    with sock, pytest.raises(PeerLost):
        await receive_exactly(sock, 1 << 20, "far")
    assert far.refusals == {"WireError": 1}
    assert bytes(region.buffer) == bytes(64)
    friend = await make().connect(far.address, Lane.DATA, timeout_us=T_US)
    await friend.write(region.key, 0, b"ok", notify=7, timeout_us=T_US)
    taken: list[int] = []
    while 7 not in taken:
        taken += [told.immediate for told in await region.notified(timeout_us=T_US)]
    assert taken[:-1] == ([3] * 4 if kind == "no credit" else [])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [0, FRAME_READS], ids=["writes", "reads"])
async def test_a_writer_that_never_reads_of_its_closed_regions_loses_its_link(
    make: Make, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """What its kernel does not take is not kept for ever: the limit is small here, and nothing else ends this link."""
    monkeypatch.setattr(tcp_link, "NEWS_LIMIT", 100)
    # Not the kernel is to end it, where the machine is slow.
    sock, far, region, number = await raw_link(make, tuning=TcpOptions(unacknowledged_ms=600_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stale = FRAME.pack(FRAME_MAGIC, flags, 1, 0, number ^ 1, 0, 0) * 1000
    with sock, pytest.raises(PeerLost):  # noqa: PT012  # how much the kernels hold is their affair
        for _ in range(2_000):
            await send_all(sock, stale, "far")
    assert far.refusals == {"WireError": 1}
    friend = await make().connect(far.address, Lane.DATA, timeout_us=T_US)
    await friend.write(region.key, 0, b"ok", notify=7, timeout_us=T_US)
    assert [told.immediate for told in await region.notified(timeout_us=T_US)] == [7]


async def test_an_endpoint_whose_close_is_cut_short_listens_no_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = asyncio.Event()

    async def close(link: TcpLink) -> None:
        closing.set()
        await asyncio.Event().wait()  # a peer that cannot be reached

    near, far = make(), make()
    await near.connect(far.address, Lane.DATA, timeout_us=T_US)
    with monkeypatch.context() as patched:
        patched.setattr(TcpLink, "close", close)
        ending = asyncio.create_task(near.close())
        await closing.wait()
        ending.cancel()
        await asyncio.wait({ending})
    assert ending.cancelled()
    with pytest.raises(PeerLost):
        await connect_tcp(near.address, TcpOptions())


@pytest.mark.parametrize("said", [NEWS.pack(NEWS_MAGIC, NEWS_CREDIT, 1), b"\xff" * 64], ids=["credit", "noise"])
async def test_an_owner_that_breaks_the_rules_loses_its_writer(make: Make, said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        me = Identity(address=address, secret=SECRET)
        connecting = asyncio.create_task(make().connect(address, Lane.DATA, timeout_us=T_US))
        sock, _ = await asyncio.get_running_loop().sock_accept(server)
        with sock:
            sock.setblocking(False)
            hello = await receive_hello(sock, me, frozenset(Purpose), peer="client")
            admit(sock, me, hello, reply=LINK_TERMS.pack(4))
            link = await connecting
            await send_all(sock, said, "near")
            key, _ = new_key(SECRET, address, 1, 8)
            with pytest.raises(WireError):  # noqa: PT012  # it is noticed in its own time
                while True:
                    await link.write(key, 0, b"", timeout_us=T_US)
                    await asyncio.sleep(0)


async def test_an_owner_that_offers_no_credit_is_refused(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        me = Identity(address=address, secret=SECRET)
        connecting = asyncio.create_task(make().connect(address, Lane.DATA, timeout_us=T_US))
        sock, _ = await asyncio.get_running_loop().sock_accept(server)
        with sock:
            sock.setblocking(False)
            hello = await receive_hello(sock, me, frozenset(Purpose), peer="client")
            admit(sock, me, hello, reply=LINK_TERMS.pack(0))
            with pytest.raises(WireError, match="0 credits"):
                await connecting


async def test_credit_comes_back_before_a_writer_needs_it_and_not_for_every_notification(make: Make) -> None:
    near, far = make(), make(credits=64)
    region, other = far.register(8, label="r"), far.register(8, label="o")
    link = await near.connect(far.address, Lane.DATA, timeout_us=T_US)
    for number in range(63):
        await link.write(other.key, 0, b"", notify=number, timeout_us=T_US)
    # One credit is left and 63 lie in a region that nobody reads: the one goes round and round.
    for number in range(10):
        await link.write(region.key, 0, b"", notify=number, timeout_us=T_US)
        assert [told.immediate for told in await region.notified(timeout_us=T_US)] == [number]


async def test_a_region_says_who_it_is_to_tools_and_leaves_nothing(make: Make) -> None:
    with pytest.raises(HostError, match="memory"):
        PrivateSegment(label="r", region=1, nbytes=1 << 47, address="a")
    segment = PrivateSegment(label="some label", region=5, nbytes=100, address="127.0.0.1:9")
    header = read_header(memoryview(segment._memory))
    assert header is not None
    assert (header.region, header.nbytes, header.label, header.address) == (5, 100, "some label", "127.0.0.1:9")
    segment.close()
    segment.close()


async def test_foreign_keys_are_no_reason_to_send_a_byte(make: Make) -> None:
    link, region = await linked(make)
    for key in (
        RegionKey("tcp", region.key.address, 2, 8, region.key.token),
        dataclasses.replace(region.key, token="x"),
    ):
        with pytest.raises(AccessRefused):
            await link.write(key, 0, b"x", timeout_us=T_US)


@pytest.mark.slow
def test_a_machine_that_vanishes_is_noticed_in_silence_and_amid_writing() -> None:
    inside = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this machine makes no network namespaces for us")
    done = subprocess.run(
        [*inside, sys.executable, "-m", "tests.transport.half_open"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ended = done.stdout.splitlines()
    assert len(ended) == 4
    assert all("is gone" in line for line in ended[:2])
    # A process that ends says so through its kernel: nobody did here, and people shall not be told that it ended.
    assert all(line.startswith("PeerUnreachable: ") for line in ended[2:])
