"""One-sided reads: what comes back, in what order with writes, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

import pytest

from afore.core.errors import AccessRefused, LinkClosed, PeerLost, RegionRevoked, TransportError
from tests.transport.conformance.helpers import TIMEOUT_US, pair, raises_soon, revoked_soon
from tests.transport.conformance.worlds import World


def pattern(nbytes: int) -> bytes:
    return bytes(place % 251 for place in range(nbytes))


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, (1 << 20) - 1, 1 << 20, (3 << 20) + 5])
async def test_what_is_read_is_what_lies_there(world: World, nbytes: int) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"), nbytes + 64)
    region.buffer[:] = pattern(nbytes + 64)
    into = bytearray(nbytes + 2)
    await link.read(region.key, 3, memoryview(into)[1:-1], timeout_us=TIMEOUT_US)
    assert bytes(into) == b"\0" + pattern(nbytes + 64)[3 : 3 + nbytes] + b"\0"


async def test_a_read_comes_behind_the_writes_of_its_link(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"), 64)
    into = bytearray(8)
    for number in range(20):
        await link.write(region.key, 8, bytes([number]) * 8, timeout_us=TIMEOUT_US)
        await link.read(region.key, 8, memoryview(into), timeout_us=TIMEOUT_US)
        assert bytes(into) == bytes([number]) * 8


async def test_many_reads_at_once_do_not_mix(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"), 1 << 16)
    region.buffer[:] = pattern(1 << 16)
    rooms = [bytearray(1000 + number) for number in range(30)]
    await asyncio.gather(
        *[
            link.read(region.key, 500 * number, memoryview(room), timeout_us=TIMEOUT_US)
            for number, room in enumerate(rooms)
        ]
    )
    for number, room in enumerate(rooms):
        assert bytes(room) == pattern(1 << 16)[500 * number : 500 * number + len(room)]


async def test_a_cancelled_read_leaves_the_link_usable(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"), 1 << 21)
    region.buffer[:] = pattern(1 << 21)
    for turns in range(6):
        into = memoryview(bytearray(1 << 21))
        task = asyncio.ensure_future(link.read(region.key, 0, into, timeout_us=TIMEOUT_US))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        small = bytearray(10)
        await link.read(region.key, 77, memoryview(small), timeout_us=TIMEOUT_US)
        assert bytes(small) == pattern(100)[77:87]


async def test_reads_outside_a_region_or_by_a_foreign_key_are_refused(world: World) -> None:
    near, far = world.fabric("near"), world.fabric("far")
    link, region = await pair(near, far, 64)
    into = memoryview(bytearray(8))
    for offset in (-1, 57, 64, 1 << 40):
        with pytest.raises(AccessRefused):
            await link.read(region.key, offset, into, timeout_us=TIMEOUT_US)
    foreign = near.register(64, label="own")
    with pytest.raises(AccessRefused):
        await link.read(foreign.key, 0, into, timeout_us=TIMEOUT_US)
    larger = dataclasses.replace(region.key, nbytes=128)
    with pytest.raises(AccessRefused):
        await link.read(larger, 60, into, timeout_us=TIMEOUT_US)
    await link.read(region.key, 56, into, timeout_us=TIMEOUT_US)


async def test_reads_end_typed_where_region_link_or_peer_has_ended(world: World) -> None:
    near, far = world.fabric("near"), world.fabric("far")
    link, region = await pair(near, far, 64)
    kept = far.register(64, label="kept")
    into = memoryview(bytearray(8))
    read = partial(link.read, region.key, 0, into, timeout_us=TIMEOUT_US)
    await read()
    region.close()
    await revoked_soon(world, read)
    await link.read(kept.key, 0, into, timeout_us=TIMEOUT_US)
    other = await near.connect(far.address, link.lane, timeout_us=TIMEOUT_US)
    await other.close()
    with pytest.raises(LinkClosed):
        await other.read(kept.key, 0, into, timeout_us=TIMEOUT_US)
    await far.close()
    ended = await raises_soon(TransportError, partial(link.read, kept.key, 0, into, timeout_us=TIMEOUT_US))
    assert isinstance(ended, PeerLost | RegionRevoked), ended
