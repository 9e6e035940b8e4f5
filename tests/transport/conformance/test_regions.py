"""Regions and mappings: size, keys, sharing, and what closing means."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from afore.core.errors import AccessRefused, ConfigError, LinkClosed, RegionRevoked, TransportError
from tests.transport.conformance.helpers import AT_ONCE_US, TIMEOUT_US, started
from tests.transport.conformance.worlds import World

SIZES = [0, 1, 7, 8, 4095, 4096, 1 << 20]


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_region_is_zeroed_writable_bytes_of_its_size(world: World, nbytes: int) -> None:
    region = world.fabric("owner").register(nbytes, label="a label/with any ☃ text")
    assert region.nbytes == region.key.nbytes == region.buffer.nbytes == nbytes
    assert (region.buffer.format, region.buffer.ndim, region.buffer.readonly) == ("B", 1, False)
    assert bytes(region.buffer) == bytes(nbytes)
    region.buffer[:] = b"\xa5" * nbytes
    assert region.buffer.tobytes() == b"\xa5" * nbytes


@pytest.mark.parametrize("nbytes", [-1, 1 << 60])
async def test_an_impossible_size_is_refused(world: World, nbytes: int) -> None:
    with pytest.raises(ConfigError, match="bytes is no size"):
        world.fabric("owner").register(nbytes, label="r")


async def test_keys_say_who_and_what_and_numbers_are_never_reused(world: World) -> None:
    fabric = world.fabric("owner")
    numbers = []
    for _ in range(5):
        region = fabric.register(8, label="same label")
        assert (region.key.fabric, region.key.address) == (fabric.name, fabric.address)
        numbers.append(region.key.region)
        region.close()
    assert len(set(numbers)) == 5


async def test_what_is_not_shared_cannot_be_mapped(world: World) -> None:
    owner, reader = world.fabric("owner"), world.fabric("reader")
    region = owner.register(4096, label="r")
    assert owner.maps_memory == world.maps
    if not world.maps:
        with pytest.raises(AccessRefused, match="write into it"):
            reader.map(region.key)


async def test_mappings_share_the_owner_s_memory(mapping_world: World) -> None:
    owner, reader = mapping_world.fabric("owner"), mapping_world.fabric("reader")
    region = owner.register(4096, label="r")
    seen, written = reader.map(region.key), reader.map(region.key, writable=True)
    region.buffer[100:104] = b"here"
    assert bytes(seen.buffer[100:104]) == b"here"
    written.buffer[4095] = 7
    assert region.buffer[4095] == seen.buffer[4095] == 7
    assert len(seen.buffer) == 4096
    with pytest.raises(TypeError):
        seen.buffer[0] = 1


async def test_a_mapping_closes_once_and_for_all(mapping_world: World) -> None:
    fabric = mapping_world.fabric("owner")
    mapping = fabric.map(fabric.register(8, label="r").key)
    mapping.close()
    mapping.close()
    with pytest.raises(TransportError, match="closed"):
        _ = mapping.buffer


async def test_a_closed_region_cannot_be_mapped_but_old_mappings_stay_valid_memory(mapping_world: World) -> None:
    owner, reader = mapping_world.fabric("owner"), mapping_world.fabric("reader")
    region = owner.register(16, label="r")
    mapping = reader.map(region.key, writable=True)
    region.close()
    with pytest.raises(RegionRevoked, match="closed"):
        reader.map(region.key)
    mapping.buffer[0] = 1
    assert mapping.buffer[0] == 1


async def test_foreign_and_forged_keys_cannot_be_mapped(mapping_world: World) -> None:
    owner, reader = mapping_world.fabric("owner"), mapping_world.fabric("reader")
    key, other = owner.register(16, label="r").key, owner.register(16, label="r").key
    for forged in (
        dataclasses.replace(key, fabric="pigeon"),
        dataclasses.replace(key, nbytes=17),
        dataclasses.replace(key, region=other.region),
        dataclasses.replace(key, token="../etc/passwd"),
    ):
        with pytest.raises(AccessRefused):
            reader.map(forged)


async def test_closing_a_region_is_idempotent_and_ends_its_use(world: World) -> None:
    region = world.fabric("owner").register(8, label="r")
    region.close()
    region.close()
    with pytest.raises(RegionRevoked, match="closed"):
        _ = region.buffer
    with pytest.raises(RegionRevoked, match="closed"):
        await region.notified(timeout_us=AT_ONCE_US)


async def test_closing_a_region_ends_waits_without_a_deadline(world: World) -> None:
    region = world.fabric("owner").register(8, label="r")
    waits = [asyncio.create_task(region.notified(timeout_us=None)) for _ in range(3)]
    await started(*waits)
    region.close()
    for wait in waits:
        with pytest.raises(RegionRevoked):
            await wait


async def test_views_outlive_their_region(world: World) -> None:
    region = world.fabric("owner").register(4096, label="r")
    part, words = region.buffer[8:16], region.buffer.cast("Q")
    region.close()
    part[:] = b"\xff" * 8
    assert words[1] == 2**64 - 1


async def test_a_closed_fabric_refuses_everything_and_ends_its_regions(world: World) -> None:
    fabric, peer = world.fabric("owner"), world.fabric("peer")
    region = fabric.register(8, label="r")
    mapping = fabric.map(region.key) if world.maps else None
    wait = asyncio.create_task(region.notified(timeout_us=None))
    await started(wait)
    await fabric.close()
    await fabric.close()
    with pytest.raises(RegionRevoked):
        await wait
    if mapping is not None:
        with pytest.raises(TransportError):
            _ = mapping.buffer
    with pytest.raises(LinkClosed):
        fabric.register(8, label="r")
    with pytest.raises(LinkClosed):
        fabric.map(region.key)
    with pytest.raises(LinkClosed):
        await fabric.connect(peer.address, lane=0, timeout_us=TIMEOUT_US)  # type: ignore[arg-type]  # never looked at
    with pytest.raises(LinkClosed):
        await fabric.dial(peer.address, timeout_us=TIMEOUT_US)
