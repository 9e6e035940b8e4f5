"""One role process of a supervised cluster: its fabric endpoint, its event loop, its roles, its end.

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

from afore.core.clock import WallClock
from afore.core.errors import AforeError
from afore.core.topology import member_name
from afore.serving.endpoints import member_endpoint
from afore.serving.roles import RealWorld, run_role
from afore.serving.spec import HUB_ADDRESS, ProcessSpec
from afore.transport.crew import crew
from afore.transport.shm import ShmFabric

log = logging.getLogger(__name__)

EXIT_FAILED = 1


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
        for role, rank in spec.roles:
            near = ShmFabric.open(spec.run_directory, member_name(role, rank), idle=spec.config.idle)
            fabric = member_endpoint(spec.config, role, rank, near)
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


def _lifeline_ended(loop: asyncio.AbstractEventLoop, lifeline: int, stop: Callable[[], object]) -> Callable[[], None]:
    def ended() -> None:
        loop.remove_reader(lifeline)
        stop()

    return ended
