"""``shm``: processes of one host that write into each other's POSIX shared memory.

A write is a copy into the mapped region; a notification is an entry of the link's ring and a tick of the receiver's eventfd,
which only says "look": one look takes everything from every link. Nothing spins, nothing threads. What killed processes leave
behind is removed by ``sweep_stale``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

from afore.core.clock import WallClock
from afore.core.errors import AccessRefused, ConfigError, WireError
from afore.core.link_options import IdleOptions
from afore.transport.api import ChannelHandler, Lane, RegionKey
from afore.transport.buffers import require_nbytes
from afore.transport.channel import StreamChannel
from afore.transport.endpoint import StreamEndpoint
from afore.transport.handshake import Hello, Identity, admit
from afore.transport.host import host_error
from afore.transport.idle import make_idle
from afore.transport.queues import Inbox
from afore.transport.shm_config import ShmConfig
from afore.transport.shm_link import InboundLink, MappingCache, ShmLink
from afore.transport.shm_region import ShmMapping, ShmRegion
from afore.transport.shm_ring import create_ring_fd
from afore.transport.shm_segments import Mapping, Segment, clean_label
from afore.transport.shm_sweep import RunDirectory, sweep_stale
from afore.transport.sockets import close_all

__all__ = ["ShmConfig", "ShmFabric", "ShmMapping", "ShmRegion", "sweep_stale"]

_SLOTS = struct.Struct("<I")
_LINK_FDS = 3


class ShmFabric:
    """One endpoint of the shm fabric; a ``Fabric``. Used in the event loop that runs when it is made."""

    def __init__(self, config: ShmConfig) -> None:
        """Listens at an address of its own. Raises ``HostError`` (directory, descriptors), ``ConfigError`` (a secret too short)."""
        self._config = config
        self._idle = make_idle(config.idle, WallClock())
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._regions: dict[int, ShmRegion] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._mappings: dict[ShmMapping, None] = {}
        self._cache = MappingCache(config.root)
        self._links: dict[ShmLink, None] = {}
        self._inbound: tuple[InboundLink, ...] = ()
        self._door = StreamEndpoint(timeout_us=config.handshake_timeout_us, message_limit=config.message_limit)
        self._doorbell_fd = _new_eventfd()
        try:
            self._directory = self._settle()
        except BaseException:
            os.close(self._doorbell_fd)
            raise
        self._loop.add_reader(self._doorbell_fd, self._look)

    @classmethod
    def create(cls, run_id: str, label: str, *, idle: IdleOptions | None = None) -> ShmFabric:
        """The first endpoint of a new run, after a sweep of what dead runs left. Raises ``ConfigError`` where ``run_id`` lives."""
        config = ShmConfig(run_id=run_id, label=label, idle=idle or IdleOptions())
        sweep_stale(config.root)
        if os.path.lexists(config.run_directory):
            raise ConfigError(
                "run_id", f"a run named {run_id!r} is alive ({config.run_directory})", "choose another name"
            )
        return cls(config)

    @classmethod
    def open(cls, run_directory: str | os.PathLike[str], label: str, *, idle: IdleOptions | None = None) -> ShmFabric:
        """A further endpoint of a run. Raises ``ConfigError`` where there is none."""
        path = os.fspath(run_directory)
        if not os.path.isdir(path):
            raise ConfigError(
                "run_directory", f"{path} is no run's directory", "start the run first, or check the name"
            )
        config = ShmConfig.joining(path, label)
        return cls(config if idle is None else replace(config, idle=idle))

    def _settle(self) -> RunDirectory:
        """Joins the run's directory and listens at the first address that is free there."""
        config = self._config
        for number in itertools.count():
            directory = RunDirectory(config.run_directory)
            address = f"{config.run_directory}/{clean_label(config.label)}-{os.getpid()}-{number}"
            try:
                if not os.path.lexists(address):
                    secret = config.secret or directory.secret()
                    me = Identity(address=address, secret=secret, version=config.version)
                    self._door.open(me, self._welcome_link)
                    return directory
            except FileNotFoundError:
                pass  # whoever left last has just removed the directory
            except BaseException:
                directory.close(remove=config.directory is None)
                raise
            directory.close(remove=False)
        raise AssertionError("unreachable: there is always another number")

    @property
    def name(self) -> str:
        return "shm"

    @property
    def address(self) -> str:
        return self._door.address

    @property
    def run_directory(self) -> Path:
        """Where the run's sockets live; with it, other processes join by ``open``."""
        return Path(self._directory.path)

    @property
    def secret(self) -> bytes:
        """What the processes of the run prove to each other."""
        return self._door.identity.secret

    @property
    def maps_memory(self) -> bool:
        return True

    @property
    def refusals(self) -> Counter[str]:
        """Connections that were refused, by the error's name."""
        return self._door.refusals

    # Memory

    def node_of(self, address: str) -> str:
        return ""

    def register(self, nbytes: int, *, label: str) -> ShmRegion:
        self._door.require_open()
        require_nbytes(nbytes, label)
        number = next(self._numbers)
        assert number < 1 << 32
        segment = Segment(
            self._config.root, self._config.run_id, label=label, region=number, nbytes=nbytes, address=self.address
        )
        key = RegionKey("shm", self.address, number, nbytes, segment.name)
        region = ShmRegion(segment, key, label, look=self._look, idle=self._idle, forget=self._forget_region)
        self._regions[number] = region
        self._inboxes[number] = region.inbox
        return region

    def _forget_region(self, region: ShmRegion) -> None:
        self._regions.pop(region.key.region, None)
        self._inboxes.pop(region.key.region, None)

    def resolve(self, key: RegionKey) -> RegionKey:
        return key

    def map(self, key: RegionKey, *, writable: bool = False) -> ShmMapping:
        self._door.require_open()
        if key.fabric != "shm":
            raise AccessRefused(key.address, f"cannot map memory of fabric {key.fabric}", "write into it over a link")
        mapping = ShmMapping(Mapping(self._config.root, key, writable=writable), forget=self._forget_mapping)
        self._mappings[mapping] = None
        return mapping

    def _forget_mapping(self, mapping: ShmMapping) -> None:
        self._mappings.pop(mapping, None)

    # Notifications

    def _look(self) -> None:
        """Takes what every link has published, and wakes the readers of what came; rung by writers, or asked for."""
        try:  # noqa: SIM105 (a context manager would cost more than the system call)
            os.eventfd_read(self._doorbell_fd)
        except BlockingIOError:
            pass  # nobody rang, or somebody else who holds the doorbell has read it
        for link in self._inbound:
            try:
                link.deliver()
            except WireError:
                self.refusals["WireError"] += 1
                link.close()

    # Links

    async def connect(self, address: str, lane: Lane, *, timeout_us: float) -> ShmLink:
        sock, reply, fds = await self._door.meet(
            address, lane, timeout_us=timeout_us, reply_bytes=_SLOTS.size, max_fds=_LINK_FDS
        )
        try:
            self._door.require_open()
            if len(fds) != _LINK_FDS:
                raise WireError(address, f"it sent {len(fds)} descriptors for a link")
            link = ShmLink(
                sock,
                (fds[0], fds[1], fds[2]),
                _SLOTS.unpack(reply)[0],
                peer=address,
                lane=lane,
                mappings=self._cache,
                forget=self._forget_link,
            )
        except BaseException:
            sock.close()
            close_all(fds)
            raise
        self._links[link] = None
        return link

    def _forget_link(self, link: ShmLink) -> None:
        self._links.pop(link, None)

    def _welcome_link(self, sock: socket.socket, hello: Hello) -> None:
        slots = self._config.ring_slots
        fds: list[int] = []
        try:
            # One by one: the second may find the table of descriptors full.
            fds.append(create_ring_fd(slots))
            fds.append(_new_eventfd())
            # Known to the doorbell before the writer can ring it.
            link = InboundLink(
                sock, fds[0], fds[1], slots, peer=hello.address, inboxes=self._inboxes, forget=self._forget_inbound
            )
        except BaseException:
            close_all(fds)
            sock.close()
            raise
        self._inbound = (*self._inbound, link)
        try:
            admit(sock, self._door.identity, hello, reply=_SLOTS.pack(slots), fds=(fds[0], self._doorbell_fd, fds[1]))
        except BaseException:
            link.close()
            raise
        finally:
            os.close(fds[0])

    def _forget_inbound(self, link: InboundLink) -> None:
        self._inbound = tuple(other for other in self._inbound if other is not link)

    # Channels

    async def listen(self, address: str, handler: ChannelHandler) -> None:
        """As ``Fabric.listen``; ``address`` is this endpoint's own, a path, or a name in the run's directory."""
        self._door.listen(self._resolve(address), handler)

    async def dial(self, address: str, *, timeout_us: float) -> StreamChannel:
        return await self._door.dial(self._resolve(address), timeout_us=timeout_us, peer=address)

    def _resolve(self, address: str) -> str:
        return address if "/" in address else f"{self._directory.path}/{address}"

    # The end

    async def close(self) -> None:
        if self._door.shut():
            self._loop.remove_reader(self._doorbell_fd)
            for region in list(self._regions.values()):
                region.close()
            for mapping in list(self._mappings):
                mapping.close()
            for link in list(self._links):
                link.shut()
            for inbound in self._inbound:
                inbound.close()
            os.close(self._doorbell_fd)
        try:
            await self._door.close()
        finally:
            if self._directory.close(remove=self._config.directory is None):
                # The last one out: what killed members of the run left goes too.
                sweep_stale(self._config.root, self._config.run_id)


def _new_eventfd() -> int:
    try:
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    except OSError as error:
        raise host_error(error, "eventfd", "cannot make a doorbell", "see why the kernel refuses") from error
