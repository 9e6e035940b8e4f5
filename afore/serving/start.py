"""Runs a topology with every role a process of its own. Light to import: torch and the roles are the fork server's business."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from afore.core import control
from afore.core.clock import Clock
from afore.core.config import RunConfig
from afore.core.errors import DeadlineExceeded, PeerLost, RoleLost, TransportError
from afore.core.topology import member_name
from afore.serving.client import Client
from afore.serving.spec import HUB_ADDRESS, ProcessSpec
from afore.serving.supervisor import ZYGOTE, Exit, Supervisor
from afore.transport.shm import ShmFabric
from afore.workers.device.cuda.probe import require_gpus

EXIT_REPORT_S = 0.5
"""How long after the end of a role's channel the end of its process may come."""
SIGNALLED_GRACE_S = 2.0
"""How long roles have to end by themselves when the launcher is ended by a signal or an error."""


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
) -> AsyncIterator[Client]:
    """Starts every role as a process over ``shm``; yields a client once all of them serve.

    ``supervisor`` is one that the caller has begun already, so that its fork server imports while the caller does.
    Raises ``RoleLost`` when one ends on the way or while the block runs (the block is cancelled for it).
    """
    async with contextlib.AsyncExitStack() as stack:
        if supervisor is None:
            await asyncio.to_thread(require_gpus, config)  # before kernels are compiled
            supervisor = await stack.enter_async_context(Supervisor(config.policy))
        await supervisor.check(config, timeout_s=config.times.join_s)
        cluster = name or new_cluster_name()
        fabric = ShmFabric.create(cluster, "launcher")
        try:
            specs = process_specs(config, cluster, fabric.run_directory, log_level)
            await supervisor.start(specs, timeout_s=config.times.join_s)
            watcher = asyncio.create_task(supervisor.first_exit(), name="first exit")
            try:
                async with connected(fabric, config, clock, watcher, on_status) as client:
                    grace_s = SIGNALLED_GRACE_S
                    try:
                        yield client
                        client.raise_if_lost()
                        grace_s = config.times.shutdown_s
                    except RoleLost as lost:
                        raise await _explained(lost, supervisor) from None
                    finally:
                        # Also after Ctrl-C: roles that are told to stop end without a word.
                        with contextlib.suppress(TransportError):
                            await client.stop("the launcher ended it")
                            await supervisor.stop(grace_s=grace_s)
            finally:
                watcher.cancel()
                await supervisor.stop(grace_s=0.0)
        finally:
            await fabric.close()


async def _explained(lost: RoleLost, supervisor: Supervisor) -> RoleLost:
    """The same loss, with what the operating system says of that process, where it says anything."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EXIT_REPORT_S):
            exit_ = await supervisor.exit_of(lost.role)
            if exit_.name == ZYGOTE:
                return RoleLost(ZYGOTE, exit_.reason, lost.hint)
            if exit_.status < 0:
                return RoleLost(lost.role, f"{exit_.reason} (pid {supervisor.pids.get(lost.role, '?')})", lost.hint)
    return lost


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
                    raise RoleLost(exit_.name, exit_.reason, "see its message above") from None
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
                raise RoleLost(exit_.name, f"{exit_.reason} before the cluster served", "see its message above")
            await serving
        finally:
            serving.cancel()
            telling.cancel()
        yield client


async def _tell(client: Client, on_status: Callable[[control.Status], None] | None) -> None:
    status = client.status
    while on_status is not None:
        status = await client.status_after(status)
        on_status(status)
