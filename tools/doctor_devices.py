"""The doctor's checks of what stands around RDMA: huge pages, memory of GPUs that peers reach, and how far things are apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from afore.tools.doctor_check import Check, read_text
from afore.tools.doctor_rdma import SYS

PROC: Final = Path("/proc")
PEER_MODULES: Final = ("nvidia_peermem", "nv_peer_mem", "amdgpu")
"""What lets adapters reach GPU memory without dma-buf."""
_GPU_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_DISPLAY_CLASSES: Final = ("0x03", "0x12")
"""PCI classes of GPUs: display controllers, processing accelerators."""
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def check_huge_pages(sys: Path = SYS, proc: Path = PROC) -> Check:
    """Reserved huge pages, and whether the kernel makes them by itself. Nothing here needs them; large caches like them."""
    counts = {}
    for line in read_text(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name in ("HugePages_Total", "HugePages_Free", "Hugepagesize"):
            counts[name] = rest.strip()
    mode = re.search(r"\[(\w+)\]", read_text(sys / "kernel/mm/transparent_hugepage/enabled"))
    reserved = f"{counts.get('HugePages_Free', '?')} of {counts.get('HugePages_Total', '?')} free"
    size = counts.get("Hugepagesize", "size unknown")
    return Check("huge pages", "ok", f"{reserved}, {size} each; transparent: {mode[1] if mode else 'unknown'}")


def check_peer_memory(sys: Path = SYS) -> Check:
    """Whether an adapter could write into a GPU's memory."""
    loaded = [name for name in PEER_MODULES if (sys / "module" / name).exists()]
    gpus, adapters = list(_gpus(sys)), list(_adapters(sys))
    found = f"modules loaded: {', '.join(loaded) or 'none'}"
    if not gpus or not adapters:
        lacking = " and ".join(what for what, there in (("no GPU", gpus), ("no RDMA device", adapters)) if not there)
        return Check("peer memory", "ok", f"{found}; {lacking} here: nothing to reach")
    if not loaded:
        mend = "modprobe nvidia_peermem, or use a driver that exports dma-buf (NVIDIA's open kernel modules)"
        return Check("peer memory", "warn", found, mend)
    return Check("peer memory", "ok", found)


def check_distance(sys: Path = SYS) -> list[Check]:
    """How far each RDMA device is from each GPU and from each NUMA node, by PCI path; nothing where there is no RDMA device."""
    checks = []
    gpus = list(_gpus(sys))
    for name, path in _adapters(sys):
        node = _numa(path)
        near = [f"NUMA node {node} ({_node_distances(sys, node)})" if node is not None else "one NUMA node"]
        near += [f"{vendor} GPU {gpu.name}: {distance(path, gpu)}" for vendor, gpu in gpus]
        far = [gpu.name for _, gpu in gpus if _numa(gpu) not in (None, node)]
        if gpus and len(far) == len(gpus):
            mend = "use the adapter nearest to the GPU (verbs.device), or move one of them to another slot"
            checks.append(Check(f"distance {name}", "warn", "; ".join(near), mend))
        else:
            checks.append(Check(f"distance {name}", "ok", "; ".join(near)))
    return checks


def distance(left: Path, right: Path) -> str:
    """What lies between two PCI devices, by their folders in /sys/devices."""
    ours, theirs = _bridges(left), _bridges(right)
    shared = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            break
        shared += 1
    if shared > 1:
        return "one PCIe switch"
    if shared == 1:
        return "one host bridge"
    nodes = _numa(left), _numa(right)
    if None in nodes or nodes[0] == nodes[1]:
        return "two host bridges of one NUMA node"
    return f"across sockets (NUMA node {nodes[0]} and {nodes[1]})"


def _bridges(device: Path) -> list[str]:
    """Host bridge and PCI bridges above a device, from the top."""
    parts = device.parts
    top = next((index for index, part in enumerate(parts) if part.startswith("pci")), None)
    return [] if top is None else [part for part in parts[top:-1] if part.startswith("pci") or _PCI.fullmatch(part)]


def _gpus(sys: Path) -> Iterator[tuple[str, Path]]:
    folder = sys / "bus/pci/devices"
    for link in sorted(folder.iterdir()) if folder.is_dir() else []:
        vendor = _GPU_VENDORS.get(read_text(link / "vendor"))
        if vendor is not None and read_text(link / "class").startswith(_DISPLAY_CLASSES):
            yield vendor, link.resolve()


def _adapters(sys: Path) -> Iterator[tuple[str, Path]]:
    folder = sys / "class/infiniband"
    for link in sorted(folder.iterdir()) if folder.is_dir() else []:
        # A soft device hangs on no bus.
        yield link.name, (link / "device").resolve() if (link / "device").exists() else link.resolve()


def _numa(device: Path) -> int | None:
    text = read_text(device / "numa_node")
    return int(text) if text.isdecimal() else None


def _node_distances(sys: Path, node: int) -> str:
    row = read_text(sys / f"devices/system/node/node{node}/distance")
    return f"distances {row}" if row else "distances unknown"
