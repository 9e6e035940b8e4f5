"""The first steps to any endpoint: its name, the way there, the connection, the hello, the proof; and how a step fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

from afore.core.clock import deadline
from afore.core.control import WIRE_VERSION
from afore.core.errors import (
    AforeError,
    AuthenticationFailed,
    DeadlineExceeded,
    PeerLost,
    TransportError,
    WireError,
)
from afore.core.link_options import TcpOptions
from afore.core.topology import split_address
from afore.tools.doctor_check import Check
from afore.tools.doctor_meeting import STEP_US, problem_and_mend
from afore.transport.api import Lane
from afore.transport.handshake import Identity, Purpose, introduce
from afore.transport.tcp_config import LOOPBACK_SECRET
from afore.transport.tcp_sockets import connect_tcp


class Ended(Exception):
    """A step failed: its check is the last one."""


class Steps:
    """The checks so far, in order."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def ok(self, name: str, found: str) -> None:
        """The step went well."""
        self.checks.append(Check(name, "ok", found))

    def fail(self, name: str, found: str, mend: str) -> Ended:
        """The step did not; the result is to be raised."""
        self.checks.append(Check(name, "fail", found, mend or "see the message"))
        return Ended(name)

    @contextlib.contextmanager
    def step(self, name: str, mend: str = "") -> Iterator[None]:
        """Errors of the block are the failure of step ``name``; ``mend`` replaces theirs."""
        try:
            yield
        except AforeError as error:
            problem, own = problem_and_mend(error)
            raise self.fail(name, problem, mend or own) from error


async def find_name(steps: Steps, host: str, port: int) -> str:
    """The address of ``host``, as a number."""
    try:
        async with deadline(STEP_US, peer=host, operation="looking up the name"):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        problem = f"{host} cannot be resolved: {error.strerror or error}"
        raise steps.fail(
            "name", problem, "check the name, /etc/hosts and the name server, or give the number"
        ) from None
    numbers = list(dict.fromkeys(str(target[0]) for _, _, _, _, target in found))
    steps.ok("name", f"{host} is {', '.join(numbers)}" if numbers != [host] else f"{host} is a number")
    return numbers[0]


def find_route(steps: Steps, address: str, *, name: str = "route") -> str:
    """The address of this machine from which that one is reached; nothing is sent to ask."""
    host, port = split_address(address)
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            own = str(probe.getsockname()[0])
    except OSError as error:
        problem = f"no way leads from this machine to {host}: {error.strerror or error}"
        raise steps.fail(name, problem, f"see `ip route get {host}`") from None
    steps.ok(name, f"from {own}{_interface(own)}")
    return own


def _interface(own: str) -> str:
    """``, eth0 with MTU 1500``."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            status = psutil.net_if_stats().get(name)
            return f", {name}" + (f" with MTU {status.mtu}" if status else "")
    return ""


async def try_connect(steps: Steps, address: str, *, name: str = "connect", mend: str = "") -> socket.socket:
    """A connected socket, which the caller closes."""
    begin = time.perf_counter_ns()
    port = address.rpartition(":")[2]
    mend = mend or (
        f"start `python -m afore.tools.doctor --serve --listen {address}` there, and let port {port} through its firewall"
    )
    try:
        async with deadline(STEP_US, peer=address, operation="connect"):
            sock = await connect_tcp(address, TcpOptions())
    except DeadlineExceeded as error:
        found = f"no answer within {STEP_US / 1e6:g} s: something drops the packets"
        raise steps.fail(name, found, mend) from error
    except AforeError as error:
        raise steps.fail(name, problem_and_mend(error)[0], mend) from error
    steps.ok(name, f"{address} in {(time.perf_counter_ns() - begin) / 1e6:.2f} ms")
    return sock


async def try_hello(
    steps: Steps, sock: socket.socket, me: Identity, address: str, *, timeout_us: float = STEP_US
) -> None:
    """The handshake alone. Raises ``WireError`` where something else listens, or nothing answers."""
    try:
        async with deadline(timeout_us, peer=address, operation="hello"):
            await introduce(sock, me, Purpose.CHANNEL, Lane.CONTROL, peer=address)
    except WireError:
        raise
    except AuthenticationFailed as error:
        steps.ok("hello", f"it speaks wire version {WIRE_VERSION}, as this side does")
        problem, mend = problem_and_mend(error)
        raise steps.fail("proof", problem, mend + " (--secret-file)") from error
    except PeerLost as error:
        if "ended the connection" in error.operation:
            # What a store does with words that it does not know.
            raise WireError(address, error.operation) from error
        raise steps.fail("hello", *problem_and_mend(error)) from error
    except DeadlineExceeded as error:
        # A store waits for the rest of what it takes for a long question.
        raise WireError(address, "it accepts connections and says nothing", "check what listens there") from error
    except TransportError as error:
        raise steps.fail("hello", *problem_and_mend(error)) from error
    steps.ok("hello", f"it speaks wire version {WIRE_VERSION}, as this side does")
    steps.ok("proof", "both sides know the secret" if me.secret != LOOPBACK_SECRET else "none is needed on loopback")
