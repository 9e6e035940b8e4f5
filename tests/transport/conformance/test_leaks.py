"""Nothing is left: no descriptor, no mapping, no name, after many lives and after every kind of end."""

from __future__ import annotations

import asyncio
import os

import pytest

from afore.core.errors import TransportError
from afore.transport.api import Channel, Lane, Link
from tests.transport.conformance.helpers import TIMEOUT_US, take
from tests.transport.conformance.worlds import StreamWorld, World


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Mapped memory that belongs to fabrics."""
    with open("/proc/self/maps") as file:
        return sum("afore" in line for line in file)


@pytest.mark.slow
async def test_many_lives_leave_nothing(world: World) -> None:
    counts = []
    for _ in range(world.lives):
        near, far = world.fabric("near"), world.fabric("far")

        async def handler(channel: Channel) -> None:
            await channel.send(await channel.receive(timeout_us=TIMEOUT_US), timeout_us=TIMEOUT_US)

        await far.listen(world.channel_address("hub"), handler)
        region = far.register(4096, label="r")
        link = await near.connect(far.address, Lane.DATA, timeout_us=TIMEOUT_US)
        if world.maps:
            near.map(region.key)
        await link.write(region.key, 0, b"x", notify=1, timeout_us=TIMEOUT_US)
        await take(region, 1)
        channel = await near.dial(world.channel_address("hub"), timeout_us=TIMEOUT_US)
        await channel.send({"n": 1}, timeout_us=TIMEOUT_US)
        assert await channel.receive(timeout_us=TIMEOUT_US) == {"n": 1}
        await near.close()
        await far.close()
        assert world.residue() == []
        counts.append((descriptors(), mappings()))
    # The first lives may open what the process keeps (the loop's own, imported modules).
    assert counts[5] == counts[-1]


@pytest.mark.slow
async def test_links_channels_and_regions_that_come_and_go_leave_nothing(world: World) -> None:
    near, far = world.fabric("near"), world.fabric("far")
    accepted: asyncio.Queue[Channel] = asyncio.Queue()

    async def handler(channel: Channel) -> None:
        await accepted.put(channel)

    await far.listen(world.channel_address("hub"), handler)
    counts = []
    for _ in range(world.lives):
        region = far.register(4096, label="r")
        link = await near.connect(far.address, Lane.DATA, timeout_us=TIMEOUT_US)
        mapping = near.map(region.key) if world.maps else None
        await link.write(region.key, 0, b"x", notify=1, timeout_us=TIMEOUT_US)
        await take(region, 1)
        channel = await near.dial(world.channel_address("hub"), timeout_us=TIMEOUT_US)
        await channel.send({"n": 1}, timeout_us=TIMEOUT_US)
        await channel.close()
        far_end = await accepted.get()
        assert await far_end.receive(timeout_us=TIMEOUT_US) == {"n": 1}
        with pytest.raises(TransportError):
            await far_end.receive(timeout_us=TIMEOUT_US)
        region.close()
        if mapping is not None:
            mapping.close()
        await link.close()
        # The far side notices the end of the link in its own time: another connection comes after it.
        probe = await near.connect(far.address, Lane.CONTROL, timeout_us=TIMEOUT_US)
        await probe.close()
        counts.append((descriptors(), mappings()))
    half = world.lives // 2
    assert max(counts[half:]) <= max(counts[5:half])


async def test_long_lived_links_let_go_of_regions_of_earlier_epochs(world: World) -> None:
    near, far = world.fabric("near"), world.fabric("far")
    link = await near.connect(far.address, Lane.DATA, timeout_us=TIMEOUT_US)
    counts = []
    for epoch in range(20):
        region = far.register(4096, label="r")
        await link.write(region.key, 0, b"x", notify=epoch, timeout_us=TIMEOUT_US)
        await take(region, 1)
        counts.append((descriptors(), mappings()))
        region.close()
    assert counts[2] == counts[-1]


@pytest.mark.parametrize("turns", range(12))
async def test_closing_amid_connections_leaves_nothing(world: World, turns: int) -> None:
    counts = []
    for _ in range(3):
        near, far = world.fabric("near"), world.fabric("far")

        async def handler(channel: Channel) -> None:
            await channel.receive(timeout_us=None)

        await far.listen(world.channel_address("hub"), handler)
        tasks: list[asyncio.Task[object]] = []
        for _ in range(3):
            tasks.append(asyncio.create_task(near.connect(far.address, Lane.DATA, timeout_us=TIMEOUT_US)))
            tasks.append(asyncio.create_task(near.dial(world.channel_address("hub"), timeout_us=TIMEOUT_US)))
        for _ in range(turns):
            await asyncio.sleep(0)
        await (near if turns % 2 else far).close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert not isinstance(result, BaseException) or isinstance(result, TransportError)
        await near.close()
        await far.close()
        assert world.residue() == []
        counts.append((descriptors(), mappings()))
    assert counts[1] == counts[2]


async def test_cancelled_connections_leave_nothing(world: World) -> None:
    near, far = world.fabric("near"), world.fabric("far")
    held: list[Channel] = []

    async def handler(channel: Channel) -> None:
        held.append(channel)

    await far.listen(world.channel_address("hub"), handler)
    # What a loop opens for its first connection and keeps.
    await (await near.dial(world.channel_address("hub"), timeout_us=TIMEOUT_US)).close()
    counts = []
    for turns in [*range(25), 25]:
        for attempt in (
            near.connect(far.address, Lane.DATA, timeout_us=TIMEOUT_US),
            near.dial(world.channel_address("hub"), timeout_us=TIMEOUT_US),
        ):
            task: asyncio.Task[Link | Channel] = asyncio.create_task(attempt)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                made = await task
                await made.close()
            except asyncio.CancelledError:
                pass
        # The far side has seen every end once a later connection has come and gone, and its channels are closed.
        probe = await near.connect(far.address, Lane.DATA, timeout_us=TIMEOUT_US)
        await probe.close()
        for _ in range(20):
            await asyncio.sleep(0)
        for channel in held:
            await channel.close()
        counts.append((descriptors(), mappings()))
    assert counts[-1] <= max(counts[1:5])


async def test_failed_connections_leave_nothing(stream_world: StreamWorld) -> None:
    near, far = stream_world.fabric("near"), stream_world.fabric("far")
    odd = stream_world.odd_fabric(secret=bytes(32))
    gone = stream_world.channel_address("nobody")
    counts = []
    for _ in range(20):
        for attempt in (
            near.connect(gone, Lane.DATA, timeout_us=TIMEOUT_US),
            near.dial(gone, timeout_us=TIMEOUT_US),
            near.dial(far.address, timeout_us=TIMEOUT_US),
            odd.connect(far.address, Lane.DATA, timeout_us=TIMEOUT_US),
            near.connect(odd.address, Lane.DATA, timeout_us=TIMEOUT_US),
        ):
            with pytest.raises(TransportError):
                await attempt
        await asyncio.sleep(0)
        counts.append(descriptors())
    assert max(counts[10:]) <= max(counts[:10])
