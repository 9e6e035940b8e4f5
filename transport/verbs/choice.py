"""Which device, port, address and MTU to use, and why: a pure function over the table of devices.

Order of preference: an active port; RoCE v2 over IPv4, then over a global IPv6 address, then RoCE v1, a link-local address last (it
reaches only its own wire); the nearest to the NUMA node of the process; the first by name, port and index. Everything can be set in
the config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from afore.core.errors import ConfigError, HostError
from afore.core.record import record
from afore.transport.verbs.binding import MTU_BYTES, MTU_CODES
from afore.transport.verbs.table import DeviceEntry, GidEntry, PortEntry


@record
class PathChoice:
    """What a fabric uses, with a sentence for each part of it."""

    device: str
    port: int
    gid: GidEntry
    infiniband: bool
    reasons: tuple[str, ...]


@record
class _Candidate:
    device: DeviceEntry
    port: PortEntry
    gid: GidEntry


def gid_rank(gid: GidEntry, infiniband: bool) -> tuple[int, str]:
    """How good an address is (0 is best), and what it is in words."""
    if infiniband:
        return (3, "link-local") if gid.link_local and gid.index else (0, "InfiniBand's own")
    if gid.link_local:
        return (3, "link-local: it reaches only its own wire") if gid.kind == "RoCE v2" else (4, "RoCE v1, link-local")
    if gid.kind != "RoCE v2":
        return (2, "RoCE v1: no router passes it on")
    return (0, "RoCE v2 over IPv4, which any IP network carries") if gid.ipv4 else (1, "RoCE v2 over IPv6")


def choose_path(
    table: Sequence[DeviceEntry],
    *,
    device: str | None = None,
    port: int | None = None,
    gid_index: int | None = None,
    numa_node: int | None = None,
    distances: Mapping[int, int] | None = None,
) -> PathChoice:
    """The best path of ``table`` among those that the named ``device``, ``port`` and ``gid_index`` leave.

    ``numa_node``: where the process is; ``distances``: how far other nodes are from there, all equally far where none are given.
    Raises ``HostError`` (no device, no active port, no address) or ``ConfigError`` (what was named is not there).
    """
    if not table:
        raise HostError(
            "RDMA devices",
            "this machine has none",
            "load the driver of the adapter; for a trial without one, `rdma link add rxe0 type rxe netdev eth0`",
        )
    devices = [entry for entry in table if device in (None, entry.name)]
    if not devices:
        raise ConfigError("verbs.device", f"no device is named {device!r}", f"choose one of {_names(table)}")
    ports = [(entry, one) for entry in devices for one in entry.ports if port in (None, one.number)]
    if not ports:
        raise ConfigError("verbs.port", f"{_names(devices)} has no port {port}", "leave it out, or name another")
    active = [(entry, one) for entry, one in ports if one.state == "ACTIVE"]
    if not active:
        states = ", ".join(f"{entry.name} port {one.number} is {one.state or 'unknown'}" for entry, one in ports)
        raise HostError("RDMA ports", f"none is active: {states}", "bring the interface up, and see the cable")
    candidates = [
        _Candidate(entry, one, gid) for entry, one in active for gid in one.gids if gid_index in (None, gid.index)
    ]
    if not candidates:
        if gid_index is not None:
            raise ConfigError(
                "verbs.gid_index", f"no active port has a GID {gid_index}", "leave it out, or name another"
            )
        raise HostError("RDMA addresses", "no active port has a GID", "give its interface an IP address")
    best = min(candidates, key=lambda one: _rank(one, numa_node, distances or {}))
    reasons = (
        _device_reason(best, active, device, numa_node),
        _port_reason(best, ports, port),
        _gid_reason(best, gid_index),
    )
    return PathChoice(best.device.name, best.port.number, best.gid, best.port.infiniband, reasons)


def _rank(one: _Candidate, numa_node: int | None, distances: Mapping[int, int]) -> tuple[int, bool, int, str, int, int]:
    node = one.device.numa_node
    far = numa_node is not None and node not in (None, numa_node)
    distance = distances.get(node, 0) if far and node is not None else 0
    return gid_rank(one.gid, one.port.infiniband)[0], far, distance, one.device.name, one.port.number, one.gid.index


def _device_reason(
    best: _Candidate, active: Iterable[tuple[DeviceEntry, PortEntry]], wanted: str | None, numa_node: int | None
) -> str:
    name = best.device.name
    others = sorted({entry.name for entry, _ in active} - {name})
    if wanted is not None:
        return f"device {name}: the config names it"
    if not others:
        return f"device {name}: the only one with an active port"
    if numa_node is not None and best.device.numa_node == numa_node:
        return f"device {name}: on this process's NUMA node {numa_node}; passed over: {', '.join(others)}"
    if numa_node is not None and best.device.numa_node is not None:
        where = f"on NUMA node {best.device.numa_node}, none with as good an address is nearer to {numa_node}"
        return f"device {name}: {where}; passed over: {', '.join(others)}"
    return f"device {name}: the first with the best address; passed over: {', '.join(others)}"


def _port_reason(best: _Candidate, ports: Iterable[tuple[DeviceEntry, PortEntry]], wanted: int | None) -> str:
    number = best.port.number
    layer = "InfiniBand" if best.port.infiniband else "Ethernet"
    if wanted is not None:
        return f"port {number} ({layer}): the config names it"
    down = [one.number for entry, one in ports if entry is best.device and one.state != "ACTIVE"]
    return f"port {number} ({layer}): active" + (f"; not active: {', '.join(map(str, down))}" if down else "")


def _gid_reason(best: _Candidate, wanted: int | None) -> str:
    if wanted is not None:
        return f"{best.gid}: the config names it"
    rank, why = gid_rank(best.gid, best.port.infiniband)
    worse = [
        f"{gid}: {gid_rank(gid, best.port.infiniband)[1]}"
        for gid in best.port.gids
        if gid_rank(gid, best.port.infiniband)[0] > rank
    ]
    return f"{best.gid}: {why}" + (f"; passed over: {'; '.join(worse)}" if worse else "")


def choose_mtu(own: int, configured_bytes: int | None) -> tuple[int, str]:
    """The MTU (as a code) that this side offers, of its port's ``own``, and why."""
    if configured_bytes is None:
        return own, f"MTU {MTU_BYTES[own]}: the port's"
    if configured_bytes > MTU_BYTES[own]:
        return own, f"MTU {MTU_BYTES[own]}: the port has no more, though the config names {configured_bytes}"
    return MTU_CODES[configured_bytes], f"MTU {configured_bytes}: the config names it (the port has {MTU_BYTES[own]})"


def agree_mtu(own: int, theirs: int) -> tuple[int, str]:
    """The MTU (as a code) of one link, and why."""
    if own == theirs:
        return own, f"MTU {MTU_BYTES[own]}: both sides' own"
    who = "the peer's" if theirs < own else "this side's"
    other = max(own, theirs)
    return min(own, theirs), f"MTU {MTU_BYTES[min(own, theirs)]}: {who}, the other side would take {MTU_BYTES[other]}"


def _names(table: Iterable[DeviceEntry]) -> str:
    return ", ".join(entry.name for entry in table)
