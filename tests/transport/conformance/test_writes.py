"""One-sided writes: what arrives, what is refused at the door, and that refusals change nothing."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial

import pytest

from afore.core.errors import AccessRefused, DeadlineExceeded, LinkClosed, PeerLost, RegionRevoked
from afore.transport.api import Buffer, Lane
from tests.transport.conformance.helpers import (
    AT_ONCE_US,
    TIMEOUT_US,
    immediates,
    pair,
    raises_soon,
    revoked_soon,
    take,
)
from tests.transport.conformance.worlds import CREDITS, World

SIZES = [0, 1, 7, 8, 4095, 4096, 1 << 20]


@pytest.mark.parametrize("nbytes", SIZES)
async def test_bytes_are_visible_before_their_notification(world: World, nbytes: int) -> None:
    near, far = world.fabric("near"), world.fabric("far")
    link, region = await pair(near, far, nbytes + 64)
    assert (link.peer, link.lane) == (far.address, Lane.DATA)
    for offset in (0, 3, 64):
        payload = bytes((offset + place) % 251 + 1 for place in range(nbytes))
        await link.write(region.key, offset, payload, notify=offset, timeout_us=TIMEOUT_US)
        (told,) = await take(region, 1)
        assert (told.peer, told.immediate) == (near.address, offset)
        assert region.buffer[offset : offset + nbytes] == payload


async def test_a_write_touches_nothing_else(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"), 256)
    region.buffer[:] = b"\x55" * 256
    await link.write(region.key, 100, b"\xaa" * 50, notify=1, timeout_us=TIMEOUT_US)
    await take(region, 1)
    assert bytes(region.buffer) == b"\x55" * 100 + b"\xaa" * 50 + b"\x55" * 106


@pytest.mark.parametrize(
    "data",
    [b"12345678", bytearray(b"12345678"), memoryview(b"0123456789")[1:9], memoryview(b"12345678").cast("d"),
     memoryview(b"1x2x3x4x5x6x7x8x")[::2], memoryview(b"12345678").cast("B", (2, 4))],
    ids=["bytes", "bytearray", "slice", "doubles", "stride", "matrix"],
)  # fmt: skip
async def test_any_buffer_can_be_written_and_reused_at_once(world: World, data: Buffer) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    if isinstance(data, bytearray):
        data = bytearray(data)
    await link.write(region.key, 8, data, notify=1, timeout_us=TIMEOUT_US)
    if isinstance(data, bytearray):
        data[:] = b"reused.."
    await take(region, 1)
    assert bytes(region.buffer[8:16]) == b"12345678"


async def test_scattered_memory_is_refused(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    scattered = memoryview(bytes(64)).cast("Q")[::2]
    with pytest.raises(AccessRefused, match="contiguous"):
        await link.write(region.key, 0, scattered, timeout_us=TIMEOUT_US)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (-8, 8), (0, 4097), (4096, 1), (4095, 2), (5000, 0), (2**63, 1), (-1, 0)]
)
async def test_out_of_bounds_is_refused_and_nothing_happens(world: World, offset: int, nbytes: int) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    with pytest.raises(AccessRefused, match="4096"):
        await link.write(region.key, offset, b"\xff" * nbytes, notify=1, timeout_us=TIMEOUT_US)
    await link.write(region.key, 4096, b"", notify=2, timeout_us=TIMEOUT_US)
    assert await immediates(region, 1) == [2]
    assert bytes(region.buffer) == bytes(4096)


@pytest.mark.parametrize("immediate", [-1, 2**32, 2**64])
async def test_an_immediate_that_does_not_fit_is_refused_and_nothing_happens(world: World, immediate: int) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    with pytest.raises(AccessRefused, match="32 bits"):
        await link.write(region.key, 0, b"\xff", notify=immediate, timeout_us=TIMEOUT_US)
    for extreme in (2**32 - 1, 0):
        await link.write(region.key, 1, b"", notify=extreme, timeout_us=TIMEOUT_US)
    assert await immediates(region, 2) == [2**32 - 1, 0]
    assert region.buffer[0] == 0


async def test_foreign_and_forged_keys_are_refused(world: World) -> None:
    far, third = world.fabric("far"), world.fabric("third")
    link, region = await pair(world.fabric("near"), far)
    strange, sibling = third.register(4096, label="r"), far.register(4096, label="r")
    key = region.key
    forgeries = [
        strange.key,
        dataclasses.replace(strange.key, address=far.address),
        dataclasses.replace(key, fabric="pigeon"),
        dataclasses.replace(key, nbytes=8192),
        dataclasses.replace(key, region=sibling.key.region),
        dataclasses.replace(key, token="afore-x/../../etc/passwd"),
    ]
    for first in (True, False):
        for forged in forgeries:
            with pytest.raises(AccessRefused):
                await link.write(forged, 0, b"\xff", notify=1, timeout_us=TIMEOUT_US)
        if first:
            # The same forgeries once the genuine key is known to the link.
            await link.write(key, 8, b"\x01", notify=2, timeout_us=TIMEOUT_US)
    assert await immediates(region, 1) == [2]
    assert region.buffer[0] == strange.buffer[0] == sibling.buffer[0] == 0


async def test_a_closed_region_refuses_writes_and_the_link_goes_on(world: World) -> None:
    far = world.fabric("far")
    link, region = await pair(world.fabric("near"), far)
    never_written, successor = far.register(8, label="r"), far.register(8, label="r")
    await link.write(region.key, 0, b"x", notify=1, timeout_us=TIMEOUT_US)
    await take(region, 1)
    region.close()
    never_written.close()
    for key in (region.key, never_written.key):
        await revoked_soon(world, partial(link.write, key, 0, b"x", notify=2, timeout_us=TIMEOUT_US))
    await link.write(successor.key, 0, b"y", notify=3, timeout_us=TIMEOUT_US)
    assert await immediates(successor, 1) == [3]


async def test_notifications_of_a_region_that_closes_give_their_credit_back(world: World) -> None:
    far = world.fabric("far")
    link, region = await pair(world.fabric("near"), far)
    successor = far.register(8, label="r")
    for generation in range(3):
        for number in range(CREDITS):
            await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
        region.close()
        region = far.register(8, label=f"generation {generation}")
    await link.write(successor.key, 0, b"", notify=9, timeout_us=TIMEOUT_US)
    assert await immediates(successor, 1) == [9]


async def test_a_closed_link_says_so_and_closes_twice(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    await link.write(region.key, 0, b"last", notify=1, timeout_us=TIMEOUT_US)
    await link.close()
    await link.close()
    with pytest.raises(LinkClosed, match="connect again"):
        await link.write(region.key, 0, b"x", timeout_us=TIMEOUT_US)
    assert await immediates(region, 1) == [1]
    assert bytes(region.buffer[:4]) == b"last"


async def test_connecting_to_nobody_is_peer_lost(world: World) -> None:
    near, gone = world.fabric("near"), world.fabric("gone")
    address = gone.address
    await gone.close()
    for nobody in (address, world.nowhere()):
        with pytest.raises(PeerLost):
            await near.connect(nobody, Lane.DATA, timeout_us=TIMEOUT_US)


async def test_an_endpoint_may_write_to_itself(world: World) -> None:
    fabric = world.fabric("both")
    link, region = await pair(fabric, fabric)
    await link.write(region.key, 0, b"me", notify=5, timeout_us=TIMEOUT_US)
    (told,) = await take(region, 1)
    assert (told.peer, told.immediate, bytes(region.buffer[:2])) == (fabric.address, 5, b"me")


async def test_a_full_lane_does_not_hold_up_another(world: World) -> None:
    near, far = world.fabric("near"), world.fabric("far")
    data, hidden = await pair(near, far, lane=Lane.DATA)
    for _ in range(CREDITS):
        await data.write(hidden.key, 0, b"", notify=0, timeout_us=TIMEOUT_US)
    with pytest.raises(DeadlineExceeded):
        await data.write(hidden.key, 0, b"", notify=0, timeout_us=AT_ONCE_US)
    for lane in (Lane.DEMAND, Lane.CONTROL):
        link, region = await pair(near, far, lane=lane)
        assert link.lane is lane
        await link.write(region.key, 0, b"small", notify=7, timeout_us=TIMEOUT_US)
        assert await immediates(region, 1) == [7]


async def test_writes_without_notification_need_no_credit(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for _ in range(CREDITS):
        await link.write(region.key, 0, b"", notify=0, timeout_us=TIMEOUT_US)
    await link.write(region.key, 0, b"x", timeout_us=AT_ONCE_US)
    await take(region, CREDITS)
    await link.write(region.key, 1, b"y", notify=1, timeout_us=TIMEOUT_US)
    await take(region, 1)
    assert bytes(region.buffer[:2]) == b"xy"


async def test_a_peer_that_closes_is_peer_lost_for_good(world: World) -> None:
    far = world.fabric("far")
    link, region = await pair(world.fabric("near"), far)
    await link.write(region.key, 0, b"x", timeout_us=TIMEOUT_US)
    key = region.key
    await far.close()

    async def write() -> None:
        with suppress(RegionRevoked):  # its regions end first
            await link.write(key, 0, b"x", timeout_us=TIMEOUT_US)

    await raises_soon(PeerLost, write)
    with pytest.raises(PeerLost):
        await link.write(key, 0, b"x", notify=1, timeout_us=TIMEOUT_US)
    await link.close()
    with pytest.raises(LinkClosed):
        await link.write(key, 0, b"x", timeout_us=TIMEOUT_US)
