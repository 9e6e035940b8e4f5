"""The demand mailbox in the scheduler's region: one slot for each (attention worker, microbatch), written one-sided.

``demand_E`` has shape [E], int32. A vector counts only when its CRC, epoch, source and target all agree with what is expected, in
whatever order its bytes landed. A slot is reused safely because F2A of (layer, microbatch) follows the scheduler's read. A vector
that comes before its announcement simply stays in its slot.
"""

from __future__ import annotations

import enum
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from afore.core.demand import DemandVector
from afore.core.errors import ConfigError, VersionMismatch, WireError
from afore.core.target import Phase, Target
from afore.transport import bells, records
from afore.transport.records import COUNT_DTYPE, DEMAND_CRC_FROM, DEMAND_HEADER, MAILBOX_HEADER, align

OWNER = "mailbox"


@dataclass(frozen=True, slots=True)
class MailboxLayout:
    """Shape of a mailbox: a header line, then A * M slots of a header and E counts each."""

    num_attention: int
    """A: attention workers."""
    num_microbatches: int
    """M: microbatches in flight."""
    num_experts: int
    """E: routed experts."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ConfigError(f"mailbox.{name}", f"{getattr(self, name)!r} is not from 1 to 2^31 - 1")

    @property
    def vector_nbytes(self) -> int:
        """Bytes of one vector with its header: what an attention worker writes."""
        return DEMAND_HEADER.nbytes + COUNT_DTYPE.itemsize * self.num_experts

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot."""
        return align(self.vector_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region."""
        return align(MAILBOX_HEADER.nbytes) + self.num_attention * self.num_microbatches * self.slot_nbytes

    def offset(self, attention: int, microbatch: int) -> int:
        """Where an attention worker writes its vector of a microbatch."""
        assert 0 <= attention < self.num_attention
        assert 0 <= microbatch < self.num_microbatches
        return align(MAILBOX_HEADER.nbytes) + (attention * self.num_microbatches + microbatch) * self.slot_nbytes

    def immediate(self, attention: int, microbatch: int) -> int:
        """The notification that goes with that write: bell DEMAND."""
        return bells.DEMAND(attention, microbatch)

    def from_immediate(self, immediate: int) -> tuple[int, int]:
        """(attention, microbatch) of a notification. Raises ``WireError`` for one that names no slot of this mailbox."""
        bell = bells.decode(immediate)
        if bell.kind is not bells.BellKind.DEMAND:
            raise WireError(OWNER, f"bell {bell.kind.name} was rung at a mailbox", "it belongs to another region")
        if bell.rank >= self.num_attention or bell.microbatch >= self.num_microbatches:
            raise WireError(f"attention-{bell.rank}", f"rang for microbatch {bell.microbatch}, which has no slot")
        return bell.rank, bell.microbatch


def pack_demand(epoch: int, target: Target, source: int, phase: Phase, demand_E: DemandVector) -> bytes:
    """The bytes that attention worker ``source`` writes into its slot: header, CRC-32, counts [E].

    Raises ``WireError`` for a vector that is not one-dimensional or has a negative count.
    """
    counts = np.ascontiguousarray(demand_E, dtype=COUNT_DTYPE)
    if counts.ndim != 1 or (counts.size and int(counts.min()) < 0):
        raise WireError(f"attention-{source}", f"its demand of {target} is no vector of counts: shape {counts.shape}")
    body = counts.tobytes()
    header = DEMAND_HEADER.pack(0, counts.size, epoch, target.word(), source, phase)
    crc = zlib.crc32(body, zlib.crc32(memoryview(header)[DEMAND_CRC_FROM:]))
    return crc.to_bytes(DEMAND_CRC_FROM, "little") + header[DEMAND_CRC_FROM:] + body


class VectorState(enum.Enum):
    """What a slot holds, from the point of view of who expects a vector in it."""

    EMPTY = "empty"
    TORN = "torn"
    FOREIGN_EPOCH = "foreign epoch"
    WRONG_SOURCE = "wrong source"
    OTHER_TARGET = "other target"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Peeked:
    """A slot as it is; fields other than ``state`` mean something only where the CRC holds (not EMPTY, not TORN)."""

    state: VectorState
    epoch: int = 0
    target: Target | None = None
    source: int = -1
    phase: Phase | None = None
    total: int = 0
    """Sum of the counts: token-expert pairs."""


class Mailbox:
    """The owner's side: takes vectors out of slots. Holds no state of its own."""

    __slots__ = ("_buffer", "_epoch", "_layout")

    def __init__(self, buffer: memoryview, layout: MailboxLayout, epoch: int) -> None:
        """Writes the region's header. Raises ``WireError`` for a region that is too small or has another header."""
        if buffer.nbytes < layout.nbytes:
            raise WireError(OWNER, f"the region has {buffer.nbytes} bytes, the layout needs {layout.nbytes}")
        self._buffer = buffer.cast("B")[: layout.nbytes]
        self._layout = layout
        self._epoch = epoch
        header = MAILBOX_HEADER.pack(
            records.MAILBOX_MAGIC,
            records.RECORDS_VERSION,
            layout.num_attention,
            layout.num_microbatches,
            layout.num_experts,
            epoch,
        )
        present = bytes(self._buffer[: len(header)])
        if any(present) and present != header:
            raise WireError(OWNER, "the region is another mailbox already", "register a new region for each epoch")
        self._buffer[: len(header)] = header

    def take(self, attention: int, microbatch: int, expected: Target) -> DemandVector | None:
        """A copy of demand [E] (int32) of ``attention`` when its slot holds that of ``expected``; None otherwise."""
        raw = self._copy(attention, microbatch)
        crc, num_experts, epoch, target, source, _ = DEMAND_HEADER.unpack_from(raw)
        if (
            target != expected.word()
            or epoch != self._epoch
            or source != attention
            or num_experts != self._layout.num_experts
            or crc != zlib.crc32(memoryview(raw)[DEMAND_CRC_FROM:])
        ):
            return None
        return np.frombuffer(raw, dtype=COUNT_DTYPE, offset=DEMAND_HEADER.nbytes).copy()

    @property
    def layout(self) -> MailboxLayout:
        """Its shape."""
        return self._layout

    def words32(self) -> npt.NDArray[np.uint32]:
        """The region's words, for a compiled reader (``entry_core.take_vector``)."""
        return np.frombuffer(self._buffer, np.uint32)

    def peek(self, attention: int, microbatch: int, expected: Target | None = None) -> Peeked:
        """What the slot holds and why it counts or not; without ``expected`` every target of the microbatch is OK."""
        return peek_vector(
            self._copy(attention, microbatch), self._layout, attention, microbatch, self._epoch, expected
        )

    def release(self) -> None:
        """Lets go of the memory, so that its region can be closed."""
        self._buffer.release()

    def _copy(self, attention: int, microbatch: int) -> bytes:
        # One private copy: checking and then using the slot itself would let a write slip in between.
        offset = self._layout.offset(attention, microbatch)
        return bytes(self._buffer[offset : offset + self._layout.vector_nbytes])


def peek_vector(
    raw: bytes, layout: MailboxLayout, attention: int, microbatch: int, epoch: int, expected: Target | None = None
) -> Peeked:
    """Judges the bytes of slot (attention, microbatch): for inspection, beside a mailbox or without one."""
    crc, num_experts, its_epoch, target_word, source, phase = DEMAND_HEADER.unpack_from(raw)
    if not any(raw):
        return Peeked(VectorState.EMPTY)
    if crc != zlib.crc32(memoryview(raw)[DEMAND_CRC_FROM:]) or num_experts != layout.num_experts:
        return Peeked(VectorState.TORN)
    try:
        target = Target.from_word(target_word)
        its_phase = Phase(phase)
    except ValueError:
        return Peeked(VectorState.TORN)
    if its_epoch != epoch:
        state = VectorState.FOREIGN_EPOCH
    elif source != attention:
        state = VectorState.WRONG_SOURCE
    elif target.microbatch != microbatch or (expected is not None and target != expected):
        state = VectorState.OTHER_TARGET
    else:
        state = VectorState.OK
    counts = np.frombuffer(raw, dtype=COUNT_DTYPE, offset=DEMAND_HEADER.nbytes)
    return Peeked(state, its_epoch, target, source, its_phase, int(counts.sum()))


def read_header(buffer: memoryview) -> tuple[MailboxLayout, int]:
    """(layout, epoch) of the mailbox in ``buffer``. Raises ``WireError`` (no mailbox, or not all of it), ``VersionMismatch``."""
    fields: dict[str, Any] = MAILBOX_HEADER.read(buffer) if len(buffer) >= MAILBOX_HEADER.nbytes else {}
    if fields.get("magic") != records.MAILBOX_MAGIC:
        raise WireError(OWNER, "there is no mailbox in this region", "its owner writes the header when it starts")
    if fields["version"] != records.RECORDS_VERSION:
        raise VersionMismatch(
            OWNER, f"is of version {fields['version']}, this program of {records.RECORDS_VERSION}", "use one release"
        )
    try:
        layout = MailboxLayout(fields["num_attention"], fields["num_microbatches"], fields["num_experts"])
    except ValueError as error:
        raise WireError(OWNER, f"its header makes no sense: {error}") from None
    if len(buffer) < layout.nbytes:
        raise WireError(OWNER, f"its header asks for {layout.nbytes} bytes, the region has {len(buffer)}")
    return layout, fields["epoch"]
