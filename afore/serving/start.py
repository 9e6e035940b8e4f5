"""Two ways to run a topology: every role a process of its own, or every role a task of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np

from afore.core import control
from afore.core.clock import Clock
from afore.core.config import RunConfig
from afore.core.errors import AforeError, ConfigError, DeadlineExceeded, PeerLost, RoleLost, TransportError
from afore.core.slots import contiguous_primaries
from afore.core.topology import DOOR, member_name
from afore.core.virtual_fence import VirtualTimeError
from afore.models.budget import memory_budget
from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint
from afore.models.loading import verify_checkpoint
from afore.scheduler.policies.registry import check_policy
from afore.serving.client import Client
from afore.serving.door import request_limits
from afore.serving.roles import RealWorld, World, run_role
from afore.serving.spec import HUB_ADDRESS, ProcessSpec
from afore.serving.supervisor import Exit, Supervisor
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.shm import ShmFabric
from afore.workers.kv_layout import kv_layout

log = logging.getLogger(__name__)


def checkpoint_path(config: RunConfig) -> Path:
    """The model's directory."""
    return Path(config.model) if config.model is not None else bundled_model_path()


def check(config: RunConfig) -> None:
    """Refuses what cannot run, before anything is started: the policy's name, the checkpoint, lengths it does not have.

    Raises ``ConfigError`` or ``CheckpointError``.
    """
    check_policy(config.policy)
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        verify_checkpoint(checkpoint)
        request_limits(config, checkpoint.spec)


def new_cluster_name() -> str:
    """A name that no other cluster of this machine has."""
    return f"{os.getpid()}_{secrets.token_hex(3)}"


def process_specs(config: RunConfig, cluster: str, run_directory: Path, log_level: str) -> list[ProcessSpec]:
    """One process for each member of the topology."""
    return [
        ProcessSpec(
            name=member_name(role, rank),
            cluster=cluster,
            roles=((role, rank),),
            run_directory=str(run_directory),
            log_level=log_level,
            config=config,
        )
        for role, rank in config.topology.members()
    ]


@contextlib.asynccontextmanager
async def running_processes(
    config: RunConfig,
    clock: Clock,
    *,
    name: str | None = None,
    log_level: str = "warning",
    on_status: Callable[[control.Status], None] | None = None,
    supervisor: Supervisor | None = None,
) -> AsyncIterator[tuple[Client, Path]]:
    """Starts every role as a process over ``shm``; yields a client once all of them serve.

    ``supervisor`` is one that the caller has begun already, so that its fork server imports while the caller does.
    Raises ``RoleLost`` when one ends on the way or while the block runs (the block is cancelled for it).
    """
    if config.topology.fabric == "loopback":
        raise ConfigError("topology.fabric", "loopback does not reach other processes", "use shm or auto")
    async with contextlib.AsyncExitStack() as stack:
        if supervisor is None:
            supervisor = await stack.enter_async_context(Supervisor())
        check(config)
        cluster = name or new_cluster_name()
        fabric = ShmFabric.create(cluster, "launcher")
        try:
            specs = process_specs(config, cluster, fabric.run_directory, log_level)
            await supervisor.start(specs, timeout_s=config.times.join_s)
            watcher = asyncio.create_task(supervisor.first_exit(), name="first exit")
            try:
                async with connected(fabric, config, clock, watcher, on_status) as client:
                    yield client, checkpoint_path(config)
                    client.raise_if_lost()
                    await client.stop("the launcher ended it")
                    await supervisor.stop(grace_s=config.times.shutdown_s)
            finally:
                watcher.cancel()
                await supervisor.stop(grace_s=0.0)
        finally:
            await fabric.close()


@contextlib.asynccontextmanager
async def connected(
    fabric: ShmFabric,
    config: RunConfig,
    clock: Clock,
    first_exit: asyncio.Task[Exit],
    on_status: Callable[[control.Status], None] | None,
) -> AsyncIterator[Client]:
    """A client of a cluster that is coming up; yields once it serves. Raises what kept it from serving."""
    join_us = config.times.join_s * 1e6
    async with contextlib.AsyncExitStack() as stack:
        while True:
            try:
                client = await stack.enter_async_context(
                    Client.connect(fabric, HUB_ADDRESS, clock, timeout_us=config.times.control_s * 1e6)
                )
                break
            except PeerLost:
                if first_exit.done():
                    exit_ = first_exit.result()
                    raise RoleLost(exit_.name, exit_.describe(), "see its message above") from None
                await clock.sleep_us(20_000)
        serving = asyncio.create_task(client.serving(timeout_us=join_us), name="serving")
        telling = asyncio.create_task(_tell(client, on_status), name="status")
        try:
            await asyncio.wait({serving, first_exit}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                # The hub names the role and its reason; give it a moment to see the end of that role's channel.
                with contextlib.suppress(DeadlineExceeded):
                    await client.serving(timeout_us=2e6)
                exit_ = first_exit.result()
                raise RoleLost(exit_.name, f"{exit_.describe()} before the cluster served", "see its message above")
            await serving
        finally:
            serving.cancel()
            telling.cancel()
        yield client


async def _tell(client: Client, on_status: Callable[[control.Status], None] | None) -> None:
    while on_status is not None:
        on_status(await client.wait_change())


def describe_memory(config: RunConfig) -> list[str]:
    """What each role will take, one line each, from the checkpoint's headers alone. Raises ``CheckpointError``."""
    topology = config.topology
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        primaries_E = contiguous_primaries(checkpoint.spec.num_experts, topology.ffn)
        budget = memory_budget(
            checkpoint,
            primaries_per_worker=np.bincount(primaries_E, minlength=topology.ffn).tolist(),
            slots_per_worker=topology.slots_N,
            kv_layout=kv_layout(config, checkpoint.spec),
        )
    ffn = budget.ffn_weights_N
    ffn_range = _mib(max(ffn)) if min(ffn) == max(ffn) else f"{_mib(min(ffn))} to {_mib(max(ffn))}"
    return [
        f"memory of {topology.attention} attention: {_mib(budget.attention_weights)} of weights and "
        f"{_mib(budget.attention_kv)} of KV cache each",
        f"memory of {topology.ffn} ffn: {ffn_range} of experts each (primaries and redundant slots)",
        f"memory of {topology.prefill} prefill: {_mib(budget.prefill_weights)} of weights each",
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.1f} GiB"


@contextlib.asynccontextmanager
async def running_inproc(config: RunConfig, clock: Clock) -> AsyncIterator[tuple[Client, Path]]:
    """Runs every role as a task of this process over ``loopback``; yields a client once all of them serve."""
    if config.topology.fabric == "shm":
        raise ConfigError("topology.fabric", "shm is for processes", "use loopback or auto with inproc=True")
    check(config)
    async with running_members(config, clock, LoopbackNetwork(clock), RealWorld()) as (client, _):
        yield client, checkpoint_path(config)


@contextlib.asynccontextmanager
async def running_members(
    config: RunConfig,
    clock: Clock,
    network: LoopbackNetwork,
    world: World,
    *,
    make_fabric: Callable[[LoopbackNetwork, str], LoopbackFabric] = LoopbackFabric,
) -> AsyncIterator[tuple[Client, dict[str, asyncio.Task[None]]]]:
    """Runs every role as a task over ``network``; yields a client once all of them serve, and the tasks by member name.

    Raises ``RoleLost`` when a role does not come up. What ended a role without being an ``AforeError`` is a defect, and comes out.
    """
    fabrics = {member: make_fabric(network, member_name(*member)) for member in config.topology.members()}
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
            while True:
                try:
                    client = await stack.enter_async_context(
                        Client.connect(own, HUB_ADDRESS, clock, timeout_us=config.times.control_s * 1e6)
                    )
                    break
                except PeerLost:
                    door = tasks[member_name(DOOR, 0)]
                    if door.done():
                        await door
                        raise
                    await clock.sleep_us(1_000)
            await client.serving(timeout_us=config.times.join_s * 1e6)
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
