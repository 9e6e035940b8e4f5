"""The endpoints of one process: shared memory alone, or routed where the cluster is on several nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import zlib
from pathlib import Path
from typing import Any

from afore.core.config import RunConfig
from afore.core.errors import ClusterLost, ConfigError
from afore.core.topology import DOOR, Topology, is_loopback, member_name
from afore.serving.identity import ClusterIdentity
from afore.serving.spec import HUB_ADDRESS
from afore.transport.api import Fabric
from afore.transport.routed import FarFabric, RoutedFabric
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.tcp import TcpConfig, TcpFabric

BOOT_ID = "/proc/sys/kernel/random/boot_id"
LOOPBACK = "127.0.0.1"
RUN_ID_LENGTH = 40


def host_id() -> str:
    """This machine, as long as it runs."""
    return Path(BOOT_ID).read_text(encoding="ascii").strip()


def own_host(topology: Topology, rendezvous: tuple[str, int]) -> str:
    """The address at which other nodes reach this process. Raises ``ConfigError`` where there is none to be found.

    That from which the rendezvous is reached: routing tables know best, and nothing is sent to ask them.
    """
    if topology.listen is not None:
        return topology.listen
    host, port = rendezvous
    with contextlib.suppress(OSError):
        family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            own: str = probe.getsockname()[0]
            return own
    raise ConfigError("topology.listen", f"no way leads from this machine to {host}", "give its own address here")


def run_id_on(cluster: str, node: str, home: str) -> str:
    """Names the run's files on ``node``. Nodes of one machine (network namespaces, a rehearsal) must not meet in them."""
    if node == home:
        return cluster
    return f"{cluster[: RUN_ID_LENGTH - 9]}.{zlib.crc32(node.encode()):08x}"


def open_endpoint(near: ShmFabric, topology: Topology, node: str | None, *, host: str, secret: bytes | None) -> Fabric:
    """An endpoint over ``near``, which it owns: that alone where ``node`` is None, else reached from other nodes at ``host`` too.

    Raises ``ConfigError`` (no secret beyond loopback), ``HostError`` (nothing free to listen at).
    """
    if node is None:
        return near
    shown = f"[{host}]" if ":" in host else host
    far: dict[str, FarFabric] = {}
    if topology.fabric in ("auto", "tcp"):
        far["tcp"] = TcpFabric(TcpConfig(listen=f"{shown}:0", secret=secret))
    return RoutedFabric(node, near, far)


def member_endpoint(config: RunConfig, role: str, rank: int, near: ShmFabric) -> Fabric:
    """The endpoint of a member whose cluster runs on this machine alone, on the node that the topology gives it."""
    node = config.topology.node_of(role, rank)
    return open_endpoint(near, config.topology, node, host=LOOPBACK, secret=near.secret)


def hub_address(fabric: Fabric) -> str:
    """Where the hub is dialled, as the door says it to others."""
    return fabric.reachable_at(HUB_ADDRESS) if isinstance(fabric, RoutedFabric) else HUB_ADDRESS


class Whereabouts:
    """Where a process of roles by hand is, and what its endpoints are made of."""

    def __init__(self, topology: Topology, rendezvous: tuple[str, int], secret: bytes | None) -> None:
        self._topology = topology
        self._rendezvous = rendezvous
        self._secret = secret

    def node(self, role: str, rank: int) -> str:
        """The node of a member of this process."""
        return self._topology.node or self._topology.node_of(role, rank) or host_id()

    @property
    def door_node(self) -> str | None:
        """The door's node; None where the cluster is on this machine alone."""
        return self.node(DOOR, 0) if self._topology.spread else None

    def check(self) -> None:
        """Raises ``ConfigError`` for a cluster on several nodes that could not keep strangers out."""
        if self._topology.spread:
            self._own()

    def _own(self) -> str:
        """The address at which other nodes reach this process. Raises ``ConfigError``."""
        host = own_host(self._topology, self._rendezvous)
        if self._secret is None and not is_loopback(host):
            raise ConfigError(
                "topology.secret_file",
                f"other nodes come in at {host}, and nothing tells them from strangers",
                "give every process the same file: python -c 'import secrets; print(secrets.token_hex(32))' > FILE",
            )
        return host

    def open_door(self, cluster: str) -> Fabric:
        """The door's endpoint, the first of its cluster. Raises ``ConfigError`` for a name that is taken, ``HostError``."""
        try:
            near = ShmFabric.create(cluster, DOOR)
        except ConfigError as error:
            raise ConfigError("cluster", error.problem, "give another --cluster, or end that one") from error
        return self._open(near, self.door_node, self._topology.fabric)

    def join(self, identity: ClusterIdentity, member: tuple[str, int] | None, *, beside: str = "") -> Fabric:
        """An endpoint in a cluster; None is one that only watches, beside a member of role ``beside``.

        Raises ``ClusterLost`` where it has ended meanwhile, ``ConfigError``, ``HostError``.
        """
        label = "watch" if member is None else member_name(*member)
        if not identity.node:
            return _neighbour(identity.cluster, label)
        node = self.node(*(member or (beside, 0)))
        if node == identity.node:
            near = _neighbour(identity.cluster, label)
        else:
            near = ShmFabric(ShmConfig(run_id=run_id_on(identity.cluster, node, identity.node), label=label))
        return self._open(near, node, identity.config.get("topology.fabric", self._topology.fabric))

    def _open(self, near: ShmFabric, node: str | None, fabric: Any) -> Fabric:
        if node is None:
            return near
        return open_endpoint(
            near, dataclasses.replace(self._topology, fabric=fabric), node, host=self._own(), secret=self._secret
        )


def _neighbour(cluster: str, label: str) -> ShmFabric:
    """An endpoint in the cluster's directory on its door's node."""
    try:
        return ShmFabric.open(ShmConfig(run_id=cluster).run_directory, label)
    except ConfigError as error:
        raise ClusterLost(cluster, "it ended while this process joined it", "start its door again") from error
