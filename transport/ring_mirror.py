"""The plan ring where FFN workers are on several nodes: a copy on each, in a region of that node's lead.

The scheduler writes each entry into every copy, one-sided; the lead publishes it on the notification, when all its bytes are there.
Readers of a node use its copy as if it were the ring: cursors and verdicts are words of their own in it. What the others must
know travels as words too: a verdict to every copy and to the scheduler's ring, a cursor to the scheduler's ring alone. Bytes of a
word that land from the lowest up never pass for a later sequence than they mean, so a torn word is an old one.
"""

from __future__ import annotations

from collections.abc import Sequence

from afore.core.errors import WireError
from afore.core.plan import Verdict
from afore.core.topology import SCHEDULER, member_name
from afore.transport import bells, records
from afore.transport.api import Link, RegionKey
from afore.transport.publish import publishing_words
from afore.transport.records import VERDICT_BITS, WORD
from afore.transport.ring_layout import OWNER, RingHeader, RingLayout, write_header

Copy = tuple[Link, RegionKey]


def word_bytes(value: int) -> bytes:
    """A word of the ring, as it is written from afar."""
    return value.to_bytes(WORD, "little")


class RingMirror:
    """The lead's side of its node's copy: makes it, publishes what has come."""

    __slots__ = ("_layout", "_next", "_words")

    def __init__(self, buffer: memoryview, layout: RingLayout, epoch: int, *, pid: int) -> None:
        """``buffer``: a zeroed region. Raises ``WireError`` for one that is too small."""
        if buffer.nbytes < layout.nbytes:
            raise WireError(OWNER, f"the mirror has {buffer.nbytes} bytes, the layout needs {layout.nbytes}")
        region = buffer.cast("B")[: layout.nbytes]
        write_header(region, RingHeader(layout, epoch, pid))
        self._words = publishing_words(region)
        self._words[0] = records.RING_MAGIC
        self._layout = layout
        self._next = 0

    def publish(self, bell: bells.Bell) -> int:
        """The scheduler's notification PLAN has come: the entry can be read. Returns its sequence. Raises ``WireError``."""
        sequence = bell.sequence(self._next)
        if sequence != self._next:
            raise WireError(
                member_name(SCHEDULER, 0), f"announces plan {sequence} where {self._next} is due", "do versions agree?"
            )
        self._words[self._layout.slot_offset(sequence) // WORD] = sequence + 1
        self._next = sequence + 1
        return sequence


class RingCopies:
    """One reader's words to the others. ``ring`` is the scheduler's; ``mirrors`` are those of the other nodes' leads."""

    def __init__(
        self, rank: int, layout: RingLayout, ring: Copy, mirrors: Sequence[Copy], *, timeout_us: float
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._ring = ring
        self._mirrors = tuple(mirrors)
        self._timeout_us = timeout_us

    async def verdict(self, sequence: int, verdict: Verdict) -> None:
        """Tells everybody. Raises ``TransportError``."""
        offset = self._layout.verdict_offset(sequence, self._rank)
        cell = word_bytes((sequence + 1) << VERDICT_BITS | verdict)
        for link, key in self._mirrors:
            await link.write(key, offset, cell, notify=bells.VERDICTS(sequence), timeout_us=self._timeout_us)
        link, key = self._ring
        await link.write(key, offset, cell, timeout_us=self._timeout_us)

    async def cursor(self, sequence: int) -> None:
        """Tells the scheduler that this reader reads ``sequence`` next. Raises ``TransportError``."""
        link, key = self._ring
        offset = self._layout.reader_offset(self._rank)
        await link.write(key, offset, word_bytes(sequence), timeout_us=self._timeout_us)
