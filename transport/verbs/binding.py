"""What the fabric needs of libibverbs, as one small protocol that two Python bindings fill: ``pyverbs`` and ``ibverbs``.

Numbers are those of rdma-core's stable ABI (``infiniband/verbs.h``), so that neither binding's enums are needed. Everything that a
binding refuses comes as ``OSError`` with the errno that libibverbs gave.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from afore.core.errors import ConfigError, HostError

WRITE, WRITE_WITH_IMMEDIATE, SEND, READ = 0, 1, 2, 4
"""Opcodes of send requests (ibv_wr_opcode)."""
SIGNALED, INLINE = 1 << 1, 1 << 3
"""Flags of send requests (ibv_send_flags)."""
RECEIVED, RECEIVED_IMMEDIATE = 1 << 7, (1 << 7) + 1
"""Opcodes of receive completions (ibv_wc_opcode)."""
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1 << 0, 1 << 1, 1 << 2
"""What memory may be used for (ibv_access_flags)."""
RECEIVE = 1 << 32
"""What the numbers of receives have above their place: a failed completion does not say what it was."""
MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
"""Path MTUs by their code (ibv_mtu)."""
MTU_CODES = {nbytes: code for code, nbytes in MTU_BYTES.items()}

Completion = tuple[int, int, int, int]
"""(request number, status, opcode, immediate); opcode and immediate count only where the status is 0. A bare tuple: one is made
for every notification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueShape:
    """How much a queue pair holds."""

    sends: int
    receives: int
    inline_bytes: int
    """Payload that is copied into the request itself; more may be granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """How a queue pair reaches its peer: what both sides said and the config's timing, in verbs' codes."""

    port: int
    gid_index: int
    mtu: int
    own_first_packet: int
    peer_number: int
    peer_first_packet: int
    peer_gid: bytes
    peer_lid: int
    ack_timeout: int
    """4.096 µs × 2^n."""
    retry_count: int
    rnr_retry_count: int
    rnr_timer: int
    reads_in_flight: int


class Memory(Protocol):
    """Registered memory."""

    @property
    def lkey(self) -> int: ...

    @property
    def rkey(self) -> int: ...

    def close(self) -> None:
        """Drops the registration. Idempotent."""
        ...


class QueuePair(Protocol):
    """One reliable connection's end, with a completion queue and a completion channel of its own."""

    @property
    def fd(self) -> int:
        """Readable once something completed after ``arm``; non-blocking."""
        ...

    @property
    def number(self) -> int: ...

    @property
    def inline_bytes(self) -> int:
        """Payload that was granted."""
        ...

    def connect(self, path: PathOptions) -> None:
        """Takes the queue pair to ready-to-send."""
        ...

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
        """Posts one send request; ``number`` comes back with its completion."""
        ...

    def prepare_receives(self, address: int, nbytes: int, count: int, lkey: int) -> None:
        """Posts ``count`` receives numbered ``RECEIVE``, ``RECEIVE + 1``, …, each with its own ``nbytes`` from ``address`` on."""
        ...

    def post_receive(self, place: int) -> None:
        """Posts the prepared receive number ``RECEIVE + place`` again."""
        ...

    def poll(self, most: int) -> list[Completion]:
        """Up to ``most`` completions; never waits."""
        ...

    def take_event(self) -> None:
        """Takes one event off ``fd``. Raises ``OSError`` where there is none."""
        ...

    def arm(self) -> None:
        """The next completion makes ``fd`` readable; those that are there already do not: poll afterwards."""
        ...

    def close(self) -> None:
        """Destroys queue pair, queue and channel. Idempotent."""
        ...


class OpenDevice(Protocol):
    """A device that was opened, with a protection domain."""

    def active_mtu(self, port: int) -> int:
        """Code of the port's MTU."""
        ...

    def lid(self, port: int) -> int:
        """The port's local identifier; 0 on Ethernet."""
        ...

    def register(self, address: int, nbytes: int, access: int) -> Memory: ...

    def queue_pair(self, port: int, shape: QueueShape, access: int) -> QueuePair:
        """In the state INIT, where receives can be posted."""
        ...

    def close(self) -> None:
        """Idempotent; what was made from the device is closed before."""
        ...


class Binding(Protocol):
    """One Python binding of libibverbs."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def open(self, device: str) -> OpenDevice: ...


APIS = ("auto", "pyverbs", "ibverbs")
_MODULES = {
    "pyverbs": "afore.transport.verbs.binding_pyverbs",
    "ibverbs": "afore.transport.verbs.binding_ibverbs",
}


def load_binding(api: str) -> Binding:
    """The binding of that name; ``auto`` takes pyverbs where it can be imported, else ibverbs.

    Raises ``ConfigError`` for another name, ``HostError`` where none can be imported.
    """
    if api not in APIS:
        raise ConfigError("verbs.api", f"{api!r} is no binding", f"choose one of {', '.join(APIS)}")
    problems: list[str] = []
    for name in _MODULES if api == "auto" else (api,):
        try:
            module = importlib.import_module(_MODULES[name])
        except (ImportError, OSError) as error:
            problems.append(f"{name}: {error}")
        else:
            return cast(Binding, module.BINDING)
    raise HostError(
        "RDMA binding",
        f"none can be imported ({'; '.join(problems)})",
        "install libibverbs1 with pyverbs (Debian: python3-pyverbs, made importable beside the environment), or the extra "
        "afore[rdma], which brings ibverbs",
    )
