"""What only shm has: runs that are created and joined, its configuration, its greeter's limits."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from afore.core.errors import ConfigError, DeadlineExceeded, HostError, PeerLost
from afore.transport.api import Channel, Lane
from afore.transport.greeter import Greeter
from afore.transport.handshake import Identity, Purpose
from afore.transport.shm import ShmConfig, ShmFabric, sweep_stale
from afore.transport.sockets import receive_exactly
from afore.transport.unix_sockets import connect_unix

T_US = 5e6
Make = Callable[..., ShmFabric]


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"unit{secrets.token_hex(6)}"
    yield name
    assert [left for left in os.listdir("/dev/shm") if left.startswith(f"afore-{name}")] == []


async def test_a_run_is_created_joined_and_gone(run_id: str) -> None:
    first = ShmFabric.create(run_id, "launcher")
    assert first.run_directory == Path(f"/dev/shm/afore-{run_id}")
    with pytest.raises(ConfigError, match="alive"):
        ShmFabric.create(run_id, "launcher")
    second = ShmFabric.open(first.run_directory, "ffn-0")
    third = ShmFabric.open(first.run_directory, "ffn-0")
    assert len({first.address, second.address, third.address}) == 3
    assert "ffn-0" in second.address

    async def greet(channel: Channel) -> None:
        await channel.send({"hub": True}, timeout_us=T_US)

    await first.listen("hub", greet)
    channel = await second.dial("hub", timeout_us=T_US)
    assert await channel.receive(timeout_us=T_US) == {"hub": True}
    region = third.register(64, label="r")
    link = await second.connect(third.address, Lane.DATA, timeout_us=T_US)
    await link.write(region.key, 0, b"x", notify=1, timeout_us=T_US)
    assert [told.immediate for told in await region.notified(timeout_us=T_US)] == [1]
    for fabric in (first, second, third):
        await fabric.close()
    with pytest.raises(ConfigError, match="no run's directory"):
        ShmFabric.open(first.run_directory, "late")
    again = ShmFabric.create(run_id, "launcher")
    await again.close()


async def test_a_directory_that_the_caller_gave_is_left_to_the_caller(run_id: str, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    first = ShmFabric(ShmConfig(run_id=run_id, directory=str(folder), label="a"))
    second = ShmFabric.open(folder, "b")
    region = first.register(8, label="r")
    link = await second.connect(first.address, Lane.DATA, timeout_us=T_US)
    await link.write(region.key, 0, b"x", notify=1, timeout_us=T_US)
    await region.notified(timeout_us=T_US)
    await second.close()
    await first.close()
    assert [path.name for path in folder.iterdir()] == ["secret"]


async def test_two_listeners_cannot_share_an_address(run_id: str) -> None:
    fabric = ShmFabric.create(run_id, "launcher")

    async def never(channel: Channel) -> None:
        pytest.fail("nobody comes")

    for address in ("hub", fabric.address):
        await fabric.listen(address, never)
        with pytest.raises(HostError):
            await fabric.listen(address, never)
    for address in ("secret", "/nowhere/hub"):
        with pytest.raises(HostError):
            await fabric.listen(address, never)
    assert len((fabric.run_directory / "secret").read_bytes()) == 32
    await fabric.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_what_is_there_when_the_deadline_passes_has_come_in_time(run_id: str, run: Callable[..., None]) -> None:
    async def main() -> None:
        near, far = ShmFabric.create(run_id, "near"), ShmFabric.open(f"/dev/shm/afore-{run_id}", "far")
        region = far.register(8, label="r")
        link = await near.connect(far.address, Lane.DATA, timeout_us=T_US)
        for number in range(20):
            wait = asyncio.create_task(region.notified(timeout_us=0))
            await asyncio.sleep(0)
            # The timer is due by now, and the doorbell rings behind it: this loop has been busy elsewhere.
            if not wait.done():
                await link.write(region.key, 0, b"", notify=number, timeout_us=T_US)
                assert [told.immediate for told in await wait] == [number]
        await near.close()
        await far.close()

    run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"run_id": ""},
        {"run_id": "a-b"},
        {"run_id": "a/b"},
        {"run_id": "x" * 41},
        {"ring_slots": 0},
        {"ring_slots": 100},
        {"ring_slots": 1 << 20},
        {"message_limit": 0},
        {"handshake_timeout_us": 0},
    ],
)
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"shm.{next(iter(options))}"):
        ShmConfig(**{"run_id": "run"} | options)


async def test_a_short_secret_is_refused_and_leaves_nothing(run_id: str) -> None:
    with pytest.raises(ConfigError, match="guessed"):
        ShmFabric(ShmConfig(run_id=run_id, secret=b"short"))


async def test_a_link_that_finds_no_second_descriptor_leaves_the_first_to_nobody(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ShmFabric.create(run_id, "near"), ShmFabric.open(f"/dev/shm/afore-{run_id}", "far")

    def full(initial: int, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", full)
        with pytest.raises(PeerLost):
            await near.connect(far.address, Lane.DATA, timeout_us=T_US)
    assert far.refusals == {"HostError": 1}
    assert sorted(os.listdir("/proc/self/fd")) == before
    await near.close()
    await far.close()


@pytest.mark.slow
async def test_no_descriptors_is_a_host_error_that_leaves_nothing(run_id: str) -> None:
    near, far = ShmFabric.create(run_id, "near"), ShmFabric.open(f"/dev/shm/afore-{run_id}", "far")
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    connected = 0
    for spare in range(20):
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + spare, limits[1]))
        try:
            if spare < 2:
                with pytest.raises(HostError, match="ulimit -n"):
                    near.register(8, label="r")
            if spare < 3:
                with pytest.raises(HostError, match="ulimit -n"):
                    ShmFabric(ShmConfig(run_id=run_id, label="third"))
            # Which side runs out decides which error it is; both sides live in this process.
            with suppress(HostError, PeerLost, DeadlineExceeded):
                link = await near.connect(far.address, Lane.DATA, timeout_us=50_000 if spare < 12 else T_US)
                await link.close()
                connected += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert connected > 0
    await near.close()
    await far.close()
    assert len(os.listdir("/proc/self/fd")) < before


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_the_oldest_handshake_makes_room_for_the_newest(tmp_path: Path, turns: int) -> None:
    greeter = Greeter(timeout_us=60e6, limit=4)
    me = Identity(address="me", secret=bytes(32))
    path = str(tmp_path / "door")

    async def nobody(*_: object) -> None:
        pytest.fail("nobody is proven")

    greeter.listen(path, lambda _: me, lambda: frozenset(Purpose), nobody)
    silent = []
    for _ in range(7):
        silent.append(await connect_unix(path))
        for _ in range(turns):
            await asyncio.sleep(0)
    for sock in silent[:3]:
        with pytest.raises(PeerLost):
            await asyncio.wait_for(receive_exactly(sock, 1, "door"), 20)
    assert greeter.refusals["Crowded"] == 3
    await greeter.close()
    for sock in silent:
        sock.close()


@pytest.mark.slow
@pytest.mark.processes
def test_the_transport_needs_neither_torch_nor_numba() -> None:
    """Control tools and tests start quickly, and a machine without them can still say what is wrong."""
    modules = ["afore.transport." + path.stem for path in (Path(__file__).parents[2] / "transport").glob("[st]*.py")]
    modules += [
        "afore.transport." + name
        for name in ("loopback", "publish", "channel", "endpoint", "greeter", "handshake", "queues")
    ]
    modules += [
        "tests.transport.conformance." + path.stem for path in (Path(__file__).parent / "conformance").glob("*.py")
    ]
    modules.remove("afore.transport.session")
    code = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules.keys() & {{'torch', 'numba'}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_sweeping_this_machine_takes_nothing_that_lives() -> None:
    assert isinstance(sweep_stale(run_id="norunhasthisname"), tuple)
