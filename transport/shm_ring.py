"""The ring of immediates of one shm link: one writer, one reader, fixed slots in shared memory that only the two can see.

    word 0           TAIL: entries published; written by the writer after the entry itself
    word 8           CREDITED: entries that the owner's coroutines have taken; written by the reader
    word 16          WAITING: 1 while the writer sleeps for credit; cleared by the reader before it rings
    word 24 …        entries: region number in the upper half, immediate in the lower

Each word that changes lies in a cache line of its own. Counters only grow, so nothing is lost or seen twice however seldom the
reader looks; the reader moves entries out at once, but a slot's credit returns only when the notification is taken.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Final

from afore.core.errors import WireError
from afore.transport.host import host_error
from afore.transport.publish import WORD_BYTES, full_fence, publishing_words

TAIL, CREDITED, WAITING, ENTRIES = 0, 8, 16, 24
SLOTS_LIMIT = 1 << 16
_NOTHING: Final = ()


def ring_bytes(slots: int) -> int:
    """Bytes of a ring with ``slots`` slots, whole pages."""
    return -(-(ENTRIES + slots) * WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def create_ring_fd(slots: int) -> int:
    """An anonymous, zeroed ring that cannot change its size (memfd), so that it leaves nothing behind. Raises ``HostError``."""
    try:
        fd = os.memfd_create("afore-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise host_error(error, "memory", "cannot make a ring of immediates", "see why the kernel refuses") from error
    try:
        os.posix_fallocate(fd, 0, ring_bytes(slots))
        # A shrunk file would turn the peer's next access into SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise host_error(error, "memory", f"no room for a ring of {ring_bytes(slots):,} bytes", "free some") from error
    return fd


class _Ring:
    def __init__(self, fd: int, slots: int, peer: str) -> None:
        if not 0 < slots <= SLOTS_LIMIT or slots & (slots - 1):
            raise WireError(peer, f"a ring of {slots} slots")
        if os.fstat(fd).st_size != ring_bytes(slots):
            raise WireError(peer, f"a ring of {slots} slots in {os.fstat(fd).st_size} bytes")
        self._slots = slots
        self._mask = slots - 1
        try:
            self._memory = mmap.mmap(fd, ring_bytes(slots))
        except OSError as error:
            raise host_error(error, "memory", "cannot map a ring of immediates", "free some") from error
        self._view = memoryview(self._memory)
        self._words = publishing_words(self._view)

    def close(self) -> None:
        """Unmaps the ring; not to be used afterwards."""
        self._words.release()
        self._view.release()
        self._memory.close()


class RingWriter(_Ring):
    """The writing side."""

    def __init__(self, fd: int, slots: int, peer: str) -> None:
        super().__init__(fd, slots, peer)
        self.tail = 0
        """Entries published."""
        self.limit = slots
        """While ``tail`` is below it, there is room without a look at the reader's credit."""

    def has_room(self) -> bool:
        """Whether ``push`` may be called."""
        if self.tail < self.limit:
            return True
        self.limit = self._words[CREDITED] + self._slots
        return self.tail < self.limit

    def has_room_or_announce(self) -> bool:
        """As ``has_room``; where there is none, the reader will ring once it gives credit."""
        if self.has_room():
            return True
        self._words[WAITING] = 1
        # Either we see the reader's credit below, or the reader sees our flag: not neither.
        full_fence()
        return self.has_room()

    def push(self, entry: int) -> None:
        """Publishes ``entry`` (64 bits). Only after ``has_room``."""
        tail = self.tail
        assert tail < self.limit, "push without credit"
        words = self._words
        words[ENTRIES + (tail & self._mask)] = entry
        self.tail = tail + 1
        words[TAIL] = tail + 1


class RingReader(_Ring):
    """The reading side.

    Credit goes back in batches, since a store and a fence cost as much as taking an entry. Where more than half of the ring is
    out, each slot goes back at once: a writer that sleeps has filled all of it, and ``drain`` sees that.
    """

    def __init__(self, fd: int, slots: int, peer: str) -> None:
        super().__init__(fd, slots, peer)
        self._peer = peer
        self._head = 0
        self._limit = slots
        """The tail up to which the writer has credit."""
        self._half = slots // 2
        self._quarter = max(1, slots // 4)
        self.taken = 0
        """Entries that have been taken: their slots may be given back."""
        self.due = self._quarter
        """Once so many have been taken, ``give_credit``: to be asked after each change of ``taken`` and after ``drain``."""

    def drain(self) -> Sequence[int]:
        """Every entry published since the last call, in order. Raises ``WireError`` for a ring that cannot be right."""
        words, head = self._words, self._head
        tail = words[TAIL]
        if tail == head:
            return _NOTHING
        if not head < tail <= self._limit:
            raise WireError(self._peer, f"its ring jumps from {head} to {tail} with {self._slots} slots")
        self._head = tail
        if tail > self._limit - self._half:
            self.due = self._limit - self._slots + 1
        if tail == head + 1:
            return (words[ENTRIES + (head & self._mask)],)
        mask = self._mask
        return [words[ENTRIES + (place & mask)] for place in range(head, tail)]

    def give_credit(self) -> bool:
        """Returns the slots of all that was taken to the writer; true if it sleeps and must be rung."""
        words, taken = self._words, self.taken
        words[CREDITED] = taken
        self._limit = taken + self._slots
        self.due = taken + (1 if self._head - taken > self._half else self._quarter)
        # Either we see below that the writer sleeps, or it sees our credit before it does: not neither.
        full_fence()
        if words[WAITING]:
            words[WAITING] = 0
            return True
        return False
