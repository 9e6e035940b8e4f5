"""Faults of a network and of peers: late, torn and reordered bytes, ends at every byte, black holes, readers that stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from afore.core.errors import DeadlineExceeded, PeerLost, RegionRevoked, TransportError
from afore.transport.api import Fabric, Lane, Link, Region
from tests.transport.conformance.helpers import TIMEOUT_US, immediates, pair, raises_soon, revoked_soon, started
from tests.transport.conformance.weather import Breaks, Side, Storm, Weather
from tests.transport.conformance.worlds import CREDITS, NetworkWorld, World

MakeWeather = Callable[..., Weather]
WORD = 8
SHORT_US = 20_000.0
"""For waits that nothing ends."""


@pytest.mark.parametrize(("piece", "late_turns"), [(1, 0), (7, 3), (None, 5), (1000, 20)])
async def test_late_and_torn_bytes_change_nothing(
    network_world: NetworkWorld, weather: MakeWeather, piece: int | None, late_turns: int
) -> None:
    """Three lanes whose bytes overtake each other: each keeps its order, and every notification finds its bytes."""
    far = network_world.behind(weather(piece=piece, late_turns=late_turns, seed=11), "far")
    near = network_world.fabric("near")
    region = far.register(len(Lane) * 4 * CREDITS * WORD, label="r")
    words = region.buffer.cast("Q")
    links = [await near.connect(far.address, lane, timeout_us=TIMEOUT_US) for lane in Lane]
    count = 40 if piece == 1 else 100
    tasks = [asyncio.create_task(_numbered(link, region, count)) for link in links]
    seen: dict[int, int] = dict.fromkeys(Lane, 0)
    while any(number < count for number in seen.values()):
        for told in await region.notified(timeout_us=TIMEOUT_US):
            lane, number = told.immediate >> 16, told.immediate & 0xFFFF
            assert number == seen[lane]
            seen[lane] += 1
            assert words[lane * 4 * CREDITS + number % (4 * CREDITS)] == number
    await asyncio.gather(*tasks)


async def _numbered(link: Link, region: Region, count: int) -> None:
    for number in range(count):
        place = link.lane * 4 * CREDITS + number % (4 * CREDITS)
        payload = number.to_bytes(WORD, "little")
        await link.write(region.key, place * WORD, payload, notify=link.lane << 16 | number, timeout_us=TIMEOUT_US)


async def _all_that_can_be(near: Fabric, far: Fabric, region: Region, timeout_us: float) -> list[str]:
    """Connects, writes and waits for what it cannot have, each with a deadline; what each of these ended with."""
    ends: list[str] = []

    async def one(attempt: Awaitable[object]) -> object:
        try:
            result = await attempt
        except TransportError as error:
            ends.append(type(error).__name__)
            return None
        ends.append("done")
        return result

    link = await one(near.connect(far.address, Lane.DATA, timeout_us=timeout_us))
    if link is not None:
        for number in range(2):
            payload = bytes([number + 1]) * 64
            await one(link.write(region.key, 64 * number, payload, notify=number, timeout_us=timeout_us))  # type: ignore[attr-defined]
        await one(region.notified(timeout_us=timeout_us))
        await one(link.close())  # type: ignore[attr-defined]
    return ends


CUTS = {
    Side.CLIENT: [0, 1, 15, 16, 17, 48, 64, 70, 71, 85, 117, 118, 119, 135, 150, 157, 158, 159, 200, 222, 262, 300],
    Side.SERVER: [0, 1, 16, 48, 79, 80, 81, 95, 96, 99, 100],
}
"""Bytes at which a connection breaks: in and around each part of the handshake, the frames and their payloads."""


@pytest.mark.slow
@pytest.mark.parametrize("how", [Storm.END, Storm.RESET, Storm.HOLE])
@pytest.mark.parametrize("side", list(Side))
async def test_a_connection_that_breaks_at_any_byte(
    network_world: NetworkWorld, weather: MakeWeather, side: Side, how: Storm
) -> None:
    # Where nothing says that it broke, each wait takes its whole deadline.
    for after in CUTS[side][:: 4 if how is Storm.HOLE else 1]:
        far = network_world.behind(weather(breaks=Breaks(side, after, how)), "far")
        near = network_world.fabric("near")
        region = far.register(128, label="r")
        ends = await _all_that_can_be(near, far, region, SHORT_US)
        assert set(ends) <= {"done", "PeerLost", "DeadlineExceeded"}, (after, ends)
        # Whatever was told lies there whole, and nothing was told that had not come.
        told: list[int] = []
        try:
            while True:
                told += [one.immediate for one in await region.notified(timeout_us=0)]
        except DeadlineExceeded:
            pass
        for number in told:
            assert bytes(region.buffer[64 * number : 64 * number + 64]) == bytes([number + 1]) * 64
        # The endpoint behind the weather serves those who reach it.
        friend = await far.connect(near.address, Lane.CONTROL, timeout_us=TIMEOUT_US)
        await friend.close()
        await near.close()
        await far.close()


@pytest.mark.parametrize("how", [Storm.END, Storm.RESET])
async def test_waiting_writers_hear_of_a_broken_network(
    network_world: NetworkWorld, weather: MakeWeather, how: Storm
) -> None:
    between = weather(breaks=Breaks(Side.CLIENT, 3000, how))
    far, near = network_world.behind(between, "far"), network_world.fabric("near")
    link, region = await pair(near, far)
    for number in range(CREDITS):
        await link.write(region.key, 0, b"x" * 16, notify=number, timeout_us=TIMEOUT_US)
    waiting = [asyncio.create_task(link.write(region.key, 0, b"", notify=1, timeout_us=TIMEOUT_US)) for _ in range(3)]
    await between.broken.wait()
    for task in waiting:
        with pytest.raises(PeerLost):
            await task
    await raises_soon(PeerLost, partial(link.write, region.key, 0, b"x", timeout_us=TIMEOUT_US))


async def test_a_black_hole_ends_every_wait_in_its_deadline(network_world: NetworkWorld, weather: MakeWeather) -> None:
    far = network_world.behind(weather(breaks=Breaks(Side.CLIENT, 2000, Storm.HOLE)), "far")
    near = network_world.fabric("near")
    link, region = await pair(near, far)
    with pytest.raises(DeadlineExceeded, match="credit"):  # noqa: PT012  # which write finds no credit is chance
        for number in range(2 * CREDITS):
            await link.write(region.key, 0, b"x" * 16, notify=number, timeout_us=SHORT_US)
    with pytest.raises(DeadlineExceeded):  # noqa: PT012  # some of it came
        while True:
            await region.notified(timeout_us=SHORT_US)
    await link.close()
    await near.close()


async def test_a_stalled_network_holds_writers_up_and_loses_nothing(
    network_world: NetworkWorld, weather: MakeWeather
) -> None:
    between = weather(breaks=Breaks(Side.CLIENT, 5000, Storm.STALL))
    far, near = network_world.behind(between, "far"), network_world.fabric("near")
    link, region = await pair(near, far, 1 << 20)
    sent = 0
    with pytest.raises(DeadlineExceeded, match="does not read"):  # noqa: PT012  # how much fits is the kernels' affair
        while True:
            await link.write(region.key, 0, sent.to_bytes(WORD, "little") * (1 << 15), timeout_us=SHORT_US)
            sent += 1
    stopped = asyncio.create_task(link.write(region.key, 0, b"never", notify=1, timeout_us=TIMEOUT_US))
    await started(stopped)
    stopped.cancel()
    between.calm()
    await link.write(region.key, 1 << 19, b"!", notify=2, timeout_us=TIMEOUT_US)
    assert await immediates(region, 1) == [2]
    assert bytes(region.buffer[: 1 << 18]) == (sent - 1).to_bytes(WORD, "little") * (1 << 15)
    assert region.buffer[1 << 19] == ord("!")


# On every fabric


async def test_a_region_revoked_under_a_flood_ends_it_typed_and_the_link_goes_on(world: World) -> None:
    near, far = world.fabric("near"), world.fabric("far")
    link, region = await pair(near, far)
    after = far.register(8, label="after")

    async def flood() -> None:
        for number in range(100 * CREDITS):
            await link.write(region.key, 0, b"x" * 512, notify=number % 7, timeout_us=TIMEOUT_US)

    writing = asyncio.create_task(flood())
    for _ in range(3):
        await region.notified(timeout_us=TIMEOUT_US)
    held = region.buffer[:]
    region.close()
    with pytest.raises(RegionRevoked):
        await writing
    await revoked_soon(world, partial(link.write, region.key, 0, b"x", timeout_us=TIMEOUT_US))
    before = bytes(held)
    await link.write(after.key, 0, b"next", notify=9, timeout_us=TIMEOUT_US)
    assert await immediates(after, 1) == [9]
    assert bytes(held) == before


async def test_many_writers_without_credit_end_in_their_own_deadlines(world: World) -> None:
    link, region = await pair(world.fabric("near"), world.fabric("far"))
    for number in range(CREDITS):
        await link.write(region.key, 0, b"", notify=number, timeout_us=TIMEOUT_US)
    short = [link.write(region.key, 0, b"", notify=1, timeout_us=SHORT_US / 4) for _ in range(5)]
    patient = [
        asyncio.create_task(link.write(region.key, 0, b"", notify=900 + n, timeout_us=TIMEOUT_US)) for n in range(3)
    ]
    for end in await asyncio.gather(*short, return_exceptions=True):
        assert isinstance(end, DeadlineExceeded)
    assert await immediates(region, CREDITS + 3) == [*range(CREDITS), 900, 901, 902]
    for task in patient:
        await task
