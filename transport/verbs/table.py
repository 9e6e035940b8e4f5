"""The RDMA devices of this machine as the kernel lists them in sysfs; no binding is needed to look."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress

from afore.core.record import record

SYSFS = "/sys/class/infiniband"
GAP = 128
"""Unused entries in a row that end a GID table: tables have up to a thousand places, and the kernel fills the lowest free one."""


@record
class GidEntry:
    """One address of a port."""

    index: int
    gid: bytes
    """16 bytes."""
    kind: str
    """``IB/RoCE v1`` or ``RoCE v2``."""
    netdev: str
    """The network interface that it belongs to; empty on InfiniBand."""

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The IPv4 address that it was made from, if it was."""
        return ipaddress.IPv6Address(self.gid).ipv4_mapped

    @property
    def link_local(self) -> bool:
        """Whether it only reaches the same wire."""
        address = ipaddress.IPv6Address(self.gid)
        return (address.ipv4_mapped or address).is_link_local

    def __str__(self) -> str:
        where = f", {self.netdev}" if self.netdev else ""
        return f"GID {self.index} ({gid_text(self.gid)}, {self.kind}{where})"


def gid_text(gid: bytes) -> str:
    """An address as people write it."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


@record
class PortEntry:
    """One port of a device."""

    number: int
    state: str
    """``ACTIVE``, ``DOWN``, …"""
    infiniband: bool
    gids: tuple[GidEntry, ...]


@record
class DeviceEntry:
    """One RDMA device."""

    name: str
    numa_node: int | None
    """The NUMA node that it is attached to, where the machine has several."""
    ports: tuple[PortEntry, ...]


def read_table(root: str = SYSFS) -> tuple[DeviceEntry, ...]:
    """Every device, by name; empty where there is no RDMA at all."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return ()
    return tuple(_device(f"{root}/{name}", name) for name in names)


def _device(path: str, name: str) -> DeviceEntry:
    numa = _read(f"{path}/device/numa_node")
    ports = []
    with suppress(OSError):
        ports = sorted(int(port) for port in os.listdir(f"{path}/ports") if port.isdigit())
    return DeviceEntry(
        name,
        int(numa) if numa.lstrip("-").isdigit() and int(numa) >= 0 else None,
        tuple(_port(f"{path}/ports/{number}", number) for number in ports),
    )


def _port(path: str, number: int) -> PortEntry:
    state = _read(f"{path}/state")
    gids = []
    indices: list[int] = []
    with suppress(OSError):
        indices = sorted(int(index) for index in os.listdir(f"{path}/gids") if index.isdigit())
    last = -1
    for place, index in enumerate(indices):
        if place - last > GAP:
            break
        text = _read(f"{path}/gids/{index}")
        try:
            gid = ipaddress.IPv6Address(text).packed
        except ValueError:
            continue
        # Unused entries are zero, and reading their type fails.
        if any(gid):
            last = place
            kind = _read(f"{path}/gid_attrs/types/{index}")
            gids.append(GidEntry(index, gid, kind, _read(f"{path}/gid_attrs/ndevs/{index}")))
    return PortEntry(
        number, state.partition(":")[2].strip() or state, _read(f"{path}/link_layer") == "InfiniBand", tuple(gids)
    )


def _read(path: str) -> str:
    # Without a file object: its own questions to the kernel are twice as many as these.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode().strip()
    except OSError:
        return ""
    finally:
        os.close(fd)
