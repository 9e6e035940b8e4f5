"""Public peers of ``bench transport``, each as its users would write it: uvloop over a socket, ucxx's asyncio, iceoryx2's listener.

They move messages of one size; their packages are imported only where one of them is measured.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from afore.core.errors import HostError, PeerLost
from afore.tools.bench.transport_ends import FOLLOW, LEAD, TIMEOUT_US, End, Setting


@dataclass(frozen=True, slots=True)
class Peer:
    """A public peer."""

    package: str
    """What to import, and to install."""
    arrives: str
    """How a message comes to the code that waits for it."""
    streams: bool = True
    """Whether it keeps every message of a sender that does not wait for answers."""
    spins: bool = False
    """It takes a core while it waits: shown beside, and not compared with."""


PEERS: Final[Mapping[str, Peer]] = {
    "uvloop-unix": Peer("uvloop", "in a coroutine: a protocol over a Unix socket"),
    "uvloop-tcp": Peer("uvloop", "in a coroutine: a protocol over a TCP socket"),
    "ucxx": Peer("ucxx", "in a coroutine: progress by ucxx's own thread, its default"),
    "ucxx-blocking": Peer("ucxx", "in a coroutine: progress when UCX's descriptor is readable"),
    "ucxx-polling": Peer("ucxx", "in a coroutine that spins: UCX is polled without end", spins=True),
    "iceoryx2": Peer(
        "iceoryx2", "its listener blocks; its Python package shows no descriptor: no event loop", streams=False
    ),
}
"""All that can be measured beside."""
UCXX_PROGRESS: Final = {"ucxx": None, "ucxx-blocking": "blocking", "ucxx-polling": "polling"}
"""How ucxx makes progress; none: by its own default."""


def installed(peer: str) -> bool:
    """Whether the peer's package is there."""
    return importlib.util.find_spec(PEERS[peer].package) is not None


def peer_ends(setting: Setting, sides: tuple[str, ...]) -> dict[str, End]:
    """The sides that live in this process. Raises ``HostError`` where the package cannot be imported."""
    (side,) = sides
    if setting.way in ("uvloop-unix", "uvloop-tcp"):
        return {side: SocketEnd(setting, side)}
    package = PEERS[setting.way].package
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise HostError(package, f"it cannot be imported: {error}", "install it, or leave it out of --peers") from error
    if package == "ucxx":
        return {side: UcxxEnd(module, UCXX_PROGRESS[setting.way], side, setting.largest)}
    return {side: IceoryxEnd(module, setting, side)}


class SocketEnd(asyncio.Protocol):
    """A protocol over a stream socket; whole messages wake the coroutine."""

    def __init__(self, setting: Setting, side: str) -> None:
        self._path = f"{setting.folder}/{setting.run}" if setting.way == "uvloop-unix" else None
        self._listens = side == FOLLOW
        self._transport: asyncio.Transport | None = None
        self._server: asyncio.Server | None = None
        self._have = 0
        self._nbytes = 1
        self._data = b""
        self._waiter: asyncio.Future[None] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def open(self) -> dict[str, Any]:
        if not self._listens:
            return {}
        if self._path is not None:
            self._server = await self._loop.create_unix_server(lambda: self, self._path)
            return {}
        self._server = await self._loop.create_server(lambda: self, "127.0.0.1", 0)
        return {"port": self._server.sockets[0].getsockname()[1]}

    async def meet(self, other: Mapping[str, Any]) -> None:
        if self._listens:
            return
        if self._path is not None:
            await self._loop.create_unix_connection(lambda: self, self._path)
        else:
            await self._loop.create_connection(lambda: self, "127.0.0.1", other["port"])

    def prepare(self, nbytes: int) -> None:
        self._nbytes, self._data = nbytes, bytes(nbytes)

    async def send(self, number: int) -> None:
        if self._resumed is not None:
            await self._resumed
        assert self._transport is not None
        self._transport.write(self._data)

    async def receive(self) -> int:
        while self._have < self._nbytes:
            self._waiter = self._loop.create_future()
            await self._waiter
        count, self._have = divmod(self._have, self._nbytes)
        return count

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._have += len(data)
        if self._have >= self._nbytes and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self._waiter, self._resumed):
            if future is not None and not future.done():
                future.set_exception(PeerLost("the other side", "the connection ended"))

    def pause_writing(self) -> None:
        self._resumed = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None


class UcxxEnd:
    """An endpoint of ucxx's asyncio interface; tagged messages into a buffer of one's own."""

    def __init__(self, ucxx: Any, progress: str | None, side: str, largest: int) -> None:
        self._ucxx = ucxx
        self._progress = progress
        self._listens = side == FOLLOW
        self._listener: Any = None
        self._endpoint: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox = bytearray(max(1, largest))
        self._incoming: Any = memoryview(self._inbox)
        self._outgoing: Any = bytearray(1)

    async def open(self) -> dict[str, Any]:
        self._ucxx.init(progress_mode=self._progress)
        if not self._listens:
            return {}

        async def welcome(endpoint: Any) -> None:
            self._endpoint.set_result(endpoint)

        self._listener = self._ucxx.create_listener(welcome, 0)
        return {"port": self._listener.port}

    async def meet(self, other: Mapping[str, Any]) -> None:
        if not self._listens:
            self._endpoint.set_result(await self._ucxx.create_endpoint("127.0.0.1", other["port"]))
        async with asyncio.timeout(TIMEOUT_US / 1e6):
            self._peer = await self._endpoint

    def prepare(self, nbytes: int) -> None:
        self._outgoing = bytearray(nbytes)
        self._incoming = memoryview(self._inbox)[:nbytes]

    async def send(self, number: int) -> None:
        await self._peer.send(self._outgoing)

    async def receive(self) -> int:
        await self._peer.recv(self._incoming)
        return 1

    async def close(self) -> None:
        # A process of ucxx that closes in order waits for its peer, which may be gone: this one ends with its process.
        os._exit(0)


class IceoryxEnd:
    """A sample into shared memory, then a notification that ends the other side's blocking wait."""

    def __init__(self, iox: Any, setting: Setting, side: str) -> None:
        self._iox = iox
        self._name = setting.run
        self._largest = max(1, setting.largest)
        self._out, self._in = (LEAD, FOLLOW) if side == LEAD else (FOLLOW, LEAD)
        self._wait_at_most = iox.Duration.from_secs(int(TIMEOUT_US / 1e6))
        self._data = b""

    async def open(self) -> dict[str, Any]:
        iox = self._iox
        iox.set_log_level(iox.LogLevel.Error)
        self._node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        out, into = self._services(self._out), self._services(self._in)
        self._publisher = out[0].publisher_builder().initial_max_slice_len(self._largest).create()
        self._notifier = out[1].notifier_builder().create()
        self._subscriber = into[0].subscriber_builder().create()
        self._listener = into[1].listener_builder().create()
        self._kept = (out, into)
        return {}

    def _services(self, side: str) -> tuple[Any, Any]:
        iox = self._iox
        name = iox.ServiceName.new(f"{self._name}/{side}")
        samples = self._node.service_builder(name).publish_subscribe(iox.Slice[ctypes.c_uint8]).open_or_create()
        return samples, self._node.service_builder(name).event().open_or_create()

    async def meet(self, other: Mapping[str, Any]) -> None:
        self._publisher.update_connections()

    def prepare(self, nbytes: int) -> None:
        self._nbytes, self._data = nbytes, bytes(nbytes)

    async def send(self, number: int) -> None:
        sample = self._publisher.loan_slice_uninit(self._nbytes)
        ctypes.memmove(sample.payload_ptr, self._data, self._nbytes)
        sample.assume_init().send()
        self._notifier.notify()

    async def receive(self) -> int:
        while True:
            if not self._listener.timed_wait(self._wait_at_most):
                raise PeerLost("the other side", f"no notification in {TIMEOUT_US / 1e6:.0f} s")
            if self._subscriber.receive() is not None:
                return 1

    async def close(self) -> None:
        for port in (self._publisher, self._notifier, self._subscriber, self._listener):
            port.delete()
