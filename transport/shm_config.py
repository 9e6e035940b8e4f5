"""What an endpoint of the shm fabric is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from afore.core.control import WIRE_VERSION
from afore.core.errors import ConfigError
from afore.core.link_options import IdleOptions
from afore.transport.codec import MESSAGE_LIMIT
from afore.transport.shm_ring import SLOTS_LIMIT
from afore.transport.shm_segments import ROOT

_PREFIX = "afore-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmConfig:
    """One endpoint of the shm fabric."""

    run_id: str
    """Names this run's files; 1 … 40 letters, digits, ``_`` or ``.``."""
    label: str = "endpoint"
    """Names the endpoint for humans: the role."""
    secret: bytes | None = None
    """What all processes of the run know, 16 random bytes or more; none means that which the run's directory keeps."""
    directory: str | None = None
    """Where the sockets live; none means ``/dev/shm/afore-<run id>``, which the last endpoint to leave removes."""
    root: str = ROOT
    """Where segments live: a tmpfs."""
    ring_slots: int = 1024
    """Notifications of one link that may wait to be taken; a power of two."""
    message_limit: int = MESSAGE_LIMIT
    """Bytes of one control message."""
    handshake_timeout_us: float = 5e6
    """How long a client may take to prove itself."""
    idle: IdleOptions = field(default_factory=IdleOptions)
    """How its readers wait for notifications."""
    version: int = WIRE_VERSION
    """Wire version to speak."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.]{1,40}", self.run_id):
            raise ConfigError("shm.run_id", f"{self.run_id!r}", "use 1 … 40 letters, digits, '_' or '.'")
        if not 0 < self.ring_slots <= SLOTS_LIMIT or self.ring_slots & (self.ring_slots - 1):
            raise ConfigError("shm.ring_slots", f"{self.ring_slots}", f"give a power of two, at most {SLOTS_LIMIT}")
        if not 0 < self.message_limit < 1 << 32:
            raise ConfigError("shm.message_limit", f"{self.message_limit}", "give 1 … 2^32 - 1 bytes")
        if not self.handshake_timeout_us > 0:
            raise ConfigError("shm.handshake_timeout_us", f"{self.handshake_timeout_us}", "give more than 0")

    @property
    def run_directory(self) -> str:
        """Where the sockets live."""
        return self.directory or f"{self.root}/{_PREFIX}{self.run_id}"

    @classmethod
    def joining(cls, run_directory: str, label: str) -> ShmConfig:
        """The endpoint ``label`` of the run whose directory this is. Raises ``ConfigError``."""
        root, _, name = run_directory.rstrip("/").rpartition("/")
        if root == ROOT and name.startswith(_PREFIX):
            return cls(run_id=name.removeprefix(_PREFIX), label=label)
        return cls(run_id=re.sub(r"[^A-Za-z0-9_.]", "_", name)[-40:] or "run", label=label, directory=run_directory)
