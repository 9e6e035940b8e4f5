"""Where this process runs: the NUMA node of its cores, and how far other nodes are, as the kernel lists them in sysfs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set

SYSFS = "/sys/devices/system/node"


def own_numa_node(cores: Set[int] | None = None, root: str = SYSFS) -> int | None:
    """The node that has all ``cores`` (none: those this process may use); None where they lie on several, or nobody knows."""
    cores = os.sched_getaffinity(0) if cores is None else cores
    nodes = {number for number in _nodes(root) if cores & set(_cores(f"{root}/node{number}"))}
    return nodes.pop() if len(nodes) == 1 else None


def numa_distances(node: int, root: str = SYSFS) -> Mapping[int, int]:
    """Distance of every node from ``node``, 10 being its own memory (ACPI SLIT); empty where nobody knows."""
    words = _read(f"{root}/node{node}/distance").split()
    numbers = _nodes(root)
    if len(words) != len(numbers) or not all(word.isdigit() for word in words):
        return {}
    return dict(zip(numbers, map(int, words), strict=True))


def _nodes(root: str) -> list[int]:
    """The numbers of the nodes, which need not follow one another."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    return sorted(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdigit())


def _cores(path: str) -> Iterator[int]:
    """A list like ``0-3,8``."""
    for part in _read(f"{path}/cpulist").split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            yield from range(int(first), int(last or first) + 1)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
