"""Publication in shared memory: payload first, then one aligned 64-bit word that says it is there.

On x86-64 stores become visible in program order and loads are not reordered with each other, so an aligned 8-byte store through
``memoryview.cast("Q")`` (one ``mov``) is a store-release and a load is a load-acquire. Elsewhere the stores are compiled
(``publish_atomic``, loaded on first use). Only store-then-load of *different* words needs ``full_fence``, on every machine.
"""

from __future__ import annotations

import platform
import threading
from typing import Protocol, cast

WORD_BYTES = 8
TOTAL_STORE_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether plain stores of this machine are visible in program order."""


class Words(Protocol):
    """Aligned 64-bit words in shared memory: ``words[i] = v`` is a store-release, ``words[i]`` a load-acquire."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    def __len__(self) -> int: ...

    def release(self) -> None:
        """Lets go of the memory; using the words afterwards raises ``ValueError``."""
        ...


def publishing_words(buffer: memoryview) -> Words:
    """The words of ``buffer`` (bytes, a multiple of 8 long, start aligned to 8). Raises ``ValueError`` for another length.

    On x86-64 this is the cast view itself, so that a store costs 30 ns.
    """
    if buffer.nbytes % WORD_BYTES:
        raise ValueError(
            f"buffer: {buffer.nbytes} bytes are no whole number of words; cut it to a multiple of {WORD_BYTES}"
        )
    if TOTAL_STORE_ORDER:
        return cast(Words, buffer.cast("Q"))
    from afore.transport.publish_atomic import AtomicWords

    return AtomicWords(buffer)


def load_every(words: Words, first: int, stop: int, stride: int) -> list[int]:
    """``[words[at] for at in range(first, stop, stride)]``."""
    if isinstance(words, memoryview):
        loaded: list[int] = words[first:stop:stride].tolist()
        return loaded
    return [words[at] for at in range(first, stop, stride)]


def store_release(buffer: memoryview, offset: int, value: int) -> None:
    """Stores ``value`` (64 bits) at byte ``offset``; whoever loads it with acquire sees every store made before.

    Raises ``ValueError`` for an offset that is not a multiple of 8 or lies outside.
    """
    _check(buffer, offset)
    if TOTAL_STORE_ORDER:
        buffer[offset : offset + WORD_BYTES].cast("Q")[0] = value
    else:
        from afore.transport.publish_atomic import AtomicWords

        AtomicWords(buffer[offset : offset + WORD_BYTES])[0] = value


def load_acquire(buffer: memoryview, offset: int) -> int:
    """Loads the 64-bit word at byte ``offset``; later loads see what was stored before it was published.

    Raises ``ValueError`` for an offset that is not a multiple of 8 or lies outside.
    """
    _check(buffer, offset)
    if TOTAL_STORE_ORDER:
        return buffer[offset : offset + WORD_BYTES].cast("Q")[0]
    from afore.transport.publish_atomic import AtomicWords

    return AtomicWords(buffer[offset : offset + WORD_BYTES])[0]


def full_fence() -> None:
    """No load after it is done before every store ahead of it is visible: for "raise my flag, then look at yours"."""
    if TOTAL_STORE_ORDER:
        # Taking a lock is a locked instruction, which on x86 is a full barrier; a fresh one is nobody's shared state.
        threading.Lock().acquire()
    else:
        from afore.transport.publish_atomic import fence

        fence()


def _check(buffer: memoryview, offset: int) -> None:
    if offset % WORD_BYTES or not 0 <= offset <= buffer.nbytes - WORD_BYTES:
        raise ValueError(
            f"offset {offset}: no aligned word of a buffer of {buffer.nbytes} bytes; use a multiple of {WORD_BYTES} inside it"
        )
