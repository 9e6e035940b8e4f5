"""Notifications: order, credit, deadlines, cancellation; nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from afore.core.errors import DeadlineExceeded, LinkClosed, PeerLost, RegionRevoked
from afore.transport.api import Lane, Link, Region
from tests.transport.conformance.helpers import AT_ONCE_US, TIMEOUT_US, immediates, pair, started, take
from tests.transport.conformance.worlds import CREDITS, World

WORD = 8


async def flood(link: Link, region: Region, count: int) -> None:
    """Writes 0 … count - 1, each into its place, notifying with the same number."""
    slots = region.nbytes // WORD
    for number in range(count):
        await link.write(
            region.key,
            number % slots * WORD,
            number.to_bytes(WORD, "little"),
            notify=number,
            timeout_us=TIMEOUT_US,
        )


@pytest.mark.slow
async def test_a_flood_arrives_in_order_once_with_its_bytes(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"), 4 * CREDITS * WORD)
    words = region.buffer.cast("Q")
    writer = asyncio.create_task(flood(link, region, world.bulk))
    expected = batches = 0
    while expected < world.bulk:
        batches += 1
        for told in await region.notified(timeout_us=TIMEOUT_US):
            assert told.immediate == expected
            # There are more places than credits, so nothing newer can be there yet.
            assert words[expected % len(words)] == expected
            expected += 1
        if batches % 3 == 0:
            # A slow reader: the writer runs into its credit.
            for _ in range(3):
                await asyncio.sleep(0)
    await writer
    assert batches >= world.bulk / CREDITS
    with pytest.raises(DeadlineExceeded):
        await region.notified(timeout_us=AT_ONCE_US)


async def test_each_of_many_links_keeps_its_order(world: World) -> None:
    far = world.fabric("far")
    region = far.register(1 << 16, label="r")
    writers = [world.fabric(f"writer{rank}") for rank in range(4)]
    links = [
        (writer, await writer.connect(far.address, lane, timeout_us=TIMEOUT_US)) for writer in writers for lane in Lane
    ]
    count = 200
    # The upper bits say which of a peer's links it was.
    tasks = [asyncio.create_task(_numbered(link, region, link.lane << 16, count)) for _, link in links]
    seen: dict[tuple[str, int], list[int]] = defaultdict(list)
    for told in await take(region, count * len(links)):
        seen[told.peer, told.immediate >> 16].append(told.immediate & 0xFFFF)
    for task in tasks:
        await task
    assert seen == {(writer.address, link.lane): list(range(count)) for writer, link in links}


async def _numbered(link: Link, region: Region, base: int, count: int) -> None:
    for number in range(count):
        await link.write(region.key, 0, b"", notify=base + number, timeout_us=TIMEOUT_US)


async def test_one_link_serves_many_regions(world: World) -> None:
    far = world.fabric("far")
    link, first = await pair(world.fabric("near"), far)
    regions = [first, *(far.register(8, label=f"r{number}") for number in range(5))]
    for number in range(48):
        region = regions[number % 6]
        await link.write(region.key, 0, number.to_bytes(1, "little"), notify=number, timeout_us=TIMEOUT_US)
    for place, region in enumerate(regions):
        assert await immediates(region, 8) == list(range(place, 48, 6))
        assert region.buffer[0] == 42 + place


async def test_a_batch_comes_in_one_piece(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for number in range(CREDITS):
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
    # The last write's bytes are its doorbell's proof that all have landed, also where they fly.
    tail = asyncio.create_task(link.write(region.key, 0, b"!", notify=CREDITS, timeout_us=TIMEOUT_US))
    assert await immediates(region, CREDITS + 1) == list(range(CREDITS + 1))
    await tail


async def test_waiting_for_a_notification_has_a_deadline(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for timeout_us in (0.0, AT_ONCE_US):
        with pytest.raises(DeadlineExceeded, match="target"):
            await region.notified(timeout_us=timeout_us)
    await link.write(region.key, 0, b"", notify=4, timeout_us=TIMEOUT_US)
    assert await immediates(region, 1) == [4]


async def test_a_writer_without_credit_has_a_deadline_and_has_written_nothing(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for number in range(CREDITS):
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
    with pytest.raises(DeadlineExceeded, match="credit"):
        await link.write(region.key, 0, b"never", notify=999, timeout_us=AT_ONCE_US)
    assert await immediates(region, CREDITS) == list(range(CREDITS))
    await link.write(region.key, 8, b"again", notify=1000, timeout_us=TIMEOUT_US)
    assert await immediates(region, 1) == [1000]
    assert bytes(region.buffer[:16]) == bytes(8) + b"again" + bytes(3)


async def test_writers_that_wait_for_credit_pass_in_the_order_they_came(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for number in range(CREDITS):
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
    waiting = []
    for number in range(CREDITS, 3 * CREDITS):
        waiting.append(asyncio.create_task(link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)))
        await asyncio.sleep(0)
    # One without a notification needs no credit, but must not overtake either.
    plain = asyncio.create_task(link.write(region.key, 0, b"p", timeout_us=TIMEOUT_US))
    await started(*waiting, plain)
    assert region.buffer[0] == 0
    assert await immediates(region, 3 * CREDITS) == list(range(3 * CREDITS))
    await plain
    for task in waiting:
        await task


async def test_cancelled_waits_lose_nothing(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for number in range(50):
        wait = asyncio.create_task(region.notified(timeout_us=None))
        await started(wait)
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
        if number % 2:
            await asyncio.sleep(0)
        wait.cancel()
        try:
            assert [told.immediate for told in await wait] == [number]
        except asyncio.CancelledError:
            assert await immediates(region, 1) == [number]


async def test_a_cancelled_wait_passes_its_wake_up_on(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    first = asyncio.create_task(region.notified(timeout_us=None))
    second = asyncio.create_task(region.notified(timeout_us=TIMEOUT_US))
    await started(first, second)
    await link.write(region.key, 0, b"", notify=1, timeout_us=TIMEOUT_US)
    first.cancel()
    taken = await asyncio.gather(first, second, return_exceptions=True)
    batches = [batch for batch in taken if isinstance(batch, list)]
    assert len(batches) == 1
    assert [told.immediate for told in batches[0]] == [1]
    await link.close()
    if not isinstance(taken[1], list):
        pytest.fail("the cancelled wait kept the notification")


async def test_a_cancelled_write_leaves_the_link_usable(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for number in range(CREDITS):
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
    cancelled = asyncio.create_task(link.write(region.key, 0, b"never", notify=998, timeout_us=TIMEOUT_US))
    waiting = asyncio.create_task(link.write(region.key, 8, b"then", notify=999, timeout_us=TIMEOUT_US))
    await started(cancelled, waiting)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await immediates(region, CREDITS + 1) == [*range(CREDITS), 999]
    await waiting
    assert bytes(region.buffer[:12]) == bytes(8) + b"then"


async def test_closing_a_link_ends_its_waiting_writers(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for number in range(CREDITS):
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
    waiting = [asyncio.create_task(link.write(region.key, 0, b"", notify=1, timeout_us=TIMEOUT_US)) for _ in range(3)]
    await started(*waiting)
    await link.close()
    for task in waiting:
        with pytest.raises(LinkClosed):
            await task
    assert await immediates(region, CREDITS) == list(range(CREDITS))


async def test_a_region_that_closes_ends_its_waiting_writers_and_lets_the_others_pass(world: World) -> None:
    far = world.fabric("far")
    link, region = await pair(world.fabric("near"), far)
    other = far.register(8, label="other")
    for number in range(CREDITS):
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
    if world.bulk < 10_000:
        await asyncio.sleep(0.01)  # let all of it land, so that closing gives the credit back
    waiting = [asyncio.create_task(link.write(region.key, 0, b"", notify=1, timeout_us=TIMEOUT_US)) for _ in range(3)]
    passing = asyncio.create_task(link.write(other.key, 0, b"", notify=7, timeout_us=TIMEOUT_US))
    await started(*waiting, passing)
    region.close()
    for task in waiting:
        with pytest.raises(RegionRevoked):
            await task
    await passing
    assert await immediates(other, 1) == [7]


async def test_a_peer_that_closes_ends_waiting_writers(world: World) -> None:
    far = world.fabric("far")
    link, region = await pair(world.fabric("near"), far)
    for number in range(CREDITS):
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
    waiting = [asyncio.create_task(link.write(region.key, 0, b"", notify=1, timeout_us=TIMEOUT_US)) for _ in range(3)]
    await started(*waiting)
    await far.close()
    for task in waiting:
        with pytest.raises(PeerLost):
            await task
