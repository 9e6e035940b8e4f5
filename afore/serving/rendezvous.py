"""Where roles that are started by hand find each other: a ``torch.distributed.TCPStore`` that the door hosts.

What torch's store does that one must know, each of it seen:

- given only a port, its server listens on every interface: it is handed a listening socket of ours instead;
- its client waits without end for a port that accepts and says nothing, whatever its timeout: it is made in a thread, and given
  up after ``ANSWER_S``;
- its client retries a refused connection with pauses of its own: a plain connection is tried first;
- keys never expire: cells of an earlier run are told apart by the run's nonce, holders that died by their process.

Nothing that is secret goes in (``afore.serving.identity``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from torch import distributed

from afore.core.clock import Clock
from afore.core.errors import ConfigError, DeadlineExceeded, PeerLost
from afore.core.topology import RENDEZVOUS_PORT, Topology, is_loopback, split_address
from afore.serving.identity import ClusterIdentity
from afore.serving.ranks import Claim, Claiming, releasing

LOOPBACK = "127.0.0.1"
DEFAULT_CLUSTER = "default"
IDENTITY = "afore/identity"
ANSWER_S = 10.0
"""A store answers within milliseconds; what says nothing for so long is none."""
LOOK_AGAIN_US = 100_000.0
_NAMED_PORTS = range(20_000, 29_000)
T = TypeVar("T")
TCPStore: TypeAlias = distributed.TCPStore  # type: ignore[attr-defined,name-defined]  # torch's stubs do not re-export it


def place(topology: Topology, cluster: str | None) -> tuple[str, int, str | None]:
    """(host, port, cluster's name) of a rendezvous. Without an address each name has a port of its own; without a name, each port.

    No name is returned where none is meant: an address alone joins whatever cluster is there.
    """
    if topology.rendezvous is not None:
        host, port = split_address(topology.rendezvous)
        return host, port, cluster
    if cluster is None or cluster == DEFAULT_CLUSTER:
        return LOOPBACK, RENDEZVOUS_PORT, cluster
    return LOOPBACK, _NAMED_PORTS[zlib.crc32(cluster.encode()) % len(_NAMED_PORTS)], cluster


def name_at(port: int) -> str:
    """The name of a cluster whose door was given none."""
    return DEFAULT_CLUSTER if port == RENDEZVOUS_PORT else f"at_{port}"


def shown(host: str, port: int) -> str:
    """``127.0.0.1:29513``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Store:
    """A client's view of the rendezvous: each call is one short exchange in a thread, with a deadline."""

    def __init__(self, store: TCPStore, where: str) -> None:
        self._store = store
        self.where = where

    @classmethod
    async def connect(cls, host: str, port: int) -> Store:
        """Raises ``PeerLost`` where nobody listens, ``ConfigError`` for something that is no rendezvous."""
        where = shown(host, port)
        try:
            async with asyncio.timeout(ANSWER_S):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        except ConnectionRefusedError as error:
            raise PeerLost(where, "nobody listens there", "start the role door of that cluster") from error
        except (OSError, TimeoutError, UnicodeError) as error:
            word = (error.strerror if isinstance(error, OSError) else None) or str(error) or "no answer"
            raise PeerLost(where, f"it cannot be reached ({word})", "check address, route and firewall") from error

        def make() -> TCPStore:
            return TCPStore(host, port, None, False, timedelta(seconds=ANSWER_S), wait_for_workers=False)

        return cls(await _in_thread(make, where), where)

    async def identity(self, secret: bytes | None) -> ClusterIdentity | None:
        """What cluster is here; none while it has not said so yet. Raises ``ConfigError``, ``PeerLost``."""

        def read() -> bytes | None:
            return self._store.get(IDENTITY) if self._store.check([IDENTITY]) else None

        raw = await _in_thread(read, self.where)
        return None if raw is None else ClusterIdentity.from_document(raw.decode(errors="replace"), self.where, secret)

    async def claim(self, role: str, nonce: str, machine: Claiming) -> Claim:
        """Carries a claim's steps out. Raises what it raises, ``PeerLost``."""
        try:
            step = next(machine)
            while True:
                step = machine.send(await self._compare_set(_cell(nonce, role, step.rank), step.expected, step.desired))
        except StopIteration as done:
            claim: Claim = done.value
            return claim

    async def release(self, role: str, nonce: str, claim: Claim, me: str) -> None:
        """Gives a rank back. Raises ``PeerLost``."""
        step = releasing(claim, me)
        await self._compare_set(_cell(nonce, role, step.rank), step.expected, step.desired)

    async def _compare_set(self, key: str, expected: str, desired: str) -> str:
        raw: bytes = await _in_thread(lambda: self._store.compare_set(key, expected, desired), self.where)
        return raw.decode(errors="replace")


class Host:
    """The door's side: the store, and its listening socket. ``close`` frees the port."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self.where = shown(host, port)
        # The store closes the descriptor it is given; with its end the port is free.
        self._store: TCPStore | None = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=ANSWER_S),
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )

    @classmethod
    async def listen(cls, host: str, port: int) -> Host:
        """Raises ``ConfigError`` when the address cannot be had, naming the cluster that has it."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return cls(socket.create_server((host, port), family=family, backlog=512))
        except (socket.gaierror, UnicodeError) as error:
            raise ConfigError(
                "topology.rendezvous", f"{host} is no address of this machine", "use 127.0.0.1"
            ) from error
        except OSError as error:
            who = await _who_is_at(host, port) if is_loopback(host) else ""
            reason = who or (os.strerror(error.errno) if error.errno else str(error))
            raise ConfigError(
                "topology.rendezvous",
                f"cannot listen at {shown(host, port)}: {reason}",
                "end that, or give --rendezvous HOST:PORT here and to every role",
            ) from None

    def publish(self, identity: ClusterIdentity, secret: bytes | None) -> None:
        """Says what cluster this is: from now on roles join."""
        assert self._store is not None
        self._store.set(IDENTITY, identity.to_document(secret))

    def close(self) -> None:
        """Idempotent."""
        self._store = None
        self._listener.close()


async def find(
    host: str, port: int, secret: bytes | None, clock: Clock, *, join_s: float, waiting: Callable[[str], None]
) -> tuple[Store, ClusterIdentity]:
    """Waits for the cluster at an address: roles may start before their door. Raises ``DeadlineExceeded``, ``ConfigError``."""
    where = shown(host, port)
    give_up_ns = clock.now_ns() + int(join_s * 1e9)
    waiting(f"waiting for the door at {where}")
    while True:
        try:
            store = await Store.connect(host, port)
            identity = await store.identity(secret)
            if identity is not None:
                return store, identity
        except PeerLost:
            pass
        if clock.now_ns() >= give_up_ns:
            raise DeadlineExceeded(
                where,
                f"no door came there in {join_s:g} s",
                "start one (--role door) with the same --rendezvous, --cluster or topology file",
            )
        await clock.sleep_us(LOOK_AGAIN_US)


async def _who_is_at(host: str, port: int) -> str:
    """Who has an address that we wanted, in words."""
    try:
        store = await Store.connect(host, port)
        identity = await store.identity(None)
    except PeerLost:
        return ""
    except ConfigError:
        return "something that is no AFORE rendezvous has that port"
    if identity is None:
        return "a cluster that is starting has that port"
    return f"the cluster {identity.cluster!r} (door's pid {identity.door_pid}) has that port"


async def _in_thread(call: Callable[[], T], where: str) -> T:
    """``call`` in a daemon thread, left behind where it does not come back: torch's client may never."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    try:
        async with asyncio.timeout(ANSWER_S):
            answer: T = await future
            return answer
    except TimeoutError:
        raise ConfigError(
            "rendezvous",
            f"something listens at {where} and does not answer as a rendezvous does",
            "give another --rendezvous, or end what has that port",
        ) from None
    except distributed.DistError as error:
        raise PeerLost(where, "the rendezvous went away", "is its door still there?") from error


def _cell(nonce: str, role: str, rank: int) -> str:
    return f"afore/{nonce}/{role}/{rank}"
