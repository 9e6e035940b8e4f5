"""The slots of an attention worker's exchange region, found from outside: headers alone are read, never rows.

The region has no header that says its shape, but it is M * (I + N * R) bytes of M input slots and M * N reply slots, in cache
lines, and a reply slot names its target, epoch and worker. Where one microbatch has all its replies, at most one shape fits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from afore.core.target import Target
from afore.transport.exchange import meant
from afore.transport.records import CACHE_LINE, INPUT_HEADER, REPLY_HEADER
from afore.transport.shm_segments import HEADER_BYTES

MOST_SHAPES = 4096
"""Of each of two kinds, tried before a region is given up: well under a second of work, and far beyond what ids take."""
LEAST_HIDDEN_PER_ID = 4
"""D / K is at least this in any model: a row of hidden is longer than its ids."""


@dataclass(frozen=True, slots=True)
class Slots:
    """What the slots of one attention worker name."""

    inputs_M: tuple[Target | None, ...]
    replies_MN: tuple[tuple[Target | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the slots are."""

    num_microbatches: int
    num_ffn: int
    input_nbytes: int
    reply_nbytes: int

    def input_offset(self, microbatch: int) -> int:
        """In the region."""
        return microbatch * self.input_nbytes

    def reply_offset(self, microbatch: int, worker: int) -> int:
        """In the region."""
        return self.num_microbatches * self.input_nbytes + (microbatch * self.num_ffn + worker) * self.reply_nbytes


def find_shape(file: BinaryIO, nbytes: int, num_microbatches: int, num_ffn: int, epoch: int) -> Shape | None:
    """The shape of the region of ``nbytes`` behind a segment's header; none before replies of microbatch 0 are there.

    Raises ``OSError``.
    """
    if INPUT_HEADER.unpack_from(_read(file, 0, INPUT_HEADER.nbytes))[1] != epoch:
        return None  # nothing was ever written
    for input_nbytes, reply_nbytes in _possible(nbytes // num_microbatches, num_ffn):
        shape = Shape(num_microbatches, num_ffn, input_nbytes, reply_nbytes)
        if _fits(file, shape, epoch):
            return shape
    return None


def _possible(each: int, num_ffn: int) -> Iterator[tuple[int, int]]:
    """(I, R) with I + N * R bytes, all of it cache lines, as ``ExchangeLayout`` makes them; small ids first."""
    # I = line + X + 2 Y with X hidden and Y ids, weights; R = line + X and the trailer, in a line of its own or not.
    for trailer in (CACHE_LINE, 0):
        tried = 0
        room = each - CACHE_LINE - num_ffn * (CACHE_LINE + trailer)
        for ids in range(CACHE_LINE, max(CACHE_LINE, room), CACHE_LINE):
            hidden, rest = divmod(room - 2 * ids, num_ffn + 1)
            if hidden < LEAST_HIDDEN_PER_ID * (ids - CACHE_LINE) or hidden < CACHE_LINE or tried == MOST_SHAPES:
                break
            if rest == 0 and hidden % CACHE_LINE == 0:
                tried += 1
                yield CACHE_LINE + hidden + 2 * ids, CACHE_LINE + hidden + trailer


def _fits(file: BinaryIO, shape: Shape, epoch: int) -> bool:
    """Whether every reply slot of microbatch 0, which is always the first in use, is one, and has rows."""
    return all(
        _reply(file, shape.reply_offset(0, worker), 0, worker, epoch, least_tokens=1) is not None
        for worker in range(shape.num_ffn)
    )


def read_slots(file: BinaryIO, shape: Shape, epoch: int) -> Slots:
    """What each slot names now, inputs first: so a reply that is missing here was missing. Raises ``OSError``."""
    inputs_M = tuple(_input(file, shape.input_offset(m), m, epoch) for m in range(shape.num_microbatches))
    return Slots(
        inputs_M,
        tuple(
            tuple(_reply(file, shape.reply_offset(m, w), m, w, epoch) for w in range(shape.num_ffn))
            for m in range(shape.num_microbatches)
        ),
    )


def _input(file: BinaryIO, offset: int, microbatch: int, epoch: int) -> Target | None:
    word, its_epoch, _ = INPUT_HEADER.unpack_from(_read(file, offset, INPUT_HEADER.nbytes))
    return _target(word, microbatch) if its_epoch == epoch else None


def _reply(
    file: BinaryIO, offset: int, microbatch: int, worker: int, epoch: int, least_tokens: int = 0
) -> Target | None:
    # A trailer with nothing behind it reads as the header of a reply of no rows.
    header = REPLY_HEADER.unpack_from(_read(file, offset, REPLY_HEADER.nbytes))
    word, its_epoch, tokens, its_worker, first, count, here = header
    if its_epoch != epoch or its_worker != worker or tokens < least_tokens:
        return None
    if first + count > tokens or here not in (0, count):
        return None
    return _target(word, microbatch)


def _target(word: int, microbatch: int) -> Target | None:
    target = meant(word)
    return target if target is not None and target.microbatch == microbatch else None


def _read(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    raw = os.pread(file.fileno(), nbytes, HEADER_BYTES + offset)
    return raw.ljust(nbytes, b"\0")


def read_mirror(
    file: BinaryIO, nbytes: int, num_attention: int, num_microbatches: int, epoch: int
) -> dict[int, tuple[Target | None, ...]]:
    """What a node's copy of inputs has published, by attention worker that has written there. Raises ``OSError``."""
    size = nbytes // (num_attention * num_microbatches)
    inputs_A = {
        a: tuple(_input(file, (a * num_microbatches + m) * size, m, epoch) for m in range(num_microbatches))
        for a in range(num_attention)
    }
    return {a: inputs_M for a, inputs_M in inputs_A.items() if any(inputs_M)}
