"""What the launcher hears of its fork server, also where that ends or fails: never nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys

import pytest

from afore.core.config import RunConfig
from afore.core.errors import ConfigError, HostError, RoleLost
from afore.serving import zygote
from afore.serving.spec import config_to_json
from afore.serving.start import _explained
from afore.serving.supervisor import ZYGOTE, Supervisor


async def with_server(program: str) -> Supervisor:
    """A supervisor whose fork server is another program; it finds its end of the connection at standard input."""
    import socket

    ours, theirs = socket.socketpair()
    supervisor = Supervisor(RunConfig().policy)
    supervisor._process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=theirs.fileno(), start_new_session=True
    )
    theirs.close()
    reader, supervisor._writer = await asyncio.open_connection(sock=ours)
    supervisor._reports = asyncio.create_task(supervisor._read(reader))
    return supervisor


class Stopping:
    """Ends what ``with_server`` began."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def aclose(self) -> None:
        await self._supervisor.stop(grace_s=0.0)


SAYS_READY = """import os; os.write(0, b'{"ready": 1}\\n'); os.read(0, 65536); """


async def _death_during_a_check() -> None:
    supervisor = await with_server(SAYS_READY + "os._exit(1)")
    async with contextlib.aclosing(Stopping(supervisor)):
        with pytest.raises(HostError, match="fork server: it ended while it looked at the configuration"):
            await supervisor.check(RunConfig(), timeout_s=600.0)


def test_the_death_of_the_fork_server_ends_a_check() -> None:
    asyncio.run(_death_during_a_check())


async def _killed() -> None:
    supervisor = await with_server(SAYS_READY + "os.kill(os.getpid(), 9)")
    async with contextlib.aclosing(Stopping(supervisor)):
        supervisor._expected.add("door-0")
        assert supervisor._writer is not None
        supervisor._writer.write(b"x")
        first = await supervisor.first_exit()
        assert (first.name, first.status) == (ZYGOTE, -signal.SIGKILL)
        await supervisor.all_exited()
        lost = await _explained(RoleLost("door-0", "its process ended"), supervisor)
        assert (lost.role, lost.reason) == (ZYGOTE, "killed by SIGKILL")


def test_a_killed_fork_server_is_named_and_not_a_role() -> None:
    asyncio.run(_killed())


def test_an_unexpected_failure_of_the_check_is_a_refusal_that_names_it() -> None:
    refused = zygote._check(config_to_json(RunConfig(trace="a\0b")))["refused"]
    assert refused[:2] == ["ConfigError", "trace"]
    broken = zygote._check({"no": "configuration"})["refused"]
    assert broken[:2] == ["ConfigError", "configuration"]
    assert "it cannot be checked: " in broken[2]
    assert "\n" not in str(ConfigError(*broken[1:]))
    json.dumps(broken)
