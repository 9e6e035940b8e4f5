"""The endpoints of one process: shared memory alone, or routed where the cluster is on several nodes."""

from __future__ import annotations

import contextlib
import logging
import socket
import zlib
from pathlib import Path

from afore.core.config import RunConfig
from afore.core.errors import ClusterLost, ConfigError, HostError
from afore.core.topology import DOOR, Topology, member_name
from afore.serving.identity import ClusterIdentity
from afore.serving.spec import HUB_ADDRESS
from afore.transport.api import Fabric
from afore.transport.routed import FarFabric, RoutedFabric
from afore.transport.shm import ShmConfig, ShmFabric
from afore.transport.tcp import TcpConfig, TcpFabric

log = logging.getLogger(__name__)

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


def far_fabrics(config: RunConfig, fabric: str, *, host: str, secret: bytes, label: str) -> dict[str, FarFabric]:
    """What other nodes reach this process by, the preferred of ``fabric`` first; each listens at ``host``.

    Raises ``ConfigError`` (no secret beyond loopback), ``HostError`` (nothing free to listen at; no RDMA where that is asked for).
    """
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    far: dict[str, FarFabric] = {}
    if fabric in ("auto", "verbs"):
        try:
            far["verbs"] = _verbs(config, listen, secret, label)
        except HostError as error:
            if fabric == "verbs":
                raise
            log.info("%s: no verbs between nodes: %s", label, error)
    if fabric in ("auto", "tcp"):
        far["tcp"] = TcpFabric(
            TcpConfig(listen=listen, secret=secret, label=label, idle=config.idle, tuning=config.tcp)
        )
    return far


def _verbs(config: RunConfig, listen: str, secret: bytes, label: str) -> FarFabric:
    # Only here: the bindings are an extra that most machines have no use for.
    from afore.transport.verbs.config import VerbsConfig
    from afore.transport.verbs.fabric import VerbsFabric

    options = config.verbs
    fabric = VerbsFabric(
        VerbsConfig(
            listen=listen,
            secret=secret,
            label=label,
            api=options.api,
            device=options.device,
            port=options.port,
            gid_index=options.gid_index,
            mtu_bytes=options.mtu_bytes,
            ack_timeout_us=options.ack_timeout_us,
            retry_count=options.retry_count,
            idle=config.idle,
            tuning=config.tcp,
        )
    )
    log.info("%s: verbs between nodes: %s", label, "; ".join(fabric.choice))
    return fabric


def member_endpoint(config: RunConfig, role: str, rank: int, near: ShmFabric) -> Fabric:
    """The endpoint of a member whose cluster runs on this machine alone, on the node that the topology gives it; owns ``near``."""
    node = config.topology.node_of(role, rank)
    if node is None:
        return near
    label = member_name(role, rank)
    far = far_fabrics(config, config.topology.fabric, host=LOOPBACK, secret=near.secret, label=label)
    return RoutedFabric(node, near, far)


def hub_address(fabric: Fabric) -> str:
    """Where the hub is dialled, as the door says it to others."""
    return fabric.reachable_at(HUB_ADDRESS) if isinstance(fabric, RoutedFabric) else HUB_ADDRESS


class Whereabouts:
    """Where a process of roles by hand is, and what its endpoints are made of."""

    def __init__(self, config: RunConfig, rendezvous: tuple[str, int], secret: bytes | None) -> None:
        self._topology = config.topology
        self._config = config
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

    def _own(self) -> tuple[str, bytes]:
        """The address at which other nodes reach this process, and the secret. Raises ``ConfigError``."""
        host = own_host(self._topology, self._rendezvous)
        if self._secret is None:
            raise ConfigError(
                "topology.secret_file",
                f"other nodes come in at {host}, and nothing tells them from strangers",
                "give every process one file: (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > FILE),"
                " or AFORE_SECRET",
            )
        return host, self._secret

    def open_door(self, cluster: str) -> Fabric:
        """The door's endpoint, the first of its cluster. Raises ``ConfigError`` for a name that is taken, ``HostError``."""
        try:
            near = ShmFabric.create(cluster, DOOR, idle=self._config.idle)
        except ConfigError as error:
            raise ConfigError("cluster", error.problem, "give another --cluster, or end that one") from error
        return self._open(near, self.door_node, self._topology.fabric, DOOR)

    def join(self, identity: ClusterIdentity, member: tuple[str, int] | None, *, beside: str = "") -> Fabric:
        """An endpoint in a cluster; None is one that only watches, beside a member of role ``beside``.

        Raises ``ClusterLost`` where it has ended meanwhile, ``ConfigError``, ``HostError``.
        """
        label = "watch" if member is None else member_name(*member)
        if not identity.node:
            return self._neighbour(identity.cluster, label)
        node = self.node(*(member or (beside, 0)))
        if node == identity.node:
            near = self._neighbour(identity.cluster, label)
        else:
            run_id = run_id_on(identity.cluster, node, identity.node)
            near = ShmFabric(ShmConfig(run_id=run_id, label=label, idle=self._config.idle))
        return self._open(near, node, identity.config.get("topology.fabric", self._topology.fabric), label)

    def _open(self, near: ShmFabric, node: str | None, fabric: str, label: str) -> Fabric:
        if node is None:
            return near
        host, secret = self._own()
        far = far_fabrics(self._config, fabric, host=host, secret=secret, label=label)
        return RoutedFabric(node, near, far)

    def _neighbour(self, cluster: str, label: str) -> ShmFabric:
        """An endpoint in the cluster's directory on its door's node."""
        try:
            return ShmFabric.open(ShmConfig(run_id=cluster).run_directory, label, idle=self._config.idle)
        except ConfigError as error:
            raise ClusterLost(cluster, "it ended while this process joined it", "start its door again") from error
