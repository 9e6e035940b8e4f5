"""An RDMA device of this process alone, as strict as hardware: a ``Binding`` whose queue pairs move bytes between real addresses.

It breaks a queue pair where a device would: a key or bounds that are wrong, a message without a receive, a send queue that is over
its depth. Requests take effect at once or, with ``lag`` turns of the event loop, later and in order. ``Wire.faults`` makes requests
fail as a network would.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import ipaddress
import itertools
import os
from collections import deque
from collections.abc import Callable

from afore.transport.verbs.binding import (
    INLINE,
    READ,
    RECEIVE,
    RECEIVED,
    RECEIVED_IMMEDIATE,
    SEND,
    SIGNALED,
    WRITE_WITH_IMMEDIATE,
    Completion,
    PathOptions,
    QueueShape,
)
from afore.transport.verbs.status import FLUSHED, NOT_READY_EXCEEDED, REMOTE_ACCESS, RETRIES_EXCEEDED, SUCCESS
from afore.transport.verbs.table import DeviceEntry, GidEntry, PortEntry

GID = ipaddress.IPv6Address("::ffff:10.0.0.1").packed
TABLE = (DeviceEntry("soft0", None, (PortEntry(1, "ACTIVE", False, (GidEntry(0, GID, "RoCE v2", "soft"),)),)),)


class Wire:
    """What connects the queue pairs of one test, and counts what exists."""

    def __init__(self, *, lag: int = 0) -> None:
        self.lag = lag
        self.pairs: dict[int, SoftPair] = {}
        self.memory: dict[int, SoftMemory] = {}
        self.numbers = itertools.count(7)
        self.inline_limit = 256
        self.registers = True
        self.fault: Callable[[int, int], int] | None = None
        """Called with opcode and rkey of every request; a status but 0 makes it fail."""

    def living(self) -> tuple[int, int]:
        """Queue pairs and registrations that exist."""
        return len(self.pairs), len(self.memory)


class SoftMemory:
    def __init__(self, wire: Wire, address: int, nbytes: int, access: int) -> None:
        if not wire.registers:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        assert nbytes > 0
        self._wire = wire
        self.address, self.nbytes, self.access = address, nbytes, access
        self.lkey = self.rkey = next(wire.numbers) << 8 | 0x5A
        wire.memory[self.rkey] = self

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        self._wire.memory.pop(self.rkey, None)


class SoftPair:
    def __init__(self, wire: Wire, shape: QueueShape) -> None:
        if shape.inline_bytes > wire.inline_limit:
            raise OSError(errno.EINVAL, "Invalid argument")
        self._wire = wire
        self._shape = shape
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.number = next(wire.numbers)
        self.inline_bytes = shape.inline_bytes
        self._peer = 0
        self._first_packets = (-1, -1)
        self._queue: deque[Completion] = deque()
        self._armed = False
        self._broken = False
        self._under_way = 0
        self._unsignaled = 0
        self._places: list[tuple[int, int]] = []
        self._posted: deque[int] = deque()
        self._receive_bytes = 0
        wire.pairs[self.number] = self

    # What the fabric calls

    def connect(self, path: PathOptions) -> None:
        other = self._wire.pairs.get(path.peer_number)
        if path.peer_gid != GID:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        self._peer = path.peer_number
        self._first_packets = (path.own_first_packet, path.peer_first_packet)
        if other is not None and other._peer == self.number:
            assert other._first_packets == self._first_packets[::-1], "packets of the two sides do not meet"

    def prepare_receives(self, address: int, nbytes: int, count: int, lkey: int) -> None:
        assert count <= self._shape.receives
        assert self._wire.memory[lkey].holds(address, nbytes * count)
        self._receive_bytes = nbytes
        self._places = [(address + place * nbytes, place) for place in range(count)]
        self._posted.extend(range(count))

    def post_receive(self, place: int) -> None:
        assert place not in self._posted, "a receive posted twice"
        self._posted.append(place)

    def post(
        self,
        opcode: int,
        number: int,
        flags: int,
        address: int,
        nbytes: int,
        lkey: int,
        remote_address: int = 0,
        rkey: int = 0,
        immediate: int = 0,
    ) -> None:
        self._under_way += 1
        if self._under_way > self._shape.sends:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        inline = bool(flags & INLINE)
        assert not inline or (nbytes <= self.inline_bytes and opcode != READ)
        payload = ctypes.string_at(address, nbytes) if inline else b""

        def happen() -> None:
            self._happen(opcode, number, bool(flags & SIGNALED), address, nbytes, lkey, remote_address, rkey, immediate,
                         payload if inline else None)  # fmt: skip

        self._later(happen, self._wire.lag)

    def _later(self, happen: Callable[[], None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._later, happen, turns - 1)
        else:
            happen()

    def _happen(
        self, opcode: int, number: int, signaled: bool, address: int, nbytes: int, lkey: int, remote_address: int,
        rkey: int, immediate: int, payload: bytes | None,
    ) -> None:  # fmt: skip
        status = FLUSHED if self._broken else self._carry(
            opcode, address, nbytes, lkey, remote_address, rkey, immediate, payload
        )  # fmt: skip
        if signaled or status:
            self._complete((number, status, 0, 0))
        if status:
            self._broken = True
        # Only the completion of a signaled request frees those before it, as on hardware.
        self._unsignaled += 1
        if signaled:
            self._under_way -= self._unsignaled
            self._unsignaled = 0

    def _carry(
        self, opcode: int, address: int, nbytes: int, lkey: int, remote_address: int, rkey: int, immediate: int,
        payload: bytes | None,
    ) -> int:  # fmt: skip
        wire = self._wire
        fault = wire.fault(opcode, rkey) if wire.fault is not None else SUCCESS
        if fault:
            return fault
        other = wire.pairs.get(self._peer)
        if other is None or other._peer != self.number or other._broken:
            return RETRIES_EXCEEDED
        if payload is None and nbytes:
            assert wire.memory[lkey].holds(address, nbytes), "local memory that is not registered"
        if opcode != SEND and nbytes:
            memory = wire.memory.get(rkey)
            if memory is None or not memory.holds(remote_address, nbytes) or not memory.access & 2:
                return REMOTE_ACCESS
            if opcode == READ:
                ctypes.memmove(address, remote_address, nbytes)
            else:
                ctypes.memmove(remote_address, payload if payload is not None else address, nbytes)
        if opcode in (SEND, WRITE_WITH_IMMEDIATE):
            if not other._posted:
                return NOT_READY_EXCEEDED
            place = other._posted.popleft()
            if opcode == SEND:
                assert nbytes <= other._receive_bytes
                ctypes.memmove(other._places[place][0], payload if payload is not None else address, nbytes)
                other._complete((RECEIVE + place, SUCCESS, RECEIVED, 0))
            else:
                other._complete((RECEIVE + place, SUCCESS, RECEIVED_IMMEDIATE, immediate))
        return SUCCESS

    def _complete(self, completion: Completion) -> None:
        self._queue.append(completion)
        if self._armed and self.fd >= 0:
            self._armed = False
            os.eventfd_write(self.fd, 1)

    def poll(self, most: int) -> list[Completion]:
        return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]

    def take_event(self) -> None:
        os.eventfd_read(self.fd)

    def arm(self) -> None:
        self._armed = True

    def close(self) -> None:
        if self.fd >= 0:
            self._wire.pairs.pop(self.number, None)
            os.close(self.fd)
            self.fd = -1
            self._broken = True


class SoftDevice:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def active_mtu(self, port: int) -> int:
        return 5

    def lid(self, port: int) -> int:
        return 0

    def register(self, address: int, nbytes: int, access: int) -> SoftMemory:
        return SoftMemory(self._wire, address, nbytes, access)

    def queue_pair(self, port: int, shape: QueueShape, access: int) -> SoftPair:
        return SoftPair(self._wire, shape)

    def close(self) -> None:
        """Nothing of a device outlives what was made from it."""


class SoftBinding:
    """The ``Binding`` of one wire."""

    name = "soft"
    version = "of the tests"

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def open(self, device: str) -> SoftDevice:
        assert device == "soft0"
        return SoftDevice(self._wire)
