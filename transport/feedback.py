"""What each target cost, written one-sided by the FFN workers into the scheduler's region: a small ring of records for each.

The writer never waits: a reader that comes too late finds the oldest records overwritten, and counts them.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from afore.core.errors import ConfigError, WireError
from afore.core.record import record
from afore.core.target import Target
from afore.transport.publish import publishing_words
from afore.transport.records import FEEDBACK, FEEDBACK_CRC_FROM, FEEDBACK_NBYTES, WORD

_CRC_BYTES = FEEDBACK_CRC_FROM
_NUMBER_WORD = FEEDBACK.offsets["number"] // WORD


class FeedbackFlags(enum.IntFlag):
    """Why a record was written, and what happened to its target."""

    NONE = 0
    """The target was executed as planned."""
    INPUTS = 1
    """Its inputs have come; it is not executed yet (for policies that ask for this event)."""
    MISSING = 2
    """Its inputs passed their deadline; it waits for an abort."""
    REFUSED = 4
    """Its plan was refused."""
    PRIMARIES = 8
    """It ran on primaries alone though its plan said otherwise."""


@record(kw_only=True)
class FeedbackRecord:
    """One worker's report on one target."""

    epoch: int
    sequence: int
    """Ring sequence of the target's entry."""
    worker: int
    """Rank of the FFN worker."""
    target: Target
    tile_us: float = 0.0
    """Compute time of one tile; 0 without tiles."""
    copy_us: float = 0.0
    """What one copy kept this worker's port busy, for M(Δ); 0 without copies. D is ``window_us - slack_us``."""
    window_us: float = 0.0
    """W: from the copies' submission to the model stream's wait for them; without copies from when they could have been."""
    exposed_us: float = 0.0
    """O = max(0, D - W)."""
    slack_us: float = 0.0
    """W - D."""
    copies: int = 0
    """Copies into this worker's slots."""
    tiles: int = 0
    """Tiles it computed."""
    pairs: int = 0
    """Token-expert pairs it computed."""
    replica_pairs: int = 0
    """Those of them that ran on redundant replicas."""
    flags: FeedbackFlags = FeedbackFlags.NONE


@dataclass(frozen=True, slots=True)
class FeedbackLayout:
    """Shape of the feedback region: ``depth`` records for each of N workers."""

    num_workers: int
    """N: FFN workers."""
    depth: int = 64
    """Records that a worker can be ahead of the scheduler before it overwrites its oldest."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers < 1 << 31 or not 2 <= self.depth < 1 << 31:
            raise ConfigError("feedback", f"{self.num_workers} workers and depth {self.depth} are not at least 1 and 2")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region."""
        return self.num_workers * self.depth * FEEDBACK_NBYTES

    def offset(self, worker: int, number: int) -> int:
        """Where a worker's ``number``-th record (from 1) goes."""
        assert 0 <= worker < self.num_workers
        assert number >= 1
        return (worker * self.depth + (number - 1) % self.depth) * FEEDBACK_NBYTES


class FeedbackWriter:
    """One worker's side: numbers its records and says where each goes."""

    __slots__ = ("_layout", "_number", "_worker")

    def __init__(self, layout: FeedbackLayout, worker: int) -> None:
        assert 0 <= worker < layout.num_workers
        self._layout = layout
        self._worker = worker
        self._number = 0

    def next(self, record: FeedbackRecord) -> tuple[int, bytes]:
        """(offset, bytes) of the one-sided write of ``record``, which must be sent: the next one takes the next number."""
        assert record.worker == self._worker
        self._number += 1
        packed = FEEDBACK.pack(
            0,
            record.worker,
            self._number,
            record.epoch,
            record.sequence,
            record.target.word(),
            record.tile_us,
            record.copy_us,
            record.window_us,
            record.exposed_us,
            record.slack_us,
            record.copies,
            record.tiles,
            record.pairs,
            record.replica_pairs,
            record.flags,
            0,
        )
        crc = zlib.crc32(memoryview(packed)[FEEDBACK_CRC_FROM:])
        return self._layout.offset(self._worker, self._number), crc.to_bytes(_CRC_BYTES, "little") + packed[_CRC_BYTES:]


class FeedbackReader:
    """The scheduler's side: takes every record once, in each worker's order, and counts what it could not take."""

    __slots__ = ("_buffer", "_epoch", "_last", "_layout", "_next", "_words", "foreign", "overrun", "torn")

    def __init__(self, buffer: memoryview, layout: FeedbackLayout, epoch: int) -> None:
        """Raises ``WireError`` for a region that is too small."""
        if buffer.nbytes < layout.nbytes:
            raise WireError(
                "scheduler", f"the feedback region has {buffer.nbytes} bytes, the layout needs {layout.nbytes}"
            )
        self._buffer = buffer.cast("B")[: layout.nbytes]
        self._words = publishing_words(self._buffer)
        self._layout = layout
        self._epoch = epoch
        self._next = [1] * layout.num_workers
        self._last = (0, Target(0, 0, 0))
        """The last record's target and its word: N workers report on the same."""
        self.overrun = 0
        """Records that were overwritten before they were read."""
        self.torn = 0
        """Records that are damaged or never landed, though later ones have come."""
        self.foreign = 0
        """Whole records of another epoch, worker or version of the target word."""

    @property
    def taken_N(self) -> list[int]:
        """How many of each worker's records are behind the reader, taken or lost."""
        return [number - 1 for number in self._next]

    def take_all(self, workers: Iterable[int] | None = None) -> list[FeedbackRecord]:
        """All records (of these workers) that have come since the last call, by worker, then in order."""
        records: list[FeedbackRecord] = []
        for worker in range(self._layout.num_workers) if workers is None else workers:
            while True:
                number = self._next[worker]
                # Two loads say that nothing has come, which is what most calls find; the second sees past a lost record.
                if self._number_at(worker, number) < number and self._number_at(worker, number + 1) <= number:
                    break
                if not self._take(worker, number, records):
                    break
        return records

    def release(self) -> None:
        """Lets go of the memory, so that its region can be closed."""
        self._words.release()
        self._buffer.release()

    def _take(self, worker: int, number: int, records: list[FeedbackRecord]) -> bool:
        """Takes record ``number`` or skips what is lost; False to look again later."""
        fields = self._whole(worker, number)
        if fields is not None and fields[2] == number:
            self._next[worker] += 1
            record = self._record(worker, fields)
            if record is None:
                self.foreign += 1
            else:
                records.append(record)
            return True
        # Overwritten, torn for good, or still landing: what the other slots hold tells which.
        later = [n for n in self._numbers(worker) if n > number]
        if not later:
            return False
        self._next[worker] = min(later)
        lost = min(later) - number
        if max(later) >= number + self._layout.depth:
            self.overrun += lost
        else:
            self.torn += lost
        return True

    def _number_at(self, worker: int, number: int) -> int:
        return self._words[self._layout.offset(worker, number) // WORD + _NUMBER_WORD]

    def _numbers(self, worker: int) -> list[int]:
        """Numbers of all whole records of a worker's ring."""
        found = (self._whole(worker, slot + 1) for slot in range(self._layout.depth))
        return [int(fields[2]) for fields in found if fields is not None and fields[2] > 0]

    def _whole(self, worker: int, number: int) -> tuple[int, ...] | None:
        """The fields in the slot of ``number`` where their CRC holds and the number belongs there."""
        offset = self._layout.offset(worker, number)
        raw = bytes(self._buffer[offset : offset + FEEDBACK.nbytes])
        fields = FEEDBACK.unpack_from(raw)
        if fields[0] != zlib.crc32(memoryview(raw)[FEEDBACK_CRC_FROM:]):
            return None
        if (fields[2] - number) % self._layout.depth:
            return None
        return fields

    def _record(self, worker: int, fields: tuple[int, ...]) -> FeedbackRecord | None:
        _, its_worker, _, epoch, sequence, word, *rest = fields
        tile_us, copy_us, window_us, exposed_us, slack_us, copies, tiles, pairs, replica_pairs, flags, _ = rest
        if word != self._last[0]:
            try:
                self._last = (word, Target.from_word(word))
            except ValueError:
                return None
        if epoch != self._epoch or its_worker != worker:
            return None
        return FeedbackRecord(
            epoch=epoch,
            sequence=sequence,
            worker=worker,
            target=self._last[1],
            tile_us=tile_us,
            copy_us=copy_us,
            window_us=window_us,
            exposed_us=exposed_us,
            slack_us=slack_us,
            copies=copies,
            tiles=tiles,
            pairs=pairs,
            replica_pairs=replica_pairs,
            flags=FeedbackFlags(flags) if flags else FeedbackFlags.NONE,
        )
