"""What the suite of all fabrics does not ask: reads, adopted memory, more than staging, faults of the device and the network."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from afore.core.errors import AccessRefused, ConfigError, HostError, LinkClosed, PeerLost, RegionRevoked
from afore.transport.api import Lane
from afore.transport.verbs.binding import READ, SEND, WRITE, WRITE_WITH_IMMEDIATE
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.fabric import VerbsFabric
from afore.transport.verbs.link import VerbsLink
from afore.transport.verbs.region import VerbsRegion
from afore.transport.verbs.status import NOT_READY_EXCEEDED, REMOTE_ACCESS, RETRIES_EXCEEDED
from afore.transport.verbs.table import DeviceEntry, PortEntry
from tests.transport.conformance.helpers import raises_soon, take
from tests.transport.verbs.soft_device import TABLE, SoftBinding, Wire

T_US = 5e6
SECRET = b"the secret of this run, long enough"
Make = Callable[..., VerbsFabric]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def make(wire: Wire) -> AsyncIterator[Make]:
    """Makes endpoints of one wire; afterwards nothing of them is left on the device."""
    made: list[VerbsFabric] = []

    def one(**options: Any) -> VerbsFabric:
        table = options.pop("table", TABLE)
        config = VerbsConfig(secret=SECRET, **options)
        made.append(VerbsFabric(config, binding=SoftBinding(wire), table=table))
        return made[-1]

    yield one
    for fabric in made:
        await fabric.close()
    assert wire.living() == (0, 0)


async def pair(make: Make, nbytes: int = 4096, **options: Any) -> tuple[VerbsLink, VerbsRegion, VerbsFabric]:
    near, far = make(**options), make(**options)
    region = far.register(nbytes, label="r")
    return await near.connect(far.address, Lane.DATA, timeout_us=T_US), region, near


async def test_the_choice_is_told(make: Make) -> None:
    binding, device, port, address, mtu = make(mtu_bytes=1024).choice
    assert binding == "binding soft of the tests"
    assert device == "device soft0: the only one with an active port"
    assert port == "port 1 (Ethernet): active"
    assert address.startswith("GID 0 (10.0.0.1, RoCE v2, soft): RoCE v2 over IPv4")
    assert mtu == "MTU 1024: the config names it (the port has 4096)"


async def test_a_steady_stream_takes_one_request_a_write(make: Make, wire: Wire) -> None:
    link, region, _ = await pair(make)
    asked: list[int] = []
    wire.fault = lambda opcode, rkey: asked.append(opcode) or 0  # type: ignore[func-returns-value]
    for number in range(4):
        await link.write(region.key, 0, b"x" * 64, notify=number, timeout_us=T_US)
    # A write and a notice of the region, then one request each.
    assert asked == [WRITE, SEND, WRITE_WITH_IMMEDIATE, WRITE_WITH_IMMEDIATE, WRITE_WITH_IMMEDIATE]
    assert [told.immediate for told in await take(region, 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 200_000])
async def test_reads_bring_a_region_s_bytes(make: Make, nbytes: int) -> None:
    link, region, near = await pair(make, 200_010)
    region.buffer[:] = bytes(place % 251 for place in range(200_010))
    elsewhere = bytearray(nbytes)
    await link.read(region.key, 7, elsewhere, timeout_us=T_US)
    assert elsewhere == region.buffer[7 : 7 + nbytes]
    mine = near.register(nbytes + 64, label="mine")
    await link.read(region.key, 7, mine.buffer[64:], timeout_us=T_US)
    assert mine.buffer[64:] == elsewhere
    with pytest.raises(AccessRefused, match="200010"):
        await link.read(region.key, 200_000, bytearray(11), timeout_us=T_US)
    with pytest.raises(ConfigError, match="read-only"):
        await link.read(region.key, 0, bytes(8), timeout_us=T_US)


async def test_a_cancelled_read_leaves_its_target_alone_and_the_link_usable(make: Make, wire: Wire) -> None:
    link, region, _ = await pair(make, 64)
    await link.write(region.key, 0, b"\x07" * 64, timeout_us=T_US)
    wire.lag = 20
    target = bytearray(64)
    reading = asyncio.create_task(link.read(region.key, 0, target, timeout_us=T_US))
    for _ in range(3):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await link.write(region.key, 0, b"!", notify=1, timeout_us=T_US)
    await take(region, 1)
    assert target == bytes(64)


class Weights:
    """What a torch tensor says of itself."""

    device = "cpu"

    def __init__(self, nbytes: int) -> None:
        self.raw = ctypes.create_string_buffer(nbytes)
        self.nbytes = nbytes
        self.contiguous = True

    def data_ptr(self) -> int:
        return ctypes.addressof(self.raw)

    def numel(self) -> int:
        return self.nbytes // 4

    def element_size(self) -> int:
        return 4

    def is_contiguous(self) -> bool:
        return self.contiguous


@pytest.mark.parametrize("kind", [bytearray, Weights])
async def test_adopted_memory_is_read_and_written_in_place(make: Make, kind: Callable[[int], Any]) -> None:
    near, far = make(), make()
    memory = kind(4096)
    region = far.adopt(memory, label="experts")
    region.buffer[:5] = b"hello"
    link = await near.connect(far.address, Lane.DATA, timeout_us=T_US)
    copy = bytearray(5)
    await link.read(region.key, 0, copy, timeout_us=T_US)
    assert copy == b"hello"
    await link.write(region.key, 4091, b"there", notify=3, timeout_us=T_US)
    await take(region, 1)
    assert bytes(getattr(memory, "raw", memory))[4091:] == b"there"
    region.close()
    with pytest.raises(RegionRevoked):
        _ = region.buffer


async def test_memory_that_cannot_be_adopted_is_refused(make: Make) -> None:
    fabric = make()
    scattered = Weights(64)
    scattered.contiguous = False
    elsewhere = Weights(64)
    elsewhere.device = "cuda:0"
    for memory, why in (
        (bytes(8), "read-only"),
        (memoryview(bytearray(8))[::2], "one piece"),
        (17, "one piece"),
        (scattered, "not contiguous"),
        (elsewhere, "cuda:0"),
    ):
        with pytest.raises(ConfigError, match=why):
            fabric.adopt(memory, label="m")


async def test_more_than_staging_goes_in_one_piece(make: Make) -> None:
    link, region, _ = await pair(make, 1 << 20, staging_bytes=4096)
    for number, nbytes in enumerate((4000, 1 << 20, 4096, 5000, 300, 1 << 20)):
        payload = bytes([number + 1]) * nbytes
        await link.write(region.key, 0, payload, notify=number, timeout_us=T_US)
        await take(region, 1)
        assert region.buffer[:nbytes] == payload


async def test_flush_returns_when_all_has_arrived(make: Make, wire: Wire) -> None:
    link, region, _ = await pair(make)
    await link.flush(timeout_us=T_US)
    wire.lag = 10
    for number in range(40):
        await link.write(region.key, number, bytes([number]), timeout_us=T_US)
    await link.flush(timeout_us=T_US)
    assert bytes(region.buffer[:40]) == bytes(range(40))
    await link.close()
    with pytest.raises(LinkClosed):
        await link.flush(timeout_us=T_US)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (RETRIES_EXCEEDED, r"RDMA WRITE to region 1 failed: transport retries exceeded \(12\) after 7 retries"),
        (REMOTE_ACCESS, r"RDMA WRITE to region 1 failed: remote access error \(10\)"),
        (NOT_READY_EXCEEDED, "receiver-not-ready"),
        (4, "local protection error"),
    ],
)
async def test_a_failed_request_ends_the_link_with_its_reason(make: Make, wire: Wire, status: int, why: str) -> None:
    link, region, near = await pair(make)
    await link.write(region.key, 0, b"x", timeout_us=T_US)
    wire.fault = lambda opcode, rkey: status if opcode == WRITE else 0

    async def write() -> None:
        await link.write(region.key, 0, b"x", timeout_us=T_US)

    error = await raises_soon(PeerLost, write)
    with pytest.raises(PeerLost, match=why):
        raise error
    wire.fault = None
    # The endpoint goes on: a new link gets a new queue pair.
    again = await near.connect(link.peer, Lane.DATA, timeout_us=T_US)
    await again.write(region.key, 0, b"!", notify=1, timeout_us=T_US)
    await take(region, 1)


async def test_a_failure_ends_who_waits_for_credit_or_a_read(make: Make, wire: Wire) -> None:
    link, region, _ = await pair(make, credits=2)
    for number in range(2):
        await link.write(region.key, 0, b"", notify=number, timeout_us=T_US)
    # A writer without credit says that it waits.
    wire.fault = lambda opcode, rkey: RETRIES_EXCEEDED if opcode == SEND else 0
    waiting = [
        asyncio.create_task(link.write(region.key, 0, b"", notify=2, timeout_us=T_US)),
        asyncio.create_task(link.read(region.key, 0, bytearray(8), timeout_us=T_US)),
    ]
    for task in waiting:
        with pytest.raises(PeerLost, match="SEND failed: transport retries exceeded"):
            await task


async def test_a_failed_read_says_so(make: Make, wire: Wire) -> None:
    link, region, _ = await pair(make)
    wire.fault = lambda opcode, rkey: REMOTE_ACCESS if opcode == READ else 0
    with pytest.raises(PeerLost, match=r"RDMA READ to region 1 failed: remote access error"):
        await link.read(region.key, 0, bytearray(8), timeout_us=T_US)


async def test_a_writer_that_does_not_let_go_loses_its_link(make: Make, wire: Wire) -> None:
    link, region, _ = await pair(make, revoke_timeout_us=1_000.0, linger_us=1_000.0)
    await link.write(region.key, 0, b"x", timeout_us=T_US)
    # Requests that never complete: the writer cannot say that nothing is under way.
    wire.lag = 1 << 30
    await link.write(region.key, 0, b"y", timeout_us=T_US)
    region.close()

    async def write() -> None:
        try:
            await link.write(region.key, 0, b"z", timeout_us=20_000.0)
        except RegionRevoked:
            return

    await raises_soon(PeerLost, write)
    wire.lag = 0


async def test_an_endpoint_whose_close_is_cut_short_listens_no_more(make: Make, wire: Wire) -> None:
    link, region, near = await pair(make, linger_us=T_US)
    await link.write(region.key, 0, b"x", timeout_us=T_US)
    wire.lag = 1 << 30  # nothing completes: closing waits for it
    await link.write(region.key, 0, b"y", timeout_us=T_US)
    closing = asyncio.create_task(near.close())
    for _ in range(3):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    wire.lag = 0
    with pytest.raises(PeerLost):
        await make().connect(near.address, Lane.DATA, timeout_us=T_US)


async def test_a_region_s_registration_lives_until_its_writers_let_go(make: Make, wire: Wire) -> None:
    link, region, _ = await pair(make)
    await link.write(region.key, 0, b"x", timeout_us=T_US)
    before = wire.living()[1]
    region.close()
    assert wire.living()[1] == before
    for _ in range(200):
        await asyncio.sleep(0)
    assert wire.living()[1] == before - 1
    with pytest.raises(RegionRevoked):
        await link.write(region.key, 0, b"x", timeout_us=T_US)


async def test_a_device_that_grants_less_inline_room_is_used_all_the_same(make: Make, wire: Wire) -> None:
    for limit in (0, 4, 100):
        wire.inline_limit = limit
        link, region, _ = await pair(make)
        other = make()
        for number, nbytes in enumerate((0, 1, 4, 5, 100, 101, 600)):
            await link.write(region.key, 0, bytes([number]) * nbytes, notify=number, timeout_us=T_US)
            await take(region, 1)
            assert region.buffer[:nbytes] == bytes([number]) * nbytes
        await other.close()


async def test_what_the_device_refuses_is_said_with_its_remedy(make: Make, wire: Wire) -> None:
    near, far = make(), make()
    wire.registers = False
    with pytest.raises(HostError, match=r"locked memory: cannot register 64 bytes for region 'r'.*ulimit -l unlimited"):
        far.register(64, label="r")
    # The one who came learns that it was turned away; why is in the owner's log and counts.
    with pytest.raises(PeerLost, match="ended the connection"):
        await near.connect(far.address, Lane.DATA, timeout_us=T_US)
    assert far.refusals == {"HostError": 1}
    wire.registers = True


async def test_two_link_layers_do_not_meet(make: Make) -> None:
    port = TABLE[0].ports[0]
    infiniband = (DeviceEntry("soft0", None, (PortEntry(1, "ACTIVE", True, port.gids),)),)
    near, far = make(table=infiniband), make()
    with pytest.raises(PeerLost, match="its port is Ethernet, this side's InfiniBand"):
        await near.connect(far.address, Lane.DATA, timeout_us=T_US)


async def test_addresses_without_a_path_are_named(make: Make) -> None:
    gid = TABLE[0].ports[0].gids[0]
    lonely = type(gid)(0, bytes(15) + b"\x01", "RoCE v2", "soft")
    near = make()
    far = make(table=(DeviceEntry("soft0", None, (PortEntry(1, "ACTIVE", False, (lonely,)),)),))
    with pytest.raises(PeerLost, match=r"no path from GID 0 \(10.0.0.1, RoCE v2, soft\) to ::1 with MTU 4096"):
        await near.connect(far.address, Lane.DATA, timeout_us=T_US)
