"""Immediates on doorbell regions: a 4-bit kind and a 28-bit value, so that one queue tells a role everything that happened.

A bell is a hint with an address: the memory it points at is what counts, so a value cut to 28 bits is enough. The functions
in capitals make one of each kind: ``INPUTS(attention, microbatch)``; ``decode`` reads them.
"""

from __future__ import annotations

import enum

from afore.core.errors import WireError
from afore.core.record import record
from afore.core.target import MICROBATCH_BITS

KIND_BITS = 4
VALUE_BITS = KIND_SHIFT = 28
RANK_BITS = VALUE_BITS - MICROBATCH_BITS
_VALUE_MASK = (1 << VALUE_BITS) - 1
_RANK_MASK = (1 << RANK_BITS) - 1


class BellKind(enum.IntEnum):
    """What happened, and what the value is. 0 is no bell, so that a zeroed word says nothing."""

    PLAN = 1
    """The ring has an entry; low bits of its sequence."""
    INPUTS = 2
    """An attention worker's inputs of a microbatch are there; (microbatch, attention)."""
    VERDICTS = 3
    """All verdicts on an entry are there; low bits of its sequence."""
    REPLY = 4
    """An FFN worker's partial rows of a microbatch are there; (microbatch, worker)."""
    DEMAND = 5
    """An attention worker's demand vector of a microbatch is there; (microbatch, attention)."""
    FEEDBACK = 6
    """An FFN worker wrote a record; its rank."""
    KV = 7
    """A prefill worker wrote the last block of a request; the request's slot."""
    PASSED = 8
    """An FFN worker has passed an aborted sequence; its low bits."""
    PREDICTION = 9
    """An attention worker's prediction of a microbatch's next target is there; (microbatch, attention)."""


_KINDS = {int(kind): kind for kind in BellKind}
_REPLY = int(BellKind.REPLY)
_PAIRS = frozenset({BellKind.INPUTS, BellKind.REPLY, BellKind.DEMAND, BellKind.PREDICTION})
_SEQUENCES = frozenset({BellKind.PLAN, BellKind.VERDICTS, BellKind.PASSED})


@record
class Bell:
    """A decoded immediate."""

    kind: BellKind
    value: int

    @property
    def microbatch(self) -> int:
        """Of INPUTS, REPLY, DEMAND and PREDICTION."""
        assert self.kind in _PAIRS
        return self.value >> RANK_BITS

    @property
    def rank(self) -> int:
        """The worker of INPUTS, REPLY, DEMAND, PREDICTION (low bits) and FEEDBACK."""
        assert self.kind in _PAIRS or self.kind is BellKind.FEEDBACK
        return self.value & _RANK_MASK

    def sequence(self, near: int) -> int:
        """The full sequence of PLAN, VERDICTS and PASSED: the one with these low bits that is closest to ``near``."""
        assert self.kind in _SEQUENCES
        half = 1 << (VALUE_BITS - 1)
        distance = ((self.value - near + half) & _VALUE_MASK) - half
        return near + distance if near + distance >= 0 else near + distance + (1 << VALUE_BITS)


def encode(kind: BellKind, value: int) -> int:
    """The immediate, 0 … 2^32 - 1. Raises ``ValueError`` for a value over 28 bits."""
    if not 0 <= value <= _VALUE_MASK:
        raise ValueError(f"bell {kind.name}: value {value} is not from 0 to {_VALUE_MASK}")
    return kind << VALUE_BITS | value


def decode(immediate: int) -> Bell:
    """The bell of an immediate. Raises ``WireError`` for a kind that there is not, or more than 32 bits."""
    kind = _KINDS.get(immediate >> VALUE_BITS)
    if kind is None:
        raise WireError(
            "unknown", f"rang {immediate:#010x}, which is no bell", "check that both sides have one version"
        )
    return Bell(kind, immediate & _VALUE_MASK)


def reply_of(immediate: int) -> tuple[int, int] | None:
    """(microbatch, worker) of a REPLY bell; None of any other. There are as many as pairs of attention and FFN workers."""
    if immediate >> KIND_SHIFT != _REPLY:
        return None
    value = immediate & _VALUE_MASK
    return value >> RANK_BITS, value & _RANK_MASK


def _pair(kind: BellKind, microbatch: int, rank: int) -> int:
    if not (0 <= microbatch < 1 << MICROBATCH_BITS and 0 <= rank <= _RANK_MASK):
        raise ValueError(f"bell {kind.name}: microbatch {microbatch} or rank {rank} is out of range")
    return kind << VALUE_BITS | microbatch << RANK_BITS | rank


def PLAN(sequence: int) -> int:
    """Scheduler -> FFN workers: the ring has the entry of ``sequence``."""
    return encode(BellKind.PLAN, sequence & _VALUE_MASK)


def VERDICTS(sequence: int) -> int:
    """FFN worker -> its neighbours: all verdicts on ``sequence`` are there."""
    return encode(BellKind.VERDICTS, sequence & _VALUE_MASK)


def PASSED(sequence: int) -> int:
    """FFN worker -> scheduler and attention: it has passed the target that ABORT ``sequence`` cancels."""
    return encode(BellKind.PASSED, sequence & _VALUE_MASK)


def INPUTS(attention: int, microbatch: int) -> int:
    """Attention -> FFN workers: its inputs of the microbatch are there."""
    return _pair(BellKind.INPUTS, microbatch, attention)


def DEMAND(attention: int, microbatch: int) -> int:
    """Attention -> scheduler: its demand vector of the microbatch is there."""
    return _pair(BellKind.DEMAND, microbatch, attention)


def PREDICTION(attention: int, microbatch: int) -> int:
    """Attention -> scheduler: its prediction of the microbatch's next target is there."""
    return _pair(BellKind.PREDICTION, microbatch, attention)


def REPLY(microbatch: int, worker: int) -> int:
    """FFN worker -> attention: its partial rows of the microbatch are there."""
    return _pair(BellKind.REPLY, microbatch, worker)


def FEEDBACK(worker: int) -> int:
    """FFN worker -> scheduler: it wrote a feedback record. Raises ``ValueError`` for a rank over 16 bits."""
    return _pair(BellKind.FEEDBACK, 0, worker)


def KV(request_slot: int) -> int:
    """Prefill -> attention: the last block of the request in this slot is written."""
    return encode(BellKind.KV, request_slot)
