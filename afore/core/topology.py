"""How many workers of each role, how many microbatches, how many redundant slots: the shape of a cluster."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from afore.core.errors import ConfigError
from afore.core.target import LAYER_BITS, MICROBATCH_BITS

DOOR = "door"
PREFILL = "prefill"
ATTENTION = "attention"
FFN = "ffn"
SCHEDULER = "scheduler"
ROLES = (DOOR, SCHEDULER, FFN, ATTENTION, PREFILL)
"""Every role, in the order in which a supervisor starts them."""

MAX_LAYERS = 1 << LAYER_BITS
MAX_WORKERS = 1024
MAX_SLOTS = 1 << 15
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")
RENDEZVOUS_PORT = 29513
"""Where roles that are started by hand find each other, unless they are told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The shape of a cluster. Any A ≥ 1, N ≥ 1, M ≥ 1, R ≥ 0; N need not divide E, and may exceed it."""

    attention: int = 2
    """A: attention workers; requests are spread over them (data parallel)."""
    ffn: int = 4
    """N: FFN workers; experts are spread over them."""
    prefill: int = 1
    """Prefill workers; each holds the whole model."""
    microbatches: int = 2
    """M: microbatches in flight."""
    redundant_slots: int = 8
    """R: redundant expert slots of each FFN worker and MoE layer."""
    redundant_slots_per_worker: tuple[int, ...] | None = None
    """R for each FFN worker where they differ; overrides ``redundant_slots``."""
    fabric: Literal["auto", "shm", "tcp", "verbs", "loopback"] = "auto"
    """How bytes move: inside a node shm; between nodes the one that is named, or with auto verbs where both sides can, else tcp;
    loopback in one process."""
    nodes: dict[str, str] | None = None
    """Who is where, as {a: "door,attention,prefill", b: "scheduler,ffn"}; nodes share no memory. None: one node."""
    node: str | None = None
    """The node of this process, where roles are started by hand; none: what topology.nodes says, else this machine."""
    listen: str | None = None
    """HOST at which other nodes reach this process; none: the one from which it reaches the rendezvous."""
    rendezvous: str | None = None
    """HOST:PORT where roles started by hand find each other; none: a local port for each --cluster name."""
    rendezvous_remote: bool = False
    """Listen or join beyond this machine; takes a secret too: secret_file, or AFORE_SECRET in the environment."""
    secret_file: str | None = None
    """File with the cluster's shared secret, the same on every machine: what is found at the rendezvous must be proved with it."""

    def __post_init__(self) -> None:
        self._check_rendezvous()
        for field, low, high in (
            ("attention", 1, MAX_WORKERS),
            ("ffn", 1, MAX_WORKERS),
            ("prefill", 1, MAX_WORKERS),
            ("microbatches", 1, 1 << MICROBATCH_BITS),
            ("redundant_slots", 0, MAX_SLOTS),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"topology.{field}", f"{value!r} is not a whole number from {low} to {high}")
        self._check_listen()
        self._check_nodes()
        per_worker = self.redundant_slots_per_worker
        if per_worker is not None:
            if len(per_worker) != self.ffn:
                raise ConfigError(
                    "topology.redundant_slots_per_worker",
                    f"{len(per_worker)} values for {self.ffn} FFN workers",
                    "give one value for each FFN worker, or use redundant_slots",
                )
            if any(isinstance(r, bool) or not isinstance(r, int) or not 0 <= r <= MAX_SLOTS for r in per_worker):
                raise ConfigError(
                    "topology.redundant_slots_per_worker",
                    f"one value is not a whole number from 0 to {MAX_SLOTS}",
                )

    def _check_rendezvous(self) -> None:
        if self.rendezvous is None:
            return
        host, _ = split_address(self.rendezvous)
        if not (is_loopback(host) or self.rendezvous_remote):
            raise ConfigError(
                "topology.rendezvous",
                f"{host} lies beyond this machine",
                "use 127.0.0.1, or say so with topology.rendezvous_remote and give the secret (topology.secret_file)",
            )

    def _check_listen(self) -> None:
        host = self.listen
        if host is None:
            return
        address = _numeric(host)
        if address is None and not HOST_NAME.fullmatch(host):
            raise ConfigError("topology.listen", f"{host!r} is no host", "give an address or a name, without a port")
        if address is not None and (address.is_unspecified or address.is_multicast):
            raise ConfigError("topology.listen", f"others cannot connect to {host}", "give an address of this machine")

    def _check_nodes(self) -> None:
        nodes = {} if self.nodes is None else self.nodes
        if not isinstance(nodes, dict) or not all(isinstance(names, str) for names in nodes.values()):
            raise ConfigError("topology.nodes", f"{nodes!r} is no map", 'give {NODE: "ROLE,ROLE", …}')
        for name in (*nodes, *(() if self.node is None else (self.node,))):
            if not isinstance(name, str) or not NODE_NAME.fullmatch(name):
                raise ConfigError(
                    "topology.node",
                    f"{name!r} is no name",
                    "give 1 to 64 letters, digits, '.', '_' or '-'; in quotes, where YAML takes it for something else",
                )
        if self.spread and self.fabric in ("shm", "loopback"):
            raise ConfigError(
                "topology.fabric", f"{self.fabric} leads to no other node", "give auto, tcp or verbs, or leave it out"
            )
        if self.node is not None and self.nodes is not None and self.node not in self.nodes:
            raise ConfigError("topology.node", f"{self.node!r} is not in topology.nodes", f"of {', '.join(self.nodes)}")
        if self.nodes is None:
            return
        places: dict[str, str] = {}
        for node, names in self.nodes.items():
            for name in (part.strip() for part in names.split(",")):
                if name not in self._places():
                    raise ConfigError(
                        f"topology.nodes.{node}", f"{name!r} is no member", "give roles (ffn) or members (ffn-1)"
                    )
                if name in places:
                    raise ConfigError("topology.nodes", f"{name} is on {places[name]} and on {node}", "give it once")
                places[name] = node
        for role, rank in self.members():
            if not {role, member_name(role, rank)} & places.keys():
                raise ConfigError("topology.nodes", f"{member_name(role, rank)} is nowhere", "name its role or itself")

    def _places(self) -> set[str]:
        """What ``nodes`` may name."""
        return {*ROLES, *(member_name(role, rank) for role, rank in self.members())}

    def node_of(self, role: str, rank: int) -> str | None:
        """The node on which ``nodes`` has a member; None where it says nothing."""
        for wanted in (member_name(role, rank), role):
            for node, names in (self.nodes or {}).items():
                if wanted in [part.strip() for part in names.split(",")]:
                    return node
        return None

    @property
    def spread(self) -> bool:
        """Whether members may be on several nodes."""
        return self.nodes is not None or self.node is not None or self.rendezvous_remote

    @property
    def slots_N(self) -> tuple[int, ...]:
        """R of every FFN worker."""
        return self.redundant_slots_per_worker or (self.redundant_slots,) * self.ffn

    def count(self, role: str) -> int:
        """How many processes of ``role`` the cluster has."""
        return {DOOR: 1, SCHEDULER: 1, FFN: self.ffn, ATTENTION: self.attention, PREFILL: self.prefill}[role]

    def members(self) -> tuple[tuple[str, int], ...]:
        """Every (role, rank), in start order."""
        return tuple((role, rank) for role in ROLES for rank in range(self.count(role)))

    def describe(self) -> str:
        """One line for tables."""
        slots = "/".join(map(str, self.slots_N)) if self.redundant_slots_per_worker else str(self.redundant_slots)
        return f"A={self.attention} N={self.ffn} P={self.prefill} M={self.microbatches} R={slots}"


def member_name(role: str, rank: int) -> str:
    """``ffn-2``: the name of a member in messages, logs and errors."""
    return f"{role}-{rank}"


def split_address(
    address: str,
    *,
    field: str = "topology.rendezvous",
    example: str = f"127.0.0.1:{RENDEZVOUS_PORT}",
    any_port: bool = False,
) -> tuple[str, int]:
    """``127.0.0.1:29513`` or ``[::1]:29513`` as (host, port); ``any_port`` allows 0, for the kernel's choice.

    Raises ``ConfigError`` about ``field``, with the ``example``.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    digits = port.isascii() and port.isdecimal() and len(port) <= 5
    if not colon or not is_host(host) or not digits or not (0 if any_port else 1) <= int(port) <= 65535:
        shown = address if len(address) <= 80 else address[:77] + "…"
        raise ConfigError(field, f"{shown!r} is no HOST:PORT", f"such as {example}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The other way round: brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host(host: str) -> bool:
    """Whether ``host`` can be an address or a name at all: no empty or overlong part, nothing that no name has."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return bool(host) and "\0" not in host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name other than localhost counts as reachable from others."""
    address = _numeric(host)
    return host == "localhost" if address is None else address.is_loopback


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that ``host`` spells; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
