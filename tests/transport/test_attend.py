"""``attend``: notifications heard where they land, in order, with their credit given back; and how attending ends."""

from __future__ import annotations

import asyncio

import pytest

from afore.core.clock import LoopClock
from afore.core.errors import RegionRevoked
from afore.testing import run_virtual
from afore.transport.api import Lane, Notification
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.queues import attend
from afore.transport.ringing import ring_all, write_now_of

T_US = 1e6


def test_all_are_heard_in_order_at_the_moment_they_land_and_credit_comes_back() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = LoopbackNetwork(LoopClock(loop), latency_us=3, credits=2)
        owner, writer = LoopbackFabric(network, "owner"), LoopbackFabric(network, "writer")
        region = owner.register(64, label="bells")
        link = await writer.connect("owner", Lane.DATA, timeout_us=T_US)
        heard: list[tuple[int, int]] = []

        def hear(notifications: list[Notification]) -> None:
            heard.extend((told.immediate, network.clock.now_ns()) for told in notifications)

        await ring_all([(link, region.key)], 1, timeout_us=T_US)
        await network.clock.sleep_us(5)
        listening = asyncio.create_task(attend(region, hear))
        await asyncio.sleep(0)
        began_ns = network.clock.now_ns()
        for bell in range(2, 9):  # more than there are credits
            if not write_now_of(link)(region.key, 8, bytes([bell]), bell):
                await link.write(region.key, 8, bytes([bell]), notify=bell, timeout_us=T_US)
        await network.clock.sleep_us(50)
        assert [immediate for immediate, _ in heard] == list(range(1, 9))
        assert heard[1][1] == heard[2][1] == began_ns + 3000
        assert region.buffer[8] == 8
        region.close()
        with pytest.raises(RegionRevoked):
            await listening

    run_virtual(main)


def test_what_the_hearer_raises_ends_the_attending_and_nobody_else() -> None:
    async def main() -> None:
        network = LoopbackNetwork(LoopClock(asyncio.get_running_loop()))
        owner, writer = LoopbackFabric(network, "owner"), LoopbackFabric(network, "writer")
        region = owner.register(8, label="bells")
        link = await writer.connect("owner", Lane.DATA, timeout_us=T_US)

        def refuse(notifications: list[Notification]) -> None:
            raise ValueError(f"{notifications[0].immediate} is no bell")

        listening = asyncio.create_task(attend(region, refuse))
        await asyncio.sleep(0)
        await link.write(region.key, 0, b"", notify=5, timeout_us=T_US)
        with pytest.raises(ValueError, match="5 is no bell"):
            await listening
        await link.write(region.key, 0, b"", notify=6, timeout_us=T_US)
        assert [told.immediate for told in await region.notified(timeout_us=T_US)] == [6]

    run_virtual(main)
