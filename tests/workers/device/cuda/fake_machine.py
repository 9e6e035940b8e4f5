"""What the strict stand-in for the driver is made of: a machine with GPUs, its allocations, and operations on streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Uuid:
    bytes: bytes


@dataclass
class Record:
    """One recording of an event: what waits capture."""

    done: bool = False
    time_us: float = 0.0
    failed: bool = False


@dataclass
class Allocation:
    memory: Any
    nbytes: int
    kind: str
    owner: object
    mapped: int = 0
    """Openings of other processes."""


@dataclass
class Operation:
    name: str
    run: Callable[[], None]
    after: Record | None = None
    record: Record | None = None
    cost_us: float = 0.0
    enqueued_us: float = 0.0


@dataclass
class Machine:
    """GPUs that several processes share. ``reachable``: pairs of GPUs with peer access, all by default.

    ``tick`` says when an operation runs, from when the last one did, in microseconds.
    """

    gpus: int = 1
    version: int = 13010
    reachable: set[tuple[int, int]] | None = None
    room_nbytes: int = 1 << 30
    now_us: float = 0.0
    """The host's time; it is never behind what any stream has done."""
    at_us: float = 0.0
    """When the operation that runs is done."""
    run_us: list[float] = field(default_factory=list)
    """What the next host functions take on the GPU, in order; none: nothing beside ``tick``."""
    copy_us: float = 0.0
    """What copies take beside ``tick``."""
    tick: Callable[[float], float] = lambda now_us: now_us + 1
    allocations: dict[int, Allocation] = field(default_factory=dict)
    exported: dict[bytes, int] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: itertools.count(0x1000))

    def within(self, address: int, nbytes: int) -> Allocation | None:
        """The allocation that has all of these bytes."""
        for base, allocation in self.allocations.items():
            if base <= address and address + nbytes <= base + allocation.nbytes:
                return allocation
        return None
