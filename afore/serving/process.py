"""One role process: its fabric endpoint, its event loop, its roles, its end.

The same ``run_role`` serves a role in a process of its own and in a process with others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path

import uvloop

from afore.core.clock import WallClock, deadline
from afore.core.config import RunConfig
from afore.core.errors import AforeError, ConfigError
from afore.core.topology import DOOR, member_name
from afore.serving.roles import RealWorld, run_role
from afore.serving.spec import HUB_ADDRESS, ProcessSpec
from afore.transport.shm import ShmConfig, ShmFabric
from afore.workers.crew import crew

log = logging.getLogger(__name__)

EXIT_FAILED = 1
LOOK_AGAIN_US = 50_000.0
"""How soon a role looks again for a cluster that is not there yet."""


def run_process(spec: ProcessSpec, *, lifeline: int | None) -> int:
    """Runs the roles until they end. Returns the exit status: 0 after an orderly stop, 1 after an error (logged).

    ``lifeline`` is a descriptor whose end of file means that the supervisor is gone.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(spec.name[:15])  # what ps, top and debuggers show
    logging.basicConfig(
        level=spec.log_level.upper(), format=f"%(asctime)s {spec.name} %(levelname)s %(message)s", force=True
    )
    try:
        uvloop.run(_run(spec, lifeline))
    except asyncio.CancelledError:
        return 0
    except AforeError as error:
        log.error("%s: %s", type(error).__name__, error)
        return EXIT_FAILED
    except Exception:
        log.exception("ended by a defect")
        return EXIT_FAILED
    return 0


async def _run(spec: ProcessSpec, lifeline: int | None) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, task.cancel)
    if lifeline is not None:
        loop.add_reader(lifeline, _lifeline_ended(loop, lifeline, task.cancel))
    clock = WallClock()
    async with crew() as group:
        for number, (role, rank) in enumerate(spec.roles):
            label = role if rank < 0 else member_name(role, rank)
            fabric = await _fabric(spec, label, create=number == 0 and spec.creates, clock=clock)
            group.create_task(
                run_role(
                    role,
                    rank,
                    fabric=fabric,
                    hub_address=HUB_ADDRESS,
                    clock=clock,
                    config=spec.config,
                    world=RealWorld(),
                ),
                name=role,
            )


async def _fabric(spec: ProcessSpec, label: str, *, create: bool, clock: WallClock) -> ShmFabric:
    """An endpoint in the cluster's directory, as soon as there is one: roles may start in any order."""
    if create:
        return ShmFabric.create(spec.cluster, label)
    async with deadline(
        spec.config.times.join_s * 1e6,
        peer=spec.cluster,
        operation="looking for the cluster",
        hint="start its role door, or the whole topology, on this machine",
    ):
        while True:
            try:
                return ShmFabric.open(spec.run_directory, label)
            except ConfigError:
                await clock.sleep_us(LOOK_AGAIN_US)


def run_by_hand(roles: tuple[str, ...], rank: int | None, *, cluster: str, config: RunConfig, log_level: str) -> int:
    """One process with these roles of a local cluster, started from a shell. Returns the exit status."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    spec = ProcessSpec(
        name="+".join(roles),
        cluster=cluster,
        roles=tuple((role, -1 if rank is None else rank) for role in roles),
        run_directory=str(ShmConfig(run_id=cluster, label="role").run_directory),
        log_level=log_level,
        config=config,
        creates=DOOR in roles,
    )
    return run_process(spec, lifeline=None)


def _lifeline_ended(loop: asyncio.AbstractEventLoop, lifeline: int, stop: Callable[[], object]) -> Callable[[], None]:
    def ended() -> None:
        loop.remove_reader(lifeline)
        stop()

    return ended
