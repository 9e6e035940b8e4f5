"""Plan entries to ring bytes and back: checksums, ranges, and what is left of an entry whose plan cannot be trusted.

``tokens_A`` has shape [A]. The byte layout is ``records.ring_entry_dtype``; nothing here touches shared memory.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from afore.core.errors import PlanError
from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share, Verdict
from afore.core.record import record
from afore.core.target import Phase, Target
from afore.transport import records
from afore.transport.records import COPY, ENTRY_CRC_FROM, ENTRY_HEADER, ENTRY_MAGIC, SHARE

INT32_MAX = (1 << 31) - 1
_KINDS = {int(kind): kind for kind in EntryKind}
_PHASES = {int(phase): phase for phase in Phase}
_STARTS = {int(start): start for start in CopyStart}
_WORD32 = struct.Struct("<I")
_NUM_SHARES = ENTRY_HEADER.offsets["num_shares"]
_NEW_SHARE = object.__new__
_SHARE_SETTERS = tuple(getattr(Share, field.name).__set__ for field in dataclasses.fields(Share))


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryLimits:
    """What an entry of one ring may hold; anything beyond is refused by writer and reader alike."""

    num_readers: int
    """N: FFN workers."""
    num_attention: int
    """A: attention workers."""
    max_shares: int
    """Most shares of an entry."""
    max_copies: int
    """Most copies of an entry."""
    num_experts: int
    """E: experts are below it."""
    num_redundant: int
    """Most redundant slots of a worker: slots are below it."""


@record
class Refusal:
    """A published entry that must not be used: the verdict it deserves, and why."""

    verdict: Verdict
    sequence: int
    reason: str
    entry: PlanEntry | None = None
    """The entry without shares and copies where its header is intact: the target then runs on primaries. None: not even that."""


class EntryCodec:
    """Encodes and decodes the entries of one ring."""

    __slots__ = (
        "_copies_at",
        "_copy_structs",
        "_header_end",
        "_share_structs",
        "_shares_at",
        "_tokens",
        "dtype",
        "limits",
    )

    def __init__(self, limits: EntryLimits) -> None:
        self.limits = limits
        self.dtype = records.ring_entry_dtype(limits.num_attention, limits.max_copies, limits.max_shares)
        fields: Any = self.dtype.fields
        self._copies_at: int = fields["copies"][1]
        self._shares_at: int = fields["shares"][1]
        self._header_end = ENTRY_HEADER.nbytes + 4 * limits.num_attention
        self._tokens = struct.Struct(f"<{limits.num_attention}i")
        self._copy_structs: dict[int, struct.Struct] = {}
        self._share_structs: dict[int, struct.Struct] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that an entry takes in its slot."""
        return self.dtype.itemsize

    def _copies(self, count: int) -> struct.Struct:
        found = self._copy_structs.get(count)
        return found or self._copy_structs.setdefault(count, struct.Struct("<" + records.COPY_CODE * count))

    def _shares(self, count: int) -> struct.Struct:
        found = self._share_structs.get(count)
        return found or self._share_structs.setdefault(count, struct.Struct("<" + records.SHARE_CODE * count))

    def encode(self, entry: PlanEntry) -> memoryview:
        """The used prefix of the entry's bytes. Raises ``PlanError`` for an entry that a reader would refuse."""
        shares, copies = entry.shares, entry.copies
        flat_copies = [value for c in copies for value in (c.layer, c.expert, c.worker, c.slot)]
        flat_shares = [v for s in shares for v in (s.expert, s.worker, s.slot, s.count, s.generation)]
        problem = (
            self._header_problem(entry.kind, entry.sequence, entry.tokens_A, entry.cancels, entry.demand_crc)
            or self._count_problem(entry.kind, len(copies), len(shares))
            or self._body_problem(flat_copies, flat_shares, entry.sequence)
        )
        if problem:
            raise PlanError(f"entry {entry.sequence} ({entry.kind.name} {entry.target}) {problem}")
        raw = bytearray(self._shares_at + SHARE.nbytes * len(shares))
        if entry.tokens_A:
            self._tokens.pack_into(raw, ENTRY_HEADER.nbytes, *entry.tokens_A)
        try:
            self._copies(len(copies)).pack_into(raw, self._copies_at, *flat_copies)
            self._shares(len(shares)).pack_into(raw, self._shares_at, *flat_shares)
        except struct.error:
            raise PlanError(f"entry {entry.sequence} ({entry.target}) has a negative or oversized number") from None
        view = memoryview(raw)
        ENTRY_HEADER.pack_into(
            raw,
            0,
            ENTRY_MAGIC,
            0,
            self._body_crc(view, len(copies), len(shares)),
            entry.kind,
            entry.phase,
            entry.start,
            0,
            entry.epoch,
            entry.sequence,
            entry.target.word(),
            entry.cancels,
            entry.demand_crc,
            len(shares),
            len(copies),
            len(entry.tokens_A),
        )
        self._seal_header(view)
        return view

    def seal(self, record: npt.NDArray[np.void]) -> memoryview:
        """Fills magic, A and both CRCs of a record [1] of ``dtype`` that a compiled core filled; returns its used prefix."""
        raw = record.view(np.uint8).data
        entry = record[0]
        num_copies, num_shares = int(entry["num_copies"]), int(entry["num_shares"])
        if num_copies > self.limits.max_copies or num_shares > self.limits.max_shares:
            raise PlanError(self._count_problem(EntryKind.PLAN, num_copies, num_shares))
        entry["magic"] = ENTRY_MAGIC
        entry["num_attention"] = self.limits.num_attention
        end = self._shares_at + SHARE.nbytes * num_shares
        entry["body_crc"] = self._body_crc(raw, num_copies, num_shares)
        self._seal_header(raw)
        return raw[:end]

    def used_nbytes(self, buffer: memoryview, offset: int) -> int:
        """Bytes of the entry at ``offset`` up to its last share: what has to be copied out of its slot.

        By its header as it stands there: ``decode`` finds out whether it was the entry's.
        """
        shares: int
        (shares,) = _WORD32.unpack_from(buffer, offset + _NUM_SHARES)
        return min(self._shares_at + SHARE.nbytes * shares, self.dtype.itemsize)

    def decode(self, raw: bytes, sequence: int, epoch: int) -> PlanEntry | Refusal:
        """The entry in ``raw``, or why it must not be used as ``sequence`` of ``epoch``.

        ``raw``: a private copy of its slot, or of ``used_nbytes`` of it.
        """
        (
            entry_magic,
            header_crc,
            body_crc,
            kind_code,
            phase_code,
            start_code,
            _,
            its_epoch,
            its_sequence,
            target_word,
            cancels,
            demand_crc,
            num_shares,
            num_copies,
            num_attention,
        ) = ENTRY_HEADER.unpack_from(raw)
        limits = self.limits
        if entry_magic != ENTRY_MAGIC or header_crc != zlib.crc32(memoryview(raw)[ENTRY_CRC_FROM : self._header_end]):
            return Refusal(Verdict.BAD_CRC, sequence, "its header does not match its CRC")
        if its_epoch != epoch:
            return Refusal(Verdict.FOREIGN_EPOCH, sequence, f"it belongs to epoch {its_epoch}, not {epoch}")
        if its_sequence != sequence:
            return Refusal(Verdict.OUT_OF_ORDER, sequence, f"it carries sequence {its_sequence}, not {sequence}")
        kind, phase, start = _KINDS.get(kind_code), _PHASES.get(phase_code), _STARTS.get(start_code)
        tokens_A = self._tokens.unpack_from(raw, ENTRY_HEADER.nbytes)[:num_attention]
        try:
            target = Target.from_word(target_word)
        except ValueError:
            target = None
        if kind is None or phase is None or start is None or target is None or num_attention > limits.num_attention:
            return Refusal(Verdict.BAD_CRC, sequence, "has a header field without a meaning here")
        problem = self._header_problem(kind, sequence, tokens_A, cancels, demand_crc)
        if problem:
            return Refusal(Verdict.BAD_CRC, sequence, problem)
        copies: tuple[Copy, ...] = ()
        shares: tuple[Share, ...] = ()
        problem = self._count_problem(kind, num_copies, num_shares)
        if not problem and self._shares_at + SHARE.nbytes * num_shares > len(raw):
            problem = "has more shares than its header said when it was copied"
        if not problem and body_crc != self._body_crc(memoryview(raw), num_copies, num_shares):
            problem = "has copies and shares that do not match their CRC"
        if not problem:
            flat_copies = self._copies(num_copies).unpack_from(raw, self._copies_at)
            flat_shares = self._shares(num_shares).unpack_from(raw, self._shares_at)
            problem = self._body_problem(flat_copies, flat_shares, sequence)
            if not problem:
                copies = tuple(map(Copy, *(flat_copies[field::4] for field in range(4))))
                shares = _shares_of(flat_shares, num_shares)
        entry = PlanEntry(
            kind, its_epoch, sequence, target, phase, tokens_A, demand_crc, shares, copies, start, cancels
        )
        return Refusal(Verdict.BAD_CRC, sequence, problem, entry) if problem else entry

    def _seal_header(self, raw: memoryview) -> None:
        crc = zlib.crc32(raw[ENTRY_CRC_FROM : self._header_end])
        struct.pack_into("<I", raw, ENTRY_HEADER.offsets["header_crc"], crc)

    def _body_crc(self, raw: memoryview, num_copies: int, num_shares: int) -> int:
        copies_crc = zlib.crc32(raw[self._copies_at : self._copies_at + COPY.nbytes * num_copies])
        return zlib.crc32(raw[self._shares_at : self._shares_at + SHARE.nbytes * num_shares], copies_crc)

    def _header_problem(
        self, kind: EntryKind, sequence: int, tokens_A: tuple[int, ...], cancels: int, demand_crc: int
    ) -> str:
        if len(tokens_A) != self.limits.num_attention and (tokens_A or kind is EntryKind.PLAN):
            return f"has tokens of {len(tokens_A)} attention workers; the ring is for {self.limits.num_attention}"
        if tokens_A and (min(tokens_A) < 0 or max(tokens_A) > INT32_MAX):
            return f"has impossible token counts {tokens_A}"
        if kind is EntryKind.ABORT:
            if not 0 <= cancels < sequence:
                return f"cancels sequence {cancels}, which is not before it"
        elif cancels != -1:
            return f"cancels sequence {cancels}, but is no ABORT"
        if not 0 <= demand_crc < 1 << 32:
            return f"has an impossible demand CRC {demand_crc}"
        return ""

    def _count_problem(self, kind: EntryKind, num_copies: int, num_shares: int) -> str:
        limits = self.limits
        if num_shares > limits.max_shares or num_copies > limits.max_copies:
            return (
                f"has {num_shares} shares and {num_copies} copies; the ring holds {limits.max_shares} and "
                f"{limits.max_copies}: raise max_shares or max_copies of its layout"
            )
        if (kind is EntryKind.ABORT and (num_shares or num_copies)) or (kind is EntryKind.COPIES and num_shares):
            return f"has {num_shares} shares and {num_copies} copies, which {kind.name} cannot have"
        return ""

    def _body_problem(self, copies: Sequence[int], shares: Sequence[int], sequence: int) -> str:
        """Upper ends of flat (layer, expert, worker, slot)… and (expert, worker, slot, count, generation)…

        The lower ends hold by themselves: int32 fields are packed and unpacked unsigned.
        """
        limits = self.limits
        experts, workers, slots = limits.num_experts, limits.num_readers, limits.num_redundant
        if copies and not (
            max(copies[0::4]) <= INT32_MAX
            and max(copies[1::4]) < experts
            and max(copies[2::4]) < workers
            and max(copies[3::4]) < slots
        ):
            return "has a copy of an expert, worker, slot or layer that cannot be"
        if shares and not (
            max(shares[0::5]) < experts
            and max(shares[1::5]) < workers
            and max(shares[2::5]) < slots
            and min(shares[3::5]) > 0
            and max(shares[3::5]) <= INT32_MAX
            and min(shares[4::5]) >= -1
            and max(shares[4::5]) <= sequence
        ):
            return "has a share of an expert, worker, slot, count or generation that cannot be"
        return ""


def _shares_of(flat: Sequence[int], count: int) -> tuple[Share, ...]:
    """Shares of flat (expert, worker, slot, count, generation)…

    A frozen dataclass sets each field through a Python-level ``__init__``, which alone is most of a decode; filling the slots
    column by column makes the same objects in half the time.
    """
    shares = tuple(map(_NEW_SHARE, repeat(Share, count)))
    for field, setter in enumerate(_SHARE_SETTERS):
        deque(map(setter, shares, flat[field::5]), maxlen=0)
    return shares
