"""Execution inputs and replies of one attention worker a, in its own region, read and written in place by the FFN workers.

Input slot m: header, hidden [T_max, D] float32, ids [T_max, K] int32, weights [T_max, K] float32; written by the owner.
Reply slot (m, w): header, partial rows [T, D] float32, trailer; written one-sided by FFN worker w.

The owner rewrites input slot m only after all N replies to its previous target of m, which ``ReuseGuard`` watches over; worker w
replies only after its last read of any input of the target. So neither side ever reads what the other writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from afore.core.errors import ConfigError, SlotError, WireError
from afore.core.target import Target
from afore.transport.publish import publishing_words
from afore.transport.records import (
    CACHE_LINE,
    HIDDEN_DTYPE,
    ID_DTYPE,
    INPUT_HEADER,
    REPLY_HEADER,
    REPLY_TRAILER,
    WORD,
    align,
)

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Inputs = tuple[F32, I32, F32]
"""hidden [T, D], ids [T, K], weights [T, K]."""
Part = tuple[int, int]
"""Which rows of a target a reply has: the first, and how many."""

_EPOCH_WORD = INPUT_HEADER.offsets["epoch"] // WORD
_TOKENS_WORD = INPUT_HEADER.offsets["tokens"] // WORD


@dataclass(frozen=True, slots=True)
class ExchangeLayout:
    """Shape of one attention worker's exchange region."""

    num_microbatches: int
    """M: microbatches in flight."""
    num_ffn: int
    """N: FFN workers."""
    max_tokens: int
    """T_max: most tokens of this worker in one microbatch."""
    hidden: int
    """D: hidden size."""
    top_k: int
    """K: experts per token."""

    ids_offset: int = field(init=False)
    """Where ids begin in an input slot; hidden begins a cache line in."""
    weights_offset: int = field(init=False)
    """Where weights begin in an input slot."""
    input_nbytes: int = field(init=False)
    """Bytes of an input slot."""
    reply_nbytes: int = field(init=False)
    """Bytes of a reply slot."""
    row_nbytes: int = field(init=False)
    """Bytes of one row of hidden states."""

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "num_ffn", "max_tokens", "hidden", "top_k"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ConfigError(f"exchange.{name}", f"{getattr(self, name)!r} is not from 1 to 2^31 - 1")
        # Looked up many times for every target: computed once.
        object.__setattr__(self, "row_nbytes", self.hidden * HIDDEN_DTYPE.itemsize)
        ids_offset = CACHE_LINE + align(self.max_tokens * self.hidden * HIDDEN_DTYPE.itemsize)
        weights_offset = ids_offset + align(self.max_tokens * self.top_k * ID_DTYPE.itemsize)
        object.__setattr__(self, "ids_offset", ids_offset)
        object.__setattr__(self, "weights_offset", weights_offset)
        nbytes = weights_offset + align(self.max_tokens * self.top_k * HIDDEN_DTYPE.itemsize)
        object.__setattr__(self, "input_nbytes", nbytes)
        object.__setattr__(self, "reply_nbytes", align(self.reply_used_nbytes(self.max_tokens)))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region."""
        return self.num_microbatches * (self.input_nbytes + self.num_ffn * self.reply_nbytes)

    def reply_trailer_offset(self, tokens: int) -> int:
        """Where the trailer of a reply of ``tokens`` rows begins in its slot."""
        return CACHE_LINE + -(-tokens * self.row_nbytes // WORD) * WORD

    def reply_used_nbytes(self, tokens: int) -> int:
        """Bytes that a reply of ``tokens`` rows takes: what an FFN worker writes."""
        return self.reply_trailer_offset(tokens) + REPLY_TRAILER.nbytes

    def input_offset(self, microbatch: int) -> int:
        """Where the input slot of a microbatch begins."""
        assert 0 <= microbatch < self.num_microbatches
        return microbatch * self.input_nbytes

    def reply_offset(self, microbatch: int, worker: int) -> int:
        """Where FFN worker ``worker`` writes its reply of a microbatch."""
        assert 0 <= microbatch < self.num_microbatches
        assert 0 <= worker < self.num_ffn
        slot = microbatch * self.num_ffn + worker
        return self.num_microbatches * self.input_nbytes + slot * self.reply_nbytes

    def input_arrays(self, buffer: memoryview, microbatch: int) -> Inputs:
        """Views of a whole input slot: hidden [T_max, D], ids [T_max, K], weights [T_max, K]."""
        base, rows = self.input_offset(microbatch), self.max_tokens
        return (
            _array(buffer, HIDDEN_DTYPE, base + CACHE_LINE, (rows, self.hidden)),
            _array(buffer, ID_DTYPE, base + self.ids_offset, (rows, self.top_k)),
            _array(buffer, HIDDEN_DTYPE, base + self.weights_offset, (rows, self.top_k)),
        )


def _array(buffer: memoryview, dtype: np.dtype[Any], offset: int, shape: tuple[int, int]) -> npt.NDArray[Any]:
    return np.frombuffer(buffer, dtype=dtype, count=shape[0] * shape[1], offset=offset).reshape(shape)


def _region(buffer: memoryview, layout: ExchangeLayout, owner: str) -> memoryview:
    if buffer.nbytes < layout.nbytes:
        raise WireError(owner, f"its exchange region has {buffer.nbytes} bytes, the layout needs {layout.nbytes}")
    return buffer.cast("B")[: layout.nbytes]


class InputSlots:
    """The owner's side of its input slots: payload first, target word last."""

    __slots__ = ("_epoch", "_layout", "_views", "_words")

    def __init__(self, buffer: memoryview, layout: ExchangeLayout, epoch: int) -> None:
        """Raises ``WireError`` for a region that is too small."""
        region = _region(buffer, layout, "this attention worker")
        self._layout = layout
        self._epoch = epoch
        self._words = publishing_words(region)
        self._views = tuple(layout.input_arrays(region, m) for m in range(layout.num_microbatches))

    def views(self, microbatch: int) -> Inputs:
        """Writable views of the whole slot, to compute straight into; call ``retract`` before and ``publish`` after."""
        return self._views[microbatch]

    def retract(self, microbatch: int) -> None:
        """The slot names no target any more, while it is being rewritten."""
        self._words[self._layout.input_offset(microbatch) // WORD] = 0

    def publish(self, target: Target, tokens: int) -> None:
        """Names the slot's target and its rows [0, tokens). Raises ``WireError`` for more than T_max rows."""
        if not 0 <= tokens <= self._layout.max_tokens:
            raise WireError(
                "this attention worker", f"{tokens} tokens of {target} do not fit {self._layout.max_tokens} rows"
            )
        word = self._layout.input_offset(target.microbatch) // WORD
        self._words[word + _EPOCH_WORD] = self._epoch
        self._words[word + _TOKENS_WORD] = tokens
        self._words[word] = target.word()

    def write(self, target: Target, hidden_TD: F32, ids_TK: I32, weights_TK: F32) -> None:
        """Copies hidden [T, D], ids [T, K] and weights [T, K] into the slot and publishes it.

        The caller has asked ``ReuseGuard``. Raises ``WireError`` for shapes that do not fit.
        """
        tokens, layout = hidden_TD.shape[0], self._layout
        expected = ((tokens, layout.hidden), (tokens, layout.top_k), (tokens, layout.top_k))
        if (hidden_TD.shape, ids_TK.shape, weights_TK.shape) != expected or tokens > layout.max_tokens:
            raise WireError(
                "this attention worker",
                f"inputs of {target} have shapes {hidden_TD.shape}, {ids_TK.shape}, {weights_TK.shape}; the slot holds "
                f"{layout.max_tokens} tokens of {layout.hidden} with {layout.top_k} experts",
            )
        self.retract(target.microbatch)
        room_hidden_TD, room_ids_TK, room_weights_TK = self._views[target.microbatch]
        room_hidden_TD[:tokens] = hidden_TD
        room_ids_TK[:tokens] = ids_TK
        room_weights_TK[:tokens] = weights_TK
        self.publish(target, tokens)


def meant(word: int) -> Target | None:
    """The target of a slot's first word; None for one that names none: nobody wrote that, so nothing has come."""
    try:
        return Target.from_word(word)
    except ValueError:
        return None


class InputReader:
    """An FFN worker's view of one attention worker's input slots, in place."""

    __slots__ = ("_epoch", "_input_words", "_layout", "_views", "_words", "memory")

    def __init__(self, buffer: memoryview, layout: ExchangeLayout, epoch: int) -> None:
        """``buffer``: the mapped region. Views are writable where it is. Raises ``WireError`` for one that is too small."""
        region = _region(buffer, layout, "attention worker")
        self.memory: memoryview | None = region
        self._layout = layout
        self._epoch = epoch
        self._words = publishing_words(region)
        self._input_words = [layout.input_offset(m) // WORD for m in range(layout.num_microbatches)]
        self._views = tuple(layout.input_arrays(region, m) for m in range(layout.num_microbatches))

    def holds(self, microbatch: int) -> Target | None:
        """The target whose inputs the slot holds; None before the first of this epoch, and for a damaged header."""
        word = self._input_words[microbatch]
        target = self._words[word]
        return meant(target) if target and self._words[word + _EPOCH_WORD] == self._epoch else None

    def has(self, target: Target, tokens: int) -> bool:
        """Whether the slot of the target's microbatch holds it, with so many rows: ``read`` without its views."""
        word = self._input_words[target.microbatch]
        if self._words[word] != target.word() or self._words[word + _EPOCH_WORD] != self._epoch:
            return False
        if self._words[word + _TOKENS_WORD] == tokens:
            return True
        self.read(target.microbatch, target)  # raises, where the header cannot be
        return False

    def read(self, microbatch: int, target: Target) -> Inputs | None:
        """Views hidden [T, D], ids [T, K], weights [T, K] once the slot holds ``target``; None before.

        They stay valid until this worker replies.
        """
        word = self._input_words[microbatch]
        if self._words[word] != target.word() or self._words[word + _EPOCH_WORD] != self._epoch:
            return None
        tokens = self._words[word + _TOKENS_WORD]
        if tokens > self._layout.max_tokens:
            raise WireError(
                "attention worker", f"announces {tokens} rows of {target}, its slots hold {self._layout.max_tokens}"
            )
        hidden_TD, ids_TK, weights_TK = self._views[microbatch]
        return hidden_TD[:tokens], ids_TK[:tokens], weights_TK[:tokens]


class ReplyBuffer:
    """An FFN worker's staging of one reply: compute into ``rows``, ``pack``, and send the bytes with one write. No copy."""

    __slots__ = ("_bytes", "_epoch", "_layout", "_rows_TD", "_worker")

    def __init__(
        self, layout: ExchangeLayout, worker: int, epoch: int, storage: npt.NDArray[np.uint64] | None = None
    ) -> None:
        """``storage``: ``reply_nbytes`` of somebody's memory, such as pinned memory; none takes its own."""
        self._layout = layout
        self._worker = worker
        self._epoch = epoch
        if storage is None:
            storage = np.zeros(layout.reply_nbytes // WORD, dtype=np.uint64)  # words, so that rows are aligned
        self._bytes = storage.data.cast("B")
        self._rows_TD: F32 = _array(self._bytes, HIDDEN_DTYPE, CACHE_LINE, (layout.max_tokens, layout.hidden))

    def rows(self, tokens: int) -> F32:
        """Writable partial rows [tokens, D]."""
        return self._rows_TD[:tokens]

    def pack(self, target: Target, tokens: int, part: Part | None = None, *, here: bool = True) -> memoryview:
        """Header and trailer around the rows of ``part``, by default all ``tokens``: the bytes to write at ``reply_offset``.

        ``here`` False: the rows lie elsewhere, and nothing is between the two.
        """
        first, count = part or (0, tokens)
        assert 0 <= first <= first + count <= tokens <= self._layout.max_tokens
        rows, word = count if here else 0, target.word()
        REPLY_HEADER.pack_into(self._bytes, 0, word, self._epoch, tokens, self._worker, first, count, rows)
        trailer = self._layout.reply_trailer_offset(rows) if rows else CACHE_LINE
        REPLY_TRAILER.pack_into(self._bytes, trailer, word, self._epoch)
        return self._bytes[: trailer + REPLY_TRAILER.nbytes]


def pack_reply(layout: ExchangeLayout, target: Target, worker: int, epoch: int, partial_TD: F32) -> memoryview:
    """The bytes of a reply with a copy of partial rows [T, D], to be written at ``layout.reply_offset``."""
    reply = ReplyBuffer(layout, worker, epoch)
    reply.rows(partial_TD.shape[0])[:] = partial_TD
    return reply.pack(target, partial_TD.shape[0])


class Replies:
    """The owner's view of its reply slots."""

    __slots__ = ("_bytes", "_epoch", "_layout", "_no_rows", "_offsets", "_rows")

    def __init__(self, buffer: memoryview, layout: ExchangeLayout, epoch: int) -> None:
        """Raises ``WireError`` for a region that is too small."""
        self._bytes = _region(buffer, layout, "this attention worker")
        self._layout = layout
        self._epoch = epoch
        shape = (layout.max_tokens, layout.hidden)
        self._no_rows: F32 = np.zeros((0, layout.hidden), dtype=np.float32)
        self._offsets = [
            [layout.reply_offset(m, w) for w in range(layout.num_ffn)] for m in range(layout.num_microbatches)
        ]
        self._rows: tuple[tuple[F32, ...], ...] = tuple(
            tuple(
                _array(self._bytes, HIDDEN_DTYPE, layout.reply_offset(m, w) + CACHE_LINE, shape)
                for w in range(layout.num_ffn)
            )
            for m in range(layout.num_microbatches)
        )

    def take(self, microbatch: int, worker: int, target: Target, tokens: int) -> tuple[Part, F32] | None:
        """The part of the target's rows that ``worker`` has replied, and a view of it [count, D], or of no rows where they lie in
        a GPU's memory; once both ends of its slot name ``target``, None before.

        The bell REPLY says that the bytes between the ends have landed; the ends alone do not, where bytes land in any order.
        The view is valid until this worker writes its next target of the microbatch. Raises ``WireError`` for a reply to
        ``target`` of another number of rows.
        """
        layout, base = self._layout, self._offsets[microbatch][worker]
        word, epoch, its_tokens, its_worker, first, count, here = REPLY_HEADER.unpack_from(self._bytes, base)
        if word != target.word() or epoch != self._epoch or its_worker != worker:
            return None
        if here > layout.max_tokens:
            return None
        trailer = layout.reply_trailer_offset(here) if here else CACHE_LINE
        if REPLY_TRAILER.unpack_from(self._bytes, base + trailer) != (word, epoch):
            return None
        if its_tokens != tokens:
            raise WireError(f"ffn-{worker}", f"replied {its_tokens} rows to {target}, which has {tokens}")
        if first + count > tokens or here not in (0, count):
            raise WireError(f"ffn-{worker}", f"replied rows {first} to {first + count} of {tokens} to {target}")
        return (first, count), self._rows[microbatch][worker][:here] if here else self._no_rows


class ReuseGuard:
    """When input slot m may be rewritten: all N workers are done with its previous target. Pure state of the owner.

    A worker is done when it has replied, or, where the target was aborted, when it has passed it.
    """

    __slots__ = ("_aborted", "_num_ffn", "_passed", "_replied", "_targets")

    def __init__(self, num_microbatches: int, num_ffn: int) -> None:
        self._num_ffn = num_ffn
        self._targets: list[Target | None] = [None] * num_microbatches
        self._aborted = [False] * num_microbatches
        self._replied: list[set[int]] = [set() for _ in range(num_microbatches)]
        self._passed: list[set[int]] = [set() for _ in range(num_microbatches)]

    def missing(self, microbatch: int) -> tuple[int, ...]:
        """Ranks of the workers that may still read the slot."""
        if self._targets[microbatch] is None:
            return ()
        done = self._replied[microbatch]
        if len(done) == self._num_ffn:
            return ()
        if self._aborted[microbatch]:
            done = done | self._passed[microbatch]
        return tuple(worker for worker in range(self._num_ffn) if worker not in done)

    def free(self, microbatch: int) -> bool:
        """Whether the slot may be rewritten."""
        return not self.missing(microbatch)

    def writing(self, target: Target) -> None:
        """The owner is about to write the inputs of ``target``. Raises ``SlotError`` while its slot may still be read."""
        microbatch = target.microbatch
        missing = self.missing(microbatch)
        if missing:
            workers = ", ".join(f"ffn-{worker}" for worker in missing)
            raise SlotError(
                f"input slot {microbatch} cannot take {target}: {workers} may still read {self._targets[microbatch]}"
            )
        self._targets[microbatch] = target
        self._aborted[microbatch] = False
        self._replied[microbatch].clear()
        self._passed[microbatch].clear()

    def replied(self, target: Target, worker: int) -> bool:
        """``worker`` has replied to ``target``; whether the slot is free now. What concerns an earlier target changes nothing."""
        return self._note(self._replied, target, worker)

    def all_replied(self, target: Target) -> None:
        """All N workers have replied to ``target``."""
        if self._targets[target.microbatch] == target:
            self._replied[target.microbatch].update(range(self._num_ffn))

    def passed(self, target: Target, worker: int) -> bool:
        """``worker`` has moved past ``target``, which counts once it is known to be aborted; whether the slot is free now."""
        return self._note(self._passed, target, worker)

    def aborted(self, target: Target) -> bool:
        """``target`` was cancelled: passing it is enough from now on; whether the slot is free now."""
        if self._targets[target.microbatch] == target:
            self._aborted[target.microbatch] = True
        return self.free(target.microbatch)

    def abandoned(self, target: Target) -> None:
        """``target`` was cancelled and all N workers have passed it, as the engine says: the slot is free."""
        self.aborted(target)
        for worker in range(self._num_ffn):
            self.passed(target, worker)

    def _note(self, sets: list[set[int]], target: Target, worker: int) -> bool:
        assert 0 <= worker < self._num_ffn
        if self._targets[target.microbatch] == target:
            sets[target.microbatch].add(worker)
        return self.free(target.microbatch)
