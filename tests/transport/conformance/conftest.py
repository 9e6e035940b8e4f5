"""The fabrics and event loops that the suite runs over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from afore.core.virtual_loop import VirtualLoop
from tests.transport.conformance.puppet import Puppet
from tests.transport.conformance.verbs_world import VERBS_WORLDS, LaggingVerbsWorld, SoftVerbsWorld
from tests.transport.conformance.weather import Weather
from tests.transport.conformance.worlds import (
    LoopbackWorld,
    NetworkWorld,
    ShmWorld,
    SpinWorld,
    StormWorld,
    StreamWorld,
    TcpWorld,
    World,
)

WORLDS: dict[str, type[LoopbackWorld] | type[ShmWorld] | type[TcpWorld]] = {
    "loopback": LoopbackWorld,
    "storm": StormWorld,
    "shm": ShmWorld,
    "shm-spin": SpinWorld,
    "tcp": TcpWorld,
    "verbs-soft": SoftVerbsWorld,
    "verbs-lag": LaggingVerbsWorld,
}
"""The worlds of every machine; ``--verbs`` adds those that take an RDMA device."""
CHOICES: dict[str, Callable[[type[LoopbackWorld] | type[ShmWorld] | type[TcpWorld]], bool]] = {
    "world": lambda world: True,
    "stream_world": lambda world: world.streams,
    "mapping_world": lambda world: world.maps,
    "network_world": lambda world: world.networked,
    "crossing_world": lambda world: world.streams and world.crosses_processes,
}
"""``stream_world``: those with sockets, where strangers and other processes come in; ``mapping_world``: those that share memory;
``network_world``: those whose bytes cross a network; ``crossing_world``: those with sockets in which other processes can be.
"""
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
    "virtual": VirtualLoop,
}


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test of this folder runs under each of these."""
    return LOOPS


def pytest_configure(config: pytest.Config) -> None:
    """Adds the verbs worlds that ``--verbs`` names; with it the suite runs over these alone."""
    bindings = [name for name in config.getoption("--verbs").split(",") if name]
    if bindings:
        WORLDS.clear()
        for name in bindings:
            WORLDS[f"verbs-{name}"] = VERBS_WORLDS[name]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fixture ``world`` is any fabric, those of ``CHOICES`` some."""
    for name, suits in CHOICES.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [key for key, world in WORLDS.items() if suits(world)], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the pairs that cannot be, such as sockets in virtual time."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (kept if _can_be(item) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _can_be(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return True
    name = next((callspec.params[choice] for choice in CHOICES if choice in callspec.params), None)
    factory = callspec.params.get("_asyncio_loop_factory")
    if name is None or factory is None:
        return True
    if name in WORLDS and not WORLDS[name].crosses_processes and "puppets" in item.fixturenames:  # type: ignore[attr-defined]
        return False
    if name not in WORLDS:
        return False  # no world suits: verbs shares no memory
    return any(LOOPS[loop] is factory for loop in WORLDS[name].loops)


async def _life(
    made: LoopbackWorld | ShmWorld | TcpWorld,
) -> AsyncIterator[LoopbackWorld | ShmWorld | TcpWorld]:
    yield made
    await made.close()
    assert made.residue() == [], "a fabric left something behind"


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async for made in _life(WORLDS[request.param]()):
        yield made


@pytest.fixture
async def stream_world(request: pytest.FixtureRequest) -> AsyncIterator[StreamWorld]:
    async for made in _life(WORLDS[request.param]()):
        assert not isinstance(made, LoopbackWorld)
        yield made


@pytest.fixture
async def crossing_world(request: pytest.FixtureRequest) -> AsyncIterator[StreamWorld]:
    async for made in _life(WORLDS[request.param]()):
        assert not isinstance(made, LoopbackWorld)
        yield made


@pytest.fixture
async def mapping_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async for made in _life(WORLDS[request.param]()):
        yield made


@pytest.fixture
async def network_world(request: pytest.FixtureRequest) -> AsyncIterator[NetworkWorld]:
    async for made in _life(WORLDS[request.param]()):
        assert isinstance(made, TcpWorld)
        yield made


@pytest.fixture
async def weather() -> AsyncIterator[Callable[..., Weather]]:
    """Makes weather, and clears it up."""
    made: list[Weather] = []

    def one(*args: Any, **options: Any) -> Weather:
        made.append(Weather(*args, **options))
        return made[-1]

    yield one
    for each in made:
        await each.close()


@pytest.fixture
async def puppets(stream_world: StreamWorld) -> AsyncIterator[Callable[[str], Awaitable[Puppet]]]:
    """Starts puppets in ``stream_world`` and ends them."""
    started: list[Puppet] = []

    async def start(label: str) -> Puppet:
        started.append(await Puppet.start(stream_world.puppet_spec(label)))
        return started[-1]

    yield start
    for puppet in started:
        await puppet.end()
