"""Across two processes: the same promises, and what a killed or frozen process leaves its peers with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from afore.core.errors import DeadlineExceeded, PeerLost, RegionRevoked
from afore.transport.api import Lane
from tests.transport.conformance.helpers import AT_ONCE_US, TIMEOUT_US, immediates, raises_soon, revoked_soon, started
from tests.transport.conformance.puppet import SEQUENCE_BYTES, Puppet, plain_key
from tests.transport.conformance.worlds import CREDITS, StreamWorld

pytestmark = [pytest.mark.processes, pytest.mark.slow]
Start = Callable[[str], Awaitable[Puppet]]


async def test_bytes_and_notifications_cross_both_ways(stream_world: StreamWorld, puppets: Start) -> None:
    fabric, puppet = stream_world.fabric("here"), await puppets("there")
    mine, theirs = fabric.register(4096, label="mine"), await puppet.register(4096)
    link = await fabric.connect(puppet.address, Lane.DATA, timeout_us=TIMEOUT_US)
    back = await puppet.call("connect", address=fabric.address, lane=Lane.DATA)
    for number, payload in enumerate([b"", b"x", b"1234567", b"\xff" * 4000]):
        await link.write(theirs, 5, payload, notify=number, timeout_us=TIMEOUT_US)
        assert await puppet.call("notified", region=theirs.region) == [number]
        assert bytes.fromhex(await puppet.call("read", region=theirs.region, offset=5, nbytes=len(payload))) == payload
        await puppet.call(
            "write", link=back, key=plain_key(mine.key), offset=9, data=payload.hex(), notify=number, timeout_us=1e6
        )
        assert await immediates(mine, 1) == [number]
        assert mine.buffer[9 : 9 + len(payload)] == payload
    if stream_world.maps:
        assert bytes(fabric.map(theirs).buffer[5:4005]) == b"\xff" * 4000


async def test_a_flood_between_processes_arrives_in_order_once(stream_world: StreamWorld, puppets: Start) -> None:
    fabric, puppet = stream_world.fabric("here"), await puppets("there")
    region = fabric.register(4 * CREDITS * SEQUENCE_BYTES, label="mine")
    words = region.buffer.cast("Q")
    link = await puppet.call("connect", address=fabric.address, lane=Lane.DATA)
    puppet.order("stream", link=link, key=plain_key(region.key), count=stream_world.bulk)
    expected = 0
    while expected < stream_world.bulk:
        for told in await region.notified(timeout_us=TIMEOUT_US):
            assert (told.peer, told.immediate) == (puppet.address, expected)
            assert words[expected % len(words)] == expected
            expected += 1
    await puppet.answer()
    with pytest.raises(DeadlineExceeded):
        await region.notified(timeout_us=AT_ONCE_US)


async def test_a_writer_killed_in_mid_stream_leaves_a_prefix(stream_world: StreamWorld, puppets: Start) -> None:
    fabric, doomed, other = stream_world.fabric("here"), await puppets("doomed"), await puppets("other")
    region = fabric.register(4 * CREDITS * SEQUENCE_BYTES, label="mine")
    words = region.buffer.cast("Q")
    for puppet in (doomed, other):
        await puppet.call("connect", address=fabric.address, lane=Lane.DATA)
    doomed.order("stream", link=0, key=plain_key(region.key), count=10**9)
    expected = 0

    async def read_all(timeout_us: float) -> None:
        nonlocal expected
        for told in await region.notified(timeout_us=timeout_us):
            assert (told.peer, told.immediate) == (doomed.address, expected)
            assert words[expected % len(words)] >= expected
            expected += 1

    while expected < 5 * CREDITS:
        await read_all(TIMEOUT_US)
    await doomed.kill()
    await raises_soon(DeadlineExceeded, partial(read_all, AT_ONCE_US))
    # The region serves the others as before.
    await other.call("stream", link=0, key=plain_key(region.key), count=10)
    assert await immediates(region, 10) == list(range(10))


async def test_an_owner_killed_while_we_write_and_wait(stream_world: StreamWorld, puppets: Start) -> None:
    fabric, puppet = stream_world.fabric("here"), await puppets("there")
    theirs = await puppet.register(4096)
    link = await fabric.connect(puppet.address, Lane.DATA, timeout_us=TIMEOUT_US)
    idle = await fabric.connect(puppet.address, Lane.DEMAND, timeout_us=TIMEOUT_US)
    # Where keys are granted, a link's first write asks its owner, which a frozen one does not answer.
    await link.write(theirs, 0, b"x", timeout_us=TIMEOUT_US)
    puppet.freeze()
    for number in range(CREDITS):
        await link.write(theirs, 0, b"x", notify=number, timeout_us=TIMEOUT_US)
    with pytest.raises(DeadlineExceeded):
        await link.write(theirs, 0, b"x", notify=0, timeout_us=AT_ONCE_US)
    waiting = [asyncio.create_task(link.write(theirs, 0, b"x", notify=1, timeout_us=TIMEOUT_US)) for _ in range(3)]
    await started(*waiting)
    await puppet.kill()
    for task in waiting:
        with pytest.raises(PeerLost, match="gone"):
            await task
    for lost in (link, idle):
        await raises_soon(PeerLost, partial(lost.write, theirs, 0, b"x", timeout_us=TIMEOUT_US))
        await lost.close()
    with pytest.raises(PeerLost):
        await fabric.connect(puppet.address, Lane.DATA, timeout_us=TIMEOUT_US)


async def test_a_region_revoked_by_another_process(stream_world: StreamWorld, puppets: Start) -> None:
    fabric, puppet = stream_world.fabric("here"), await puppets("there")
    written, never_written = await puppet.register(4096), await puppet.register(4096)
    link = await fabric.connect(puppet.address, Lane.DATA, timeout_us=TIMEOUT_US)
    await link.write(written, 0, b"x", timeout_us=TIMEOUT_US)
    for key in (written, never_written):
        await puppet.call("revoke", region=key.region)
        await revoked_soon(stream_world, partial(link.write, key, 0, b"x", timeout_us=TIMEOUT_US))
        if stream_world.maps:
            with pytest.raises(RegionRevoked):
                fabric.map(key)


async def test_a_peer_killed_in_the_middle_of_a_handshake(stream_world: StreamWorld, puppets: Start) -> None:
    fabric, puppet = stream_world.fabric("here"), await puppets("there")
    address = stream_world.channel_address("hub")
    await puppet.call("listen_echo", address=address)
    puppet.freeze()
    for attempt in (
        lambda timeout_us: fabric.connect(puppet.address, Lane.DATA, timeout_us=timeout_us),
        lambda timeout_us: fabric.dial(address, timeout_us=timeout_us),
    ):
        with pytest.raises(DeadlineExceeded):
            await attempt(20 * AT_ONCE_US)
    connecting = asyncio.create_task(fabric.connect(puppet.address, Lane.DATA, timeout_us=TIMEOUT_US))
    dialling = asyncio.create_task(fabric.dial(address, timeout_us=TIMEOUT_US))
    await started(connecting, dialling)
    await puppet.kill()
    for task in (connecting, dialling):
        with pytest.raises(PeerLost):
            await task


async def test_channels_cross_processes_and_end_with_them(stream_world: StreamWorld, puppets: Start) -> None:
    fabric, puppet = stream_world.fabric("here"), await puppets("there")
    address = stream_world.channel_address("hub")
    await puppet.call("listen_echo", address=address)
    channel = await fabric.dial(address, timeout_us=TIMEOUT_US)
    for size in (0, 1, 1 << 17):
        message: dict[str, object] = {"size": size, "pad": b"x" * size}
        await channel.send(message, timeout_us=TIMEOUT_US)
        assert await channel.receive(timeout_us=TIMEOUT_US) == message
    wait = asyncio.create_task(channel.receive(timeout_us=None))
    await started(wait)
    await puppet.kill()
    with pytest.raises(PeerLost):
        await wait
    with pytest.raises(PeerLost):
        await channel.send({"n": 1}, timeout_us=TIMEOUT_US)


async def test_a_sender_to_a_frozen_and_then_killed_process(stream_world: StreamWorld, puppets: Start) -> None:
    fabric, puppet = stream_world.fabric("here"), await puppets("there")
    address = stream_world.channel_address("hub")
    await puppet.call("listen_echo", address=address)
    channel = await fabric.dial(address, timeout_us=TIMEOUT_US)
    puppet.freeze()

    async def fill() -> None:
        for _ in range(100):
            await channel.send({"pad": b"x" * 100_000}, timeout_us=50 * AT_ONCE_US)

    with pytest.raises(DeadlineExceeded):
        await fill()
    sending = asyncio.create_task(channel.send({"n": 1}, timeout_us=TIMEOUT_US))
    await started(sending)
    await puppet.kill()
    with pytest.raises(PeerLost):
        await sending
