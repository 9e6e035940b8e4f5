"""The requests of a writer's link: what they carry lies in registered memory of the link's own, and one that fails can be named.

A payload travels inside its request where it fits, else it is copied to staging; one that is larger than staging gets memory of its
own until its request has completed. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Callable

from afore.core.errors import PeerLost, TransportError
from afore.transport.api import Buffer
from afore.transport.verbs.binding import (
    INLINE,
    READ,
    SEND,
    SIGNALED,
    WRITE,
    WRITE_WITH_IMMEDIATE,
    OpenDevice,
    QueuePair,
)
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.credits import MESSAGES_IN_FLIGHT
from afore.transport.verbs.memory import LocalMemory
from afore.transport.verbs.sending import RESERVE, SendQueue
from afore.transport.verbs.wire import NOTICE

NOTICE_BYTES = NOTICE.size
OPERATIONS = {WRITE: "RDMA WRITE", WRITE_WITH_IMMEDIATE: "RDMA WRITE WITH IMMEDIATE", SEND: "SEND", READ: "RDMA READ"}


def small_bytes(config: VerbsConfig) -> int:
    """Registered memory that a writer needs before anything is staged: receives, notices, and the scratch of inline payloads."""
    return (MESSAGES_IN_FLIGHT + config.send_depth + RESERVE) * NOTICE_BYTES + max(config.inline_bytes, 1)


class Requests:
    """What one queue pair was asked to do and carries."""

    def __init__(
        self,
        device: OpenDevice,
        config: VerbsConfig,
        small: LocalMemory,
        *,
        peer: str,
        lose: Callable[[TransportError], None],
    ) -> None:
        """``small`` (of ``small_bytes``, its first bytes posted as receives) is theirs from now on; ``attach`` follows.

        ``lose`` ends the link that they belong to.
        """
        self.queue = SendQueue(config.send_depth, config.staging_bytes)
        self._device = device
        self._peer = peer
        self._lose = lose
        self._small = small
        self._slots = config.send_depth + RESERVE
        self._asked: list[tuple[int, int]] = [(SEND, 0)] * self._slots
        """Opcode and region of those under way, by number modulo ``_slots``."""
        self._notices_at = MESSAGES_IN_FLIGHT * NOTICE_BYTES
        self._scratch_at = self._notices_at + self._slots * NOTICE_BYTES
        self._staging_bytes = config.staging_bytes
        self._staging: LocalMemory | None = None
        self._most_inline = config.inline_bytes
        self.inline_bytes = 0
        """Payload that travels inside its request."""

    def attach(self, pair: QueuePair) -> None:
        """From now on they can be posted."""
        self._post = pair.post
        self.inline_bytes = min(pair.inline_bytes, self._most_inline)

    def has_room(self, nbytes: int) -> bool:
        """Whether a write of ``nbytes`` and a notice behind it can be posted now."""
        return self.queue.has_room(2, nbytes if nbytes > self.inline_bytes else 0)

    def place(self, data: Buffer, nbytes: int) -> tuple[int, int, int]:
        """Copies a payload to where its request finds it: (address, local key, flags)."""
        small = self._small
        if nbytes <= self.inline_bytes:
            # A request takes inline bytes with it when it is posted, so one place does for all.
            at = self._scratch_at
            small.view[at : at + nbytes] = data
            return small.address + at, small.lkey, INLINE if nbytes else 0
        if nbytes > self._staging_bytes:
            own = LocalMemory(self._device, nbytes, f"a write of {nbytes:,} bytes")
            own.view[:] = data
            self.queue.hold(own)
            return own.address, own.lkey, SIGNALED
        staging = self._staging
        if staging is None:
            staging = LocalMemory(self._device, self._staging_bytes, f"staging of a link to {self._peer}")
            self._staging = staging
        at = self.queue.stage(nbytes)
        staging.view[at : at + nbytes] = data
        return staging.address + at, staging.lkey, 0

    def post(
        self,
        opcode: int,
        flags: int,
        address: int,
        nbytes: int,
        lkey: int,
        region: int,
        remote_address: int = 0,
        rkey: int = 0,
        immediate: int = 0,
    ) -> None:
        """Posts one, signaled where that is due. Raises ``PeerLost`` where the device takes none; the link has ended then."""
        queue = self.queue
        if queue.post(signaled=flags & SIGNALED != 0):
            flags |= SIGNALED
        number = queue.posted
        self._asked[number % self._slots] = (opcode, region)
        try:
            self._post(opcode, number, flags, address, nbytes, lkey, remote_address, rkey, immediate)
        except OSError as error:
            # The accounts forbid it, so the device or its driver has a trouble of its own.
            lost = PeerLost(self._peer, f"the device took no request ({error})", "see the kernel's log; connect again")
            self._lose(lost)
            raise lost from error

    def notice(self, region: int, immediate: int, *, signaled: bool = False) -> None:
        """Posts a notice to the owner. Raises as ``post``."""
        small = self._small
        at = self._notices_at + (self.queue.posted + 1) % self._slots * NOTICE_BYTES
        NOTICE.pack_into(small.view, at, region, immediate)
        flags = (INLINE if self.inline_bytes >= NOTICE_BYTES else 0) | (SIGNALED if signaled else 0)
        self.post(SEND, flags, small.address + at, NOTICE_BYTES, small.lkey, region)

    def flush(self) -> None:
        """An empty signaled request behind a tail of unsignaled ones: its completion is theirs. Raises as ``post``."""
        if self.queue.needs_flush() and self.queue.has_reserve():
            self.post(WRITE, SIGNALED, self._small.address, 0, self._small.lkey, 0)

    @property
    def all_done(self) -> bool:
        """Whether nothing is under way."""
        return self.queue.posted == self.queue.done

    def describe(self, number: int) -> tuple[str, int]:
        """What request ``number`` was, in words, and its region; 0 for none."""
        opcode, region = self._asked[number % self._slots]
        return OPERATIONS[opcode] + (f" to region {region}" if region else ""), region

    def close(self) -> list[object]:
        """The queue pair is gone: nothing completes any more. Returns what was held. Idempotent."""
        held = self.queue.abandon()
        self._small.close()
        if self._staging is not None:
            self._staging.close()
        return held
