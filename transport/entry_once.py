"""One decoding of an entry for all readers of one process that read the same bytes."""

from __future__ import annotations

from collections import deque

from afore.core.plan import PlanEntry
from afore.transport.entry import EntryCodec, EntryLimits, Refusal

_KEPT = 16
"""Entries that readers may be apart before one of them decodes for itself."""


class DecodedOnce(EntryCodec):
    """A codec that remembers the newest entries. What it hands out is shared: entries do not change."""

    __slots__ = ("_kept", "decoded")

    def __init__(self, limits: EntryLimits) -> None:
        super().__init__(limits)
        self._kept: deque[tuple[bytes, int, int, PlanEntry | Refusal]] = deque(maxlen=_KEPT)
        self.decoded = 0
        """Entries that were decoded, not remembered."""

    def decode(self, raw: bytes, sequence: int, epoch: int) -> PlanEntry | Refusal:
        """See ``EntryCodec.decode``: looked at once for the same bytes, sequence and epoch."""
        for its_raw, its_sequence, its_epoch, found in self._kept:
            if its_sequence == sequence and its_epoch == epoch and its_raw == raw:
                return found
        self.decoded += 1
        found = super().decode(raw, sequence, epoch)
        self._kept.appendleft((raw, sequence, epoch, found))
        return found


class Decoders:
    """The codecs of a process: one for each shape of entries."""

    def __init__(self) -> None:
        self._codecs: dict[EntryLimits, DecodedOnce] = {}

    @property
    def decoded(self) -> int:
        """Entries that all of them have decoded."""
        return sum(codec.decoded for codec in self._codecs.values())

    def of(self, limits: EntryLimits) -> EntryCodec:
        """The codec that all readers of such entries share."""
        found = self._codecs.get(limits)
        if found is None:
            found = self._codecs[limits] = DecodedOnce(limits)
        return found
