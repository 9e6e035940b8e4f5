"""The doctor's checks of RDMA: devices, ports and addresses, which would be used and why, bindings, memory that can be pinned.

Looks at /sys, so that it says what is wrong where no binding can be imported; all is ok on a machine without any of it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from afore.core.errors import ConfigError, HostError
from afore.tools.doctor_check import MIB, Check, read_text
from afore.transport.verbs.binding import APIS, MTU_BYTES, Binding, load_binding
from afore.transport.verbs.choice import PathChoice, choose_path
from afore.transport.verbs.numa import numa_distances, own_numa_node
from afore.transport.verbs.table import DeviceEntry, PortEntry, read_table

SYS: Final = Path("/sys")
MEMLOCK_ENOUGH: Final = 1 << 30
"""Regions are pinned: those of a large model's KV cache take this much and more."""
ROCE_HEADERS: Final = 96
"""Bytes of a packet that are not payload, as the kernel counts them when it picks a RoCE port's MTU."""
NO_DEVICE: Final = "no RDMA device: shm serves inside a machine, tcp between machines"
DEVICE_MEND: Final = (
    "load the adapter's driver (lspci names it); for a trial without one: rdma link add rxe0 type rxe netdev eth0"
)


def check_rdma(sys: Path = SYS) -> list[Check]:
    """Every device with its ports and addresses, then the one that would be chosen, with the reasons."""
    table = read_table(str(sys / "class/infiniband"))
    if not table:
        return [Check("rdma devices", "ok", NO_DEVICE)]
    checks = [Check("rdma devices", "ok", ", ".join(entry.name for entry in table))]
    for device in table:
        checks += [_port(sys, device, port) for port in device.ports]
    return [*checks, check_choice(sys), _memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])]


def choice(sys: Path = SYS) -> PathChoice | None:
    """What a verbs endpoint would use here by itself; none without a device. Raises ``HostError`` for none that works."""
    table = read_table(str(sys / "class/infiniband"))
    if not table:
        return None
    nodes = str(sys / "devices/system/node")
    node = own_numa_node(root=nodes)
    return choose_path(table, numa_node=node, distances=None if node is None else numa_distances(node, nodes))


def check_choice(sys: Path = SYS) -> Check:
    """Which device, port and address would be used, and why."""
    try:
        path = choice(sys)
    except (HostError, ConfigError) as error:
        return Check("rdma choice", "warn", error.problem, error.remedy)
    if path is None:
        return Check("rdma choice", "ok", NO_DEVICE)
    if path.gid.link_local and not path.infiniband:
        mend = f"give {path.gid.netdev or 'its interface'} an IPv4 address: others are reached over RoCE v2 then"
        return Check("rdma choice", "warn", "; ".join(path.reasons), mend)
    return Check("rdma choice", "ok", "; ".join(path.reasons))


def _port(sys: Path, device: DeviceEntry, port: PortEntry) -> Check:
    folder = sys / "class/infiniband" / device.name / "ports" / str(port.number)
    layer = "InfiniBand" if port.infiniband else "Ethernet"
    rate = read_text(folder / "rate")
    facts = [port.state or "state unknown", layer, *([rate] if rate else [])]
    firmware = read_text(sys / "class/infiniband" / device.name / "fw_ver")
    facts += [f"firmware {firmware}"] if firmware else []
    facts += [f"NUMA node {device.numa_node}"] if device.numa_node is not None else []
    netdevs = sorted({gid.netdev for gid in port.gids if gid.netdev})
    facts += [_roce_mtu(sys, netdev) for netdev in netdevs]
    found = ", ".join(facts) + "".join(f"; {gid}" for gid in port.gids)
    name = f"rdma {device.name}/{port.number}"
    if port.state != "ACTIVE":
        mend = f"ip link set {netdevs[0]} up" if netdevs else "bring its interface up, and see the cable and the switch"
        return Check(name, "warn", found, mend)
    if not port.gids:
        return Check(name, "warn", f"{found}; no address", "give its interface an IP address")
    return Check(name, "ok", found)


def _roce_mtu(sys: Path, netdev: str) -> str:
    """What the interface's MTU leaves of RDMA's: the kernel takes the largest that fits."""
    text = read_text(sys / "class/net" / netdev / "mtu")
    if not text.isdecimal():
        return f"{netdev}: MTU unknown"
    room = int(text) - ROCE_HEADERS
    fits = [nbytes for nbytes in MTU_BYTES.values() if nbytes <= room]
    carried = f"RDMA packets of {max(fits)} bytes" if fits else "too small for RDMA"
    more = "" if room >= max(MTU_BYTES.values()) else f" (4096 would need MTU {max(MTU_BYTES.values()) + ROCE_HEADERS})"
    return f"{netdev} MTU {text}: {carried}{more}"


def _memlock(soft: int) -> Check:
    """Memory that this user may pin: registered regions count."""
    if soft in (resource.RLIM_INFINITY, -1):
        return Check("memory lock", "ok", "unlimited")
    found = f"{soft / MIB:,.0f} MiB may be pinned"
    if soft < MEMLOCK_ENOUGH:
        mend = "ulimit -l unlimited (limits.conf: memlock; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
        return Check("memory lock", "warn", found, mend)
    return Check("memory lock", "ok", found)


def check_bindings(sys: Path = SYS, load: Callable[[str], Binding] = load_binding) -> Check:
    """Which Python bindings can be imported, and which one ``verbs.api: auto`` would take."""
    shown, usable, remedy = [], [], ""
    for name in APIS:
        if name == "auto":
            continue
        try:
            binding = load(name)
        except HostError as error:
            shown.append(error.problem.removeprefix("none can be imported (").removesuffix(")"))
            remedy = error.remedy
        else:
            shown.append(f"{name} {binding.version}")
            usable.append(name)
    if usable:
        return Check("rdma bindings", "ok", f"{'; '.join(shown)}; auto takes {usable[0]}")
    if not read_table(str(sys / "class/infiniband")):
        return Check("rdma bindings", "ok", f"none, and none is needed without a device ({'; '.join(shown)})")
    return Check("rdma bindings", "warn", "; ".join(shown), remedy)


def check_opening(sys: Path = SYS, load: Callable[[str], Binding] = load_binding) -> list[Check]:
    """Opens the chosen device as an endpoint would: the step at which permissions and user-space drivers are missing."""
    try:
        path = choice(sys)
        binding = load("auto") if path is not None else None
    except (HostError, ConfigError):
        return []  # said above
    if path is None or binding is None:
        return []
    name = f"rdma open {path.device}"
    try:
        device = binding.open(path.device)
    except OSError as error:
        mend = "let this user open /dev/infiniband/uverbs*, and install the driver's user part (rdma-core)"
        return [Check(name, "fail", f"{binding.name} cannot open it: {error}", mend)]
    try:
        mtu = MTU_BYTES[device.active_mtu(path.port)]
    except OSError as error:
        return [Check(name, "fail", f"port {path.port} does not answer: {error}", "see the kernel's log (dmesg)")]
    finally:
        device.close()
    return [Check(name, "ok", f"{binding.name} {binding.version} opens it; its active MTU is {mtu}")]
