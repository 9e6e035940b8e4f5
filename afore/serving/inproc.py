"""Runs a topology with every role a task of this process, over ``loopback``: scripts, tests, virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from afore.core.clock import Clock, deadline
from afore.core.config import RunConfig
from afore.core.errors import AforeError, ConfigError, PeerLost, TransportError
from afore.core.topology import DOOR, member_name
from afore.core.virtual_fence import VirtualTimeError
from afore.serving.checks import check
from afore.serving.client import HUB, Client
from afore.serving.roles import RealWorld, World, run_role
from afore.serving.spec import HUB_ADDRESS
from afore.transport.api import Fabric
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def running_inproc(config: RunConfig, clock: Clock) -> AsyncIterator[Client]:
    """Runs every role as a task of this process over ``loopback``; yields a client once all of them serve."""
    if config.topology.fabric == "shm":
        raise ConfigError("topology.fabric", "shm is for processes", "use loopback or auto with inproc=True")
    check(config)
    async with running_members(config, clock, LoopbackNetwork(clock), RealWorld()) as (client, _):
        yield client


@contextlib.asynccontextmanager
async def running_members(
    config: RunConfig,
    clock: Clock,
    network: LoopbackNetwork,
    world: World,
    *,
    make_fabric: Callable[[LoopbackNetwork, str], Fabric] | None = None,
) -> AsyncIterator[tuple[Client, dict[str, asyncio.Task[None]]]]:
    """Runs every role as a task over ``network``; yields a client once all of them serve, and the tasks by member name.

    ``make_fabric`` gives members endpoints of a test's own; none: on the nodes that ``topology.nodes`` says. Raises ``RoleLost``
    when a role does not come up. What ended a role without being an ``AforeError`` is a defect, and comes out.
    """

    def endpoint(role: str, rank: int) -> Fabric:
        name = member_name(role, rank)
        if make_fabric is not None:
            return make_fabric(network, name)
        return LoopbackFabric(network, name, node=config.topology.node_of(role, rank) or "")

    fabrics = {member: endpoint(*member) for member in config.topology.members()}
    own = LoopbackFabric(network, "client")
    tasks = {
        member_name(role, rank): asyncio.create_task(
            run_role(role, rank, fabric=fabric, hub_address=HUB_ADDRESS, clock=clock, config=config, world=world),
            name=member_name(role, rank),
        )
        for (role, rank), fabric in fabrics.items()
    }
    try:
        async with contextlib.AsyncExitStack() as stack:
            join_us = config.times.join_s * 1e6
            door = tasks[member_name(DOOR, 0)]
            async with deadline(join_us, peer=HUB, operation="the client looking for the hub"):
                while True:
                    try:
                        client = await stack.enter_async_context(
                            Client.connect(own, HUB_ADDRESS, clock, timeout_us=config.times.control_s * 1e6)
                        )
                        break
                    except PeerLost:
                        if door.done():
                            await door
                            raise
                        await clock.sleep_us(1_000)
            await client.serving(timeout_us=join_us)
            yield client, tasks
            with contextlib.suppress(TransportError):  # a door that is gone cannot be told
                await client.stop("the script ended it")
            await asyncio.wait(tasks.values(), timeout=config.times.shutdown_s)
    finally:
        for task in tasks.values():
            task.cancel()
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for fabric in (*fabrics.values(), own):
            await fabric.close()
        _raise_defects(dict(zip(tasks, results, strict=True)))


def _raise_defects(results: dict[str, BaseException | None]) -> None:
    """Logs how roles ended that were lost; raises what nobody raises on purpose."""
    for name, result in results.items():
        if isinstance(result, AforeError) and not isinstance(result, VirtualTimeError):
            log.warning("%s ended: %s", name, result)
        elif isinstance(result, Exception):
            result.add_note(f"it ended role {name}")
            raise result
