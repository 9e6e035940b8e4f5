"""What only loopback has: exact flights in virtual time, seeded weather, and endpoints that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from afore.core.clock import LoopClock
from afore.core.errors import ConfigError, LinkClosed, PeerLost, RegionRevoked, TransportError
from afore.testing import run_virtual, virtual_now_ns, virtual_test
from afore.transport.api import Channel, Lane
from afore.transport.loopback import LoopbackFabric, LoopbackFaults, LoopbackNetwork

T_US = 1e6


def network(**options: Any) -> LoopbackNetwork:
    return LoopbackNetwork(LoopClock(), **options)


@virtual_test
async def test_a_write_lands_exactly_one_latency_later() -> None:
    net = network(latency_us=5)
    near, far = LoopbackFabric(net, "near"), LoopbackFabric(net, "far")
    region = far.register(8, label="r")
    link = await near.connect("far", Lane.DATA, timeout_us=T_US)
    assert virtual_now_ns() == 10_000  # there and back
    await link.write(region.key, 0, b"x", notify=1, timeout_us=T_US)
    assert virtual_now_ns() == 10_000
    await asyncio.sleep(4.999e-6)
    assert bytes(region.buffer[:1]) == b"\0"
    await region.notified(timeout_us=T_US)
    assert (virtual_now_ns(), bytes(region.buffer[:1])) == (15_000, b"x")


@virtual_test
async def test_bandwidth_delays_what_follows_on_the_same_link_only() -> None:
    net = network(latency_us=2, bandwidth_gbps=8)
    near, far = LoopbackFabric(net, "near"), LoopbackFabric(net, "far")
    region = far.register(10_000, label="r")
    first, second = [await near.connect("far", lane, timeout_us=T_US) for lane in (Lane.DATA, Lane.DEMAND)]
    start = virtual_now_ns()
    for number in range(3):
        await first.write(region.key, 0, bytes(10_000), notify=number, timeout_us=T_US)
    await second.write(region.key, 0, bytes(100), notify=9, timeout_us=T_US)
    seen: list[tuple[int, int]] = []
    while len(seen) < 4:
        seen += [(told.immediate, virtual_now_ns() - start) for told in await region.notified(timeout_us=T_US)]
    assert seen == [(9, 2_100), (0, 12_000), (1, 22_000), (2, 32_000)]


STORM = LoopbackFaults(jitter_us=10, overtake=0.3, overtake_us=50, torn=0.5, torn_us=5)


async def storm(seed: int) -> list[tuple[int, str, int, bytes]]:
    """Three writers, two lanes each, into one region; returns what was seen when."""
    net = network(latency_us=3, seed=seed, faults=STORM)
    far = LoopbackFabric(net, "far")
    region = far.register(6 * 16, label="r")
    seen: list[tuple[int, str, int, bytes]] = []

    async def write(rank: int) -> None:
        near = LoopbackFabric(net, f"near-{rank}")
        links = [await near.connect("far", lane, timeout_us=T_US) for lane in (Lane.DATA, Lane.DEMAND)]
        for number in range(40):
            for side, link in enumerate(links):
                place = (2 * rank + side) * 16
                payload = number.to_bytes(8, "little") * 2
                await link.write(region.key, place, payload, notify=side << 8 | number, timeout_us=T_US)
            await asyncio.sleep(1e-6)

    tasks = [asyncio.create_task(write(rank)) for rank in range(3)]
    while len(seen) < 240:
        for told in await region.notified(timeout_us=T_US):
            place = (2 * int(told.peer[-1]) + (told.immediate >> 8)) * 16
            seen.append((virtual_now_ns(), told.peer, told.immediate, bytes(region.buffer[place : place + 16])))
    for task in tasks:
        await task
    return seen


def test_a_seed_makes_the_same_weather_each_time() -> None:
    first, again, other = (run_virtual(partial(storm, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", range(5))
def test_links_overtake_each_other_but_keep_their_own_order(seed: int) -> None:
    seen = run_virtual(lambda: storm(seed))
    orders: dict[tuple[str, int], list[int]] = {}
    for _, peer, immediate, payload in seen:
        orders.setdefault((peer, immediate >> 8), []).append(immediate & 0xFF)
        # Newer bytes may be half there; older ones never.
        assert payload[:8] >= (immediate & 0xFF).to_bytes(8, "little") <= payload[8:]
    assert all(order == list(range(40)) for order in orders.values())
    assert len(orders) == 6
    both = [(peer, immediate) for _, peer, immediate, _ in seen if peer == "near-0"]
    # Sent in turn by one peer on two links, yet not received in turn.
    assert [immediate >> 8 for _, immediate in both] != [0, 1] * 40


def test_payloads_are_seen_torn_before_their_notification_and_whole_after() -> None:
    async def main() -> set[bytes]:
        net = network(latency_us=3, seed=4, faults=LoopbackFaults(torn=1, torn_us=100))
        near, far = LoopbackFabric(net, "near"), LoopbackFabric(net, "far")
        region = far.register(4, label="r")
        link = await near.connect("far", Lane.DATA, timeout_us=T_US)
        seen = set()
        for _ in range(20):
            region.buffer[:] = b"...."
            await link.write(region.key, 0, b"abcd", notify=0, timeout_us=T_US)
            told = asyncio.create_task(region.notified(timeout_us=T_US))
            while not told.done():
                seen.add(bytes(region.buffer))
                await asyncio.sleep(1e-6)
            assert bytes(region.buffer) == b"abcd"
        return seen

    torn = run_virtual(main) - {b"....", b"abcd"}
    assert {b"a...", b"...d"} <= torn
    assert torn <= {b"a...", b"ab..", b"abc.", b".bcd", b"..cd", b"...d"}


async def ends(attempt: Callable[[], Awaitable[object]], *errors: type[TransportError]) -> None:
    with pytest.raises(errors):
        await attempt()


@pytest.mark.parametrize("latency_us", [0, 5])
def test_a_kill_ends_everything_of_the_endpoint_on_every_side(latency_us: float) -> None:
    async def main() -> None:
        net = network(latency_us=latency_us, credits=4)
        alive, dead = LoopbackFabric(net, "alive"), LoopbackFabric(net, "dead")
        handler_ended = []

        async def handler(channel: Channel) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                handler_ended.append(channel.peer)

        await dead.listen("hub", handler)
        theirs, ours = dead.register(8, label="theirs"), alive.register(8, label="ours")
        to_dead = await alive.connect("dead", Lane.DATA, timeout_us=T_US)
        from_dead = await dead.connect("alive", Lane.DATA, timeout_us=T_US)
        channel = await alive.dial("hub", timeout_us=T_US)
        for number in range(4):
            await to_dead.write(theirs.key, 0, b"x", notify=number, timeout_us=T_US)
        await from_dead.write(ours.key, 0, b"x", notify=7, timeout_us=T_US)
        without_credit = asyncio.create_task(to_dead.write(theirs.key, 0, b"x", notify=9, timeout_us=T_US))
        receiving = asyncio.create_task(channel.receive(timeout_us=None))
        idle = asyncio.create_task(dead.register(8, label="idle").notified(timeout_us=None))
        await asyncio.sleep(0)
        net.kill("dead")
        net.kill("dead")
        await ends(lambda: without_credit, PeerLost)
        await ends(lambda: receiving, PeerLost)
        await ends(lambda: idle, RegionRevoked)
        await asyncio.sleep(0)
        assert handler_ended == ["alive"]
        # Those who are left
        await ends(lambda: to_dead.write(theirs.key, 0, b"x", timeout_us=T_US), PeerLost)
        await ends(lambda: channel.send({"n": 1}, timeout_us=T_US), PeerLost)
        await ends(lambda: alive.connect("dead", Lane.DATA, timeout_us=T_US), PeerLost)
        await ends(lambda: alive.dial("hub", timeout_us=T_US), PeerLost)
        with pytest.raises(RegionRevoked):
            alive.map(theirs.key)
        # The dead itself
        await ends(lambda: from_dead.write(ours.key, 0, b"x", timeout_us=T_US), PeerLost)
        await ends(lambda: theirs.notified(timeout_us=T_US), RegionRevoked)
        await ends(lambda: dead.connect("alive", Lane.DATA, timeout_us=T_US), LinkClosed)
        # What had arrived before stays; what was under way is lost.
        assert [told.immediate for told in ours.inbox.items] == ([] if latency_us else [7])
        await asyncio.sleep(1e-3)
        assert bytes(ours.buffer[:1]) == (b"\0" if latency_us else b"x")
        # Its address is free for a successor, which is not taken for the dead.
        successor = LoopbackFabric(net, "dead")
        fresh = successor.register(8, label="fresh")
        again = await alive.connect("dead", Lane.DATA, timeout_us=T_US)
        await again.write(fresh.key, 0, b"y", timeout_us=T_US)
        await ends(lambda: again.write(theirs.key, 0, b"x", timeout_us=T_US), RegionRevoked)
        await ends(lambda: to_dead.write(fresh.key, 0, b"x", timeout_us=T_US), PeerLost)
        for fabric in (alive, dead, successor):
            await fabric.close()
        assert (net.endpoints, net.listeners) == ({}, {})

    run_virtual(main)


@virtual_test
async def test_without_latency_writes_never_touch_the_loop() -> None:
    net = network()
    near, far = LoopbackFabric(net, "near"), LoopbackFabric(net, "far")
    region = far.register(8, label="r")
    link = await near.connect("far", Lane.DATA, timeout_us=T_US)
    write = link.write(region.key, 0, b"x", notify=1, timeout_us=T_US)
    with pytest.raises(StopIteration):
        write.send(None)
    take = region.notified(timeout_us=T_US)
    with pytest.raises(StopIteration) as done:
        take.send(None)
    assert [told.immediate for told in done.value.value] == [1]


@pytest.mark.parametrize(
    "options",
    [{"latency_us": -1}, {"latency_us": float("nan")}, {"bandwidth_gbps": 0}, {"credits": 0}],
)
def test_networks_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        network(**options)


@pytest.mark.parametrize("options", [{"jitter_us": -1}, {"overtake": 1.5}, {"torn": -0.1}, {"torn_us": float("inf")}])
def test_faults_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="faults"):
        LoopbackFaults(**options)


def test_addresses_and_listeners_are_taken_once() -> None:
    async def main() -> None:
        net = network()
        fabric = LoopbackFabric(net, "a")
        with pytest.raises(ConfigError, match="taken"):
            LoopbackFabric(net, "a")

        async def handler(channel: Channel) -> None: ...

        await fabric.listen("hub", handler)
        with pytest.raises(ConfigError, match="listener"):
            await fabric.listen("hub", handler)

    run_virtual(main)
