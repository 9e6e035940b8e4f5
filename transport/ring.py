"""The plan ring: one writer, N readers, one region of shared memory; its sequence number is the one execution order.

Life of a slot: the writer fills the entry and stores ``published`` last, with release. Each reader copies the entry out and checks
it, stores its verdict, and after a full fence looks at all verdicts: of those who store last, at least one sees the set complete
and rings the others. Once it has acted, it moves its cursor; the slot is written again only after all cursors have moved past it.
No I/O, no clock: stamps are passed in, in nanoseconds of one host's monotonic clock.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from afore.core.errors import PlanError, WireError
from afore.core.plan import PlanEntry, Verdict
from afore.transport import records
from afore.transport.entry import EntryCodec, Refusal
from afore.transport.publish import full_fence, load_every, publishing_words
from afore.transport.records import CACHE_LINE, READER_LINE, SLOT_LINE, VERDICT_BITS, WORD, align
from afore.transport.ring_layout import OWNER, RingHeader, RingLayout, check_header, entry_dtype, write_header

_VERDICTS = {int(verdict): verdict for verdict in Verdict}
_VERDICT_MASK = (1 << VERDICT_BITS) - 1
_STAMP = SLOT_LINE.offsets["stamp_ns"] // WORD
_LEASE = READER_LINE.offsets["stamp_ns"] // WORD


def copy_in(buffer: memoryview, offset: int, data: bytes | memoryview) -> None:
    """Bytes into shared memory, in no particular order."""
    buffer[offset : offset + len(data)] = data


def copy_out(buffer: memoryview, offset: int, nbytes: int) -> bytes:
    """A private copy of bytes of shared memory, read in no particular order."""
    return bytes(buffer[offset : offset + nbytes])


@dataclass(frozen=True, slots=True)
class ReaderLag:
    """A reader with entries before it."""

    rank: int
    behind: int
    """Entries it has not moved past."""
    lease_age_ns: int
    """How long it could have moved and did not: since its last sign of life, or since its next entry was published."""


def _meaning(cell: int, sequence: int) -> Verdict:
    """The verdict on ``sequence`` in a cell."""
    if cell >> VERDICT_BITS != sequence + 1:
        return Verdict.NONE
    # A verdict that nobody can have stored refuses: never read damage as consent.
    return _VERDICTS.get(cell & _VERDICT_MASK, Verdict.BAD_CRC)


class _Ring:
    """What writer and readers share: the memory, and where its words are."""

    __slots__ = (
        "_buffer",
        "_codec",
        "_entry_nbytes",
        "_layout",
        "_num_slots",
        "_reader_word",
        "_slot_words",
        "_slots_word",
        "_unanimous",
        "_verdicts_span",
        "_verdicts_word",
        "_words",
    )

    def __init__(self, buffer: memoryview, layout: RingLayout, codec: EntryCodec | None = None) -> None:
        if buffer.nbytes < layout.nbytes:
            raise WireError(OWNER, f"the region has {buffer.nbytes} bytes, the layout needs {layout.nbytes}")
        self._layout = layout
        self._buffer = buffer.cast("B")[: layout.nbytes]
        self._words = publishing_words(self._buffer)
        self._codec = codec or EntryCodec(layout.limits)
        self._entry_nbytes = layout.entry_nbytes
        self._reader_word = layout.reader_offset(0) // WORD
        self._slots_word = layout.slots_offset // WORD
        self._slot_words = layout.slot_nbytes // WORD
        self._num_slots = layout.num_slots
        self._verdicts_word = (CACHE_LINE + layout.entry_nbytes) // WORD
        self._verdicts_span = layout.num_readers * (CACHE_LINE // WORD)
        self._unanimous = (Verdict.ACCEPTED,) * layout.num_readers

    @property
    def layout(self) -> RingLayout:
        """The ring's shape."""
        return self._layout

    def release(self) -> None:
        """Lets go of the memory, so that its region can be unmapped. The ring must not be used afterwards."""
        self._words.release()
        self._buffer.release()

    def _slot_word(self, sequence: int) -> int:
        return self._slots_word + sequence % self._num_slots * self._slot_words

    def _cursor_word(self, rank: int) -> int:
        return self._reader_word + rank * (CACHE_LINE // WORD)

    def _verdict_word(self, sequence: int, rank: int) -> int:
        return self._slot_word(sequence) + self._verdicts_word + rank * (CACHE_LINE // WORD)

    def _verdict(self, sequence: int, rank: int) -> Verdict:
        return _meaning(self._words[self._verdict_word(sequence, rank)], sequence)

    def _cells(self, sequence: int) -> list[int]:
        """Every reader's verdict cell of the entry's slot."""
        first = self._slot_word(sequence) + self._verdicts_word
        return load_every(self._words, first, first + self._verdicts_span, CACHE_LINE // WORD)

    def _meanings(self, sequence: int) -> tuple[Verdict, ...]:
        return tuple(_meaning(cell, sequence) for cell in self._cells(sequence))


class RingWriter(_Ring):
    """The one writer (the scheduler). Creates the ring in a zeroed region; a new epoch takes a new region."""

    __slots__ = ("_epoch", "_lowest", "_next", "_seen_N", "_stamps")

    def __init__(self, buffer: memoryview, layout: RingLayout, epoch: int, *, pid: int | None = None) -> None:
        """Raises ``WireError`` for a region that is too small or has been a ring before."""
        super().__init__(buffer, layout)
        if any(self._buffer[: align(records.RING_HEADER.nbytes)]):
            raise WireError(OWNER, "the region is not empty", "register a new region for each epoch")
        write_header(self._buffer, RingHeader(layout, epoch, os.getpid() if pid is None else pid))
        self._words[0] = records.RING_MAGIC
        self._epoch = epoch
        self._next = 0
        self._lowest = 0
        self._stamps = [0] * layout.num_slots
        self._seen_N = [(0, 0)] * layout.num_readers
        """Each reader's cursor when somebody last looked, and when it had moved there."""

    @property
    def sequence(self) -> int:
        """The sequence that the next entry must carry."""
        return self._next

    def cursors(self) -> tuple[int, ...]:
        """The sequence that each reader reads next. Raises ``WireError`` when one is ahead of the writer: damaged memory."""
        cursors = tuple(self._words[self._cursor_word(rank)] for rank in range(self._layout.num_readers))
        for rank, cursor in enumerate(cursors):
            if cursor > self._next:
                raise WireError(f"ffn-{rank}", f"its ring cursor {cursor} is ahead of the writer's {self._next}")
        return cursors

    def room(self) -> bool:
        """Whether the next slot is free: every reader has moved past what it held."""
        if self._next - self._lowest >= self._layout.num_slots:
            self._lowest = min(self.cursors())
        return self._next - self._lowest < self._layout.num_slots

    def publish(self, entry: PlanEntry, *, stamp_ns: int = 0) -> None:
        """Publishes ``entry`` to all readers; ``stamp_ns`` is now, from which leases are counted.

        Raises ``PlanError`` for another sequence or epoch than the next one's, too many shares or copies, a field out of range,
        or a full ring.
        """
        self._check(entry.sequence, entry.epoch)
        self._store(self._codec.encode(entry), stamp_ns)

    def new_record(self) -> npt.NDArray[np.void]:
        """A zeroed private record [1] of ``entry_dtype`` for ``publish_record``; reuse it."""
        return np.zeros(1, dtype=entry_dtype(self._layout))

    def publish_record(self, record: npt.NDArray[Any], *, stamp_ns: int = 0) -> None:
        """Publishes a record [1] that a compiled core filled (all but magic, A and CRCs). Raises ``PlanError`` as ``publish``.

        Ranges are the core's promise here; readers check them.
        """
        self._check(int(record[0]["sequence"]), int(record[0]["epoch"]))
        self._store(self._codec.seal(record), stamp_ns)

    def words64(self) -> npt.NDArray[np.uint64]:
        """The region's words, for a compiled writer (``entry_core``), which tells ``published`` afterwards."""
        return np.frombuffer(self._buffer, np.uint64)

    def published(self, stamp_ns: int) -> None:
        """A compiled writer has published the entry of ``sequence`` in its slot."""
        self._stamps[self._next % self._layout.num_slots] = stamp_ns
        self._next += 1

    def raw_entry(self, sequence: int) -> memoryview:
        """The bytes of an entry that the ring still holds, for its mirrors; valid until ``room`` lets its slot be reused."""
        offset = self._layout.entry_offset(sequence)
        return self._buffer[offset : offset + self._entry_nbytes]

    def peek_entry(self, sequence: int) -> PlanEntry:
        """An entry that the ring still holds, decoded: for records of what a compiled writer wrote. Raises ``PlanError``."""
        raw = copy_out(self._buffer, self._layout.entry_offset(sequence), self._entry_nbytes)
        decoded = self._codec.decode(raw, sequence, self._epoch)
        if isinstance(decoded, Refusal):
            raise PlanError(f"entry {sequence} {decoded.reason}")
        return decoded

    def verdicts(self, sequence: int) -> tuple[Verdict, ...]:
        """What each reader has said so far. Raises ``PlanError`` once the slot is reused, and for a sequence not yet published."""
        if not self._next - self._layout.num_slots <= sequence < self._next or sequence < 0:
            raise PlanError(f"sequence {sequence} is not in the ring, whose next is {self._next}")
        return self._meanings(sequence)

    def lagging(self, now_ns: int) -> list[ReaderLag]:
        """Readers that have entries before them, the longest silent first.

        A reader of another node stamps nothing, since its clock is another: there, moving is what is seen of it.
        """
        lags = []
        for rank, cursor in enumerate(self.cursors()):
            if cursor != self._seen_N[rank][0]:
                self._seen_N[rank] = (cursor, now_ns)
            if cursor < self._next:
                stamp_ns = self._words[self._cursor_word(rank) + _LEASE] or self._seen_N[rank][1]
                since_ns = max(stamp_ns, self._stamps[cursor % self._layout.num_slots])
                lags.append(ReaderLag(rank, self._next - cursor, now_ns - since_ns))
        return sorted(lags, key=lambda lag: (-lag.lease_age_ns, lag.rank))

    def _check(self, sequence: int, epoch: int) -> None:
        if sequence != self._next or epoch != self._epoch:
            raise PlanError(
                f"entry {sequence} of epoch {epoch} is out of turn: the ring's next is {self._next} of epoch {self._epoch}"
            )
        if not self.room():
            behind, slowest = max((self._next - cursor, rank) for rank, cursor in enumerate(self.cursors()))
            raise PlanError(
                f"the plan ring is full: ffn-{slowest} is {behind} entries behind; "
                "wait for room, or raise ring.num_slots"
            )

    def _store(self, raw: bytes | memoryview, stamp_ns: int) -> None:
        slot = self._slot_word(self._next)
        copy_in(self._buffer, slot * WORD + CACHE_LINE, raw)
        self._words[slot + _STAMP] = stamp_ns
        self._words[slot] = self._next + 1
        self.published(stamp_ns)


class RingReader(_Ring):
    """One reader (FFN worker ``rank``): sees every entry once, in sequence."""

    __slots__ = ("_epoch", "_next", "_rank")

    def __init__(
        self, buffer: memoryview, layout: RingLayout, rank: int, epoch: int, *, codec: EntryCodec | None = None
    ) -> None:
        """``codec``: one that readers share; none: its own.

        Raises ``WireError`` (no ring, another layout), ``VersionMismatch``, ``RegionRevoked`` (another epoch's ring).
        """
        super().__init__(buffer, layout, codec)
        check_header(self._buffer, layout, epoch)
        assert 0 <= rank < layout.num_readers
        self._rank = rank
        self._epoch = epoch
        self._next = self._words[self._cursor_word(rank)]

    @property
    def sequence(self) -> int:
        """The sequence that it reads next."""
        return self._next

    def peek(self) -> PlanEntry | Refusal | None:
        """The entry of the next sequence, or why it must be refused, or None before it is published.

        Where the ring is mirrored by writes whose bytes land in any order, a refusal before the write's notification may pass:
        peek again after it.
        """
        sequence = self._next
        published = self._words[self._slot_word(sequence)]
        if published <= sequence:
            return None
        if published != sequence + 1:
            reason = f"its slot already holds sequence {published - 1}"
            return Refusal(Verdict.OUT_OF_ORDER, sequence, reason)
        entry_at = self._slot_word(sequence) * WORD + CACHE_LINE
        raw = copy_out(self._buffer, entry_at, self._codec.used_nbytes(self._buffer, entry_at))
        return self._codec.decode(raw, sequence, self._epoch)

    def store_verdict(self, sequence: int, verdict: Verdict) -> bool:
        """Says what this reader found of its next entry; whether all verdicts are there now.

        At least one reader gets True for each sequence (several may): it rings the others, who may be waiting.
        """
        assert sequence == self._next, f"reader {self._rank} judges {sequence} but is at {self._next}"
        words, at = self._words, self._verdict_word(sequence, self._rank)
        assert words[self._slot_word(sequence)] > sequence, "others may still read this cell's last verdict"
        assert verdict is not Verdict.NONE
        assert _meaning(words[at], sequence) in (Verdict.NONE, verdict), "a verdict is final"
        words[at] = (sequence + 1) << VERDICT_BITS | verdict
        # Without it both of two last readers could look before the other's store is visible, and nobody would ring.
        full_fence()
        return self.judged(sequence)

    def verdicts(self, sequence: int) -> tuple[Verdict, ...]:
        """What each reader has said of an entry that this one has not moved past. Raises ``PlanError`` for an earlier one."""
        if sequence < self._next:
            raise PlanError(f"reader {self._rank} has moved past sequence {sequence}: its slot may be reused")
        return self._meanings(sequence)

    def judged(self, sequence: int) -> bool:
        """Whether all readers have said what they found of an entry that this one has not moved past."""
        return self.all_verdicts(sequence) is not None

    def all_verdicts(self, sequence: int) -> tuple[Verdict, ...] | None:
        """``verdicts`` once all readers have said what they found of it; None before."""
        cells = self._cells(sequence)
        # N readers look at N cells for every entry, which nearly always say the same.
        if cells.count((sequence + 1) << VERDICT_BITS | Verdict.ACCEPTED) == len(cells):
            return self._unanimous
        if not min(cells) >> VERDICT_BITS == max(cells) >> VERDICT_BITS == sequence + 1:
            return None
        return tuple(_meaning(cell, sequence) for cell in cells)

    def advance(self, stamp_ns: int) -> None:
        """Moves past the next entry: its slot may be reused once all have. The reader has judged it and used its copies."""
        assert self._verdict(self._next, self._rank) is not Verdict.NONE, "move past an entry only after judging it"
        self.touch(stamp_ns)
        self._next += 1
        self._words[self._cursor_word(self._rank)] = self._next

    def touch(self, stamp_ns: int) -> None:
        """Renews the lease without moving: the reader lives and waits for something else."""
        self._words[self._cursor_word(self._rank) + _LEASE] = stamp_ns
