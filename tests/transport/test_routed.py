"""Endpoints on several nodes: neighbours share memory, others write over tcp, and one inbox hears all of them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from afore.core.errors import AccessRefused, PeerLost, RegionRevoked, WireError
from afore.transport.api import Channel, Lane, Link, Notification
from afore.transport.routed import RoutedFabric
from afore.transport.routed_names import RoutedAddress
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.tcp import TcpConfig, TcpFabric

TIMEOUT_US = 5e6
SECRET = b"a secret of this test alone"
Make = Callable[..., RoutedFabric]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes endpoints: (node, label); ``far=False`` makes one that other nodes cannot reach."""
    run = f"routed{os.getpid()}_{uuid.uuid4().hex[:8]}"
    made: list[RoutedFabric] = []

    def endpoint(node: str, label: str, *, far: bool = True) -> RoutedFabric:
        near = ShmFabric(ShmConfig(run_id=f"{run}.{node}", label=label))
        made.append(RoutedFabric(node, near, {"tcp": TcpFabric(TcpConfig(secret=SECRET))} if far else {}))
        return made[-1]

    yield endpoint
    for fabric in made:
        await fabric.close()
    assert [name for name in os.listdir("/dev/shm") if run in name] == []


async def test_neighbours_and_others_write_into_one_memory_and_ring_one_inbox(make: Make) -> None:
    owner, neighbour, other = make("a", "owner"), make("a", "neighbour"), make("b", "other")
    region = owner.register(64, label="r")
    mapped = neighbour.map(region.key)
    for number, writer in enumerate((neighbour, other), start=1):
        link = await writer.connect(owner.address, Lane.DATA, timeout_us=TIMEOUT_US)
        key = writer.resolve(region.key)
        await link.write(key, 8 * number, bytes([number] * 8), notify=number, timeout_us=TIMEOUT_US)
        (heard,) = await region.notified(timeout_us=TIMEOUT_US)
        assert isinstance(heard, Notification)
        assert heard.immediate == number
        assert bytes(mapped.buffer[8 * number : 8 * number + 8]) == bytes([number] * 8)
    assert [fabric.node_of(owner.address) for fabric in (neighbour, other)] == ["a", "a"]


async def test_memory_of_another_node_is_not_mapped(make: Make) -> None:
    owner, other = make("a", "owner"), make("b", "other")
    region = owner.register(64, label="r")
    with pytest.raises(AccessRefused, match="on node a"):
        other.map(region.key)


async def test_a_key_that_lacks_the_way_is_refused_typed(make: Make) -> None:
    owner, other = make("a", "owner"), make("b", "other")
    key = owner.register(64, label="r").key
    cut = dataclasses.replace(key, token=key.token.partition(";")[0])
    assert owner.resolve(cut).fabric == "shm"
    with pytest.raises(WireError, match="has no key for tcp"):
        other.resolve(cut)


async def test_a_closed_region_is_closed_for_everybody(make: Make) -> None:
    owner, neighbour, other = make("a", "owner"), make("a", "neighbour"), make("b", "other")
    region, witness = owner.register(64, label="r"), owner.register(8, label="witness")
    links = {
        writer: await writer.connect(owner.address, Lane.DATA, timeout_us=TIMEOUT_US) for writer in (neighbour, other)
    }
    for writer, link in links.items():
        await link.write(writer.resolve(region.key), 0, b"before", timeout_us=TIMEOUT_US)
    region.close()
    region.close()
    # The owner tells whoever wrote there before anything else: once it has heard a bell, so has the writer heard of the end.

    async def write_until_told(writer: RoutedFabric, link: Link) -> None:
        for _ in range(1000):
            await link.write(writer.resolve(region.key), 0, b"after", timeout_us=TIMEOUT_US)
            await link.write(writer.resolve(witness.key), 0, b"", notify=1, timeout_us=TIMEOUT_US)
            await witness.notified(timeout_us=TIMEOUT_US)

    for writer, link in links.items():
        with pytest.raises(RegionRevoked):
            await write_until_told(writer, link)


async def test_channels_lead_from_any_node_to_a_listener(make: Make) -> None:
    hub, neighbour, other = make("a", "hub"), make("a", "neighbour"), make("b", "other")

    async def echo(channel: Channel) -> None:
        await channel.send(await channel.receive(timeout_us=TIMEOUT_US), timeout_us=TIMEOUT_US)

    await hub.listen("hub", echo)
    for writer, address in ((neighbour, "hub"), (neighbour, hub.reachable_at("hub")), (other, hub.reachable_at("hub"))):
        channel = await writer.dial(address, timeout_us=TIMEOUT_US)
        await channel.send({"n": 1}, timeout_us=TIMEOUT_US)
        assert await channel.receive(timeout_us=TIMEOUT_US) == {"n": 1}


async def test_where_no_fabric_leads_both_sides_ways_are_named(make: Make) -> None:
    alone, other = make("a", "alone", far=False), make("b", "other")
    region = alone.register(8, label="r")
    for attempt in (
        lambda: other.connect(alone.address, Lane.DATA, timeout_us=TIMEOUT_US),
        lambda: other.dial(alone.reachable_at("hub"), timeout_us=TIMEOUT_US),
    ):
        with pytest.raises(
            PeerLost, match=r"is on node a; from node b no fabric leads there \(ours: tcp; theirs: none\)"
        ):
            await attempt()
    with pytest.raises(PeerLost, match="no fabric leads there"):
        other.resolve(region.key)
    assert RoutedAddress.parse(alone.address).far == {}


class Lingering(TcpFabric):
    """An endpoint with a peer that cannot be reached: to close it takes long."""

    def __init__(self, config: TcpConfig) -> None:
        super().__init__(config)
        self.closing = asyncio.Event()

    async def close(self) -> None:
        self.closing.set()
        try:
            await asyncio.Event().wait()
        finally:
            await super().close()


async def test_an_endpoint_whose_close_is_cut_short_leaves_nothing_on_its_node() -> None:
    run = f"routed{os.getpid()}_{uuid.uuid4().hex[:8]}"
    near = ShmFabric(ShmConfig(run_id=run, label="cut"))
    far = Lingering(TcpConfig(secret=SECRET))
    fabric = RoutedFabric("a", near, {"tcp": far})
    fabric.register(64, label="r")
    closing = asyncio.create_task(fabric.close())
    await far.closing.wait()
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert [name for name in os.listdir("/dev/shm") if run in name] == []
