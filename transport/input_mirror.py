"""Execution inputs on another node than their attention worker's: one region of a node's lead that attention workers write into.

Slot (a, m): the lead's line (INPUT_HEADER), the writer's line (MIRROR_HEADER), then T rows of hidden [T, D] float32, ids [T, K]
int32 and weights [T, K] float32, packed, so that one write carries a target. The writer never touches the lead's line: bytes of a
one-sided write are all there once its notification is, and not before, so the lead publishes on the notification, and everybody
on the node reads in place as if the attention worker were a neighbour.

Reuse is guarded as that of input slots (``exchange``). But an aborted target's rows may still be on their way when the next ones
are written behind them: so writes are numbered, and the lead publishes what its notification is about, or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afore.core.errors import WireError
from afore.core.target import Target
from afore.core.topology import ATTENTION, member_name
from afore.transport.exchange import F32, I32, ExchangeLayout, Inputs, meant
from afore.transport.publish import publishing_words
from afore.transport.records import CACHE_LINE, HIDDEN_DTYPE, ID_DTYPE, INPUT_HEADER, MIRROR_HEADER, WORD, align

_EPOCH_WORD = INPUT_HEADER.offsets["epoch"] // WORD
_TOKENS_WORD = INPUT_HEADER.offsets["tokens"] // WORD
_ROWS = CACHE_LINE
"""Where the rows begin in what is written: behind the writer's line."""


@dataclass(frozen=True, slots=True)
class MirrorLayout:
    """Shape of a node's mirror."""

    num_attention: int
    """A: attention workers, those of this node too."""
    exchange: ExchangeLayout
    """Of each attention worker."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot."""
        return align(CACHE_LINE + self.packed_nbytes(self.exchange.max_tokens))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region."""
        return self.num_attention * self.exchange.num_microbatches * self.slot_nbytes

    def offset(self, attention: int, microbatch: int) -> int:
        """Where slot (a, m) begins."""
        assert 0 <= attention < self.num_attention
        assert 0 <= microbatch < self.exchange.num_microbatches
        return (attention * self.exchange.num_microbatches + microbatch) * self.slot_nbytes

    def write_offset(self, attention: int, microbatch: int) -> int:
        """Where the attention worker writes: behind the lead's line."""
        return self.offset(attention, microbatch) + CACHE_LINE

    def spans(self, tokens: int) -> tuple[int, int, int]:
        """Where ids and weights of T rows begin in what is written, and where it ends."""
        ids = _ROWS + align(tokens * self.exchange.hidden * HIDDEN_DTYPE.itemsize)
        weights = ids + align(tokens * self.exchange.top_k * ID_DTYPE.itemsize)
        return ids, weights, weights + tokens * self.exchange.top_k * HIDDEN_DTYPE.itemsize

    def packed_nbytes(self, tokens: int) -> int:
        """Bytes that T rows take: what is written."""
        return self.spans(tokens)[2]


class _Rows:
    """Views of T packed rows in a slot, made once for each T: a step has few sizes."""

    __slots__ = ("_buffer", "_layout", "_views")

    def __init__(self, buffer: memoryview, layout: MirrorLayout) -> None:
        self._buffer = buffer
        self._layout = layout
        self._views: dict[int, Inputs] = {}

    def views(self, tokens: int) -> Inputs:
        found = self._views.get(tokens)
        if found is None:
            ids, weights, _ = self._layout.spans(tokens)
            D, K = self._layout.exchange.hidden, self._layout.exchange.top_k
            hidden_TD: F32 = np.frombuffer(self._buffer, HIDDEN_DTYPE, tokens * D, _ROWS).reshape(tokens, D)
            ids_TK: I32 = np.frombuffer(self._buffer, ID_DTYPE, tokens * K, ids).reshape(tokens, K)
            weights_TK: F32 = np.frombuffer(self._buffer, HIDDEN_DTYPE, tokens * K, weights).reshape(tokens, K)
            found = self._views[tokens] = hidden_TD, ids_TK, weights_TK
        return found


class InputPacker:
    """An attention worker's staging of one microbatch: rows in, the bytes of one write out, as they are until the next ``pack``.

    One for each microbatch, because writes wait for room side by side. Every ``pack`` is written once to every mirror.
    """

    __slots__ = ("_bytes", "_epoch", "_layout", "_number", "_rows")

    def __init__(self, layout: MirrorLayout, epoch: int) -> None:
        storage = np.zeros(layout.slot_nbytes // WORD, np.uint64)  # words, so that rows are aligned
        self._bytes = storage.data.cast("B")
        self._layout = layout
        self._epoch = epoch
        self._number = 0
        self._rows = _Rows(self._bytes, layout)

    def pack(self, target: Target, hidden_TD: F32, ids_TK: I32, weights_TK: F32) -> memoryview:
        """What to write at ``write_offset``. Raises ``WireError`` for more than T_max rows."""
        tokens, limit = hidden_TD.shape[0], self._layout.exchange.max_tokens
        if tokens > limit:
            raise WireError("this attention worker", f"{tokens} tokens of {target} do not fit {limit} rows")
        self._number += 1
        MIRROR_HEADER.pack_into(self._bytes, 0, self._number, target.word(), self._epoch, tokens, self._number)
        room_hidden_TD, room_ids_TK, room_weights_TK = self._rows.views(tokens)
        room_hidden_TD[:] = hidden_TD
        room_ids_TK[:] = ids_TK
        room_weights_TK[:] = weights_TK
        return self._bytes[: self._layout.packed_nbytes(tokens)]


class InputMirror:
    """The lead's side: publishes what has come."""

    __slots__ = ("_bytes", "_epoch", "_layout", "_notified", "_words")

    def __init__(self, buffer: memoryview, layout: MirrorLayout, epoch: int) -> None:
        """Raises ``WireError`` for a region that is too small."""
        self._bytes = _region(buffer, layout)
        self._notified = [0] * (layout.num_attention * layout.exchange.num_microbatches)
        self._words = publishing_words(self._bytes)
        self._layout = layout
        self._epoch = epoch

    def publish(self, attention: int, microbatch: int) -> None:
        """The next notification for slot (a, m) has come: its target can be read, unless a later write is landing there already.

        Raises ``WireError`` for a header that cannot be.
        """
        peer = member_name(ATTENTION, attention)
        shape = self._layout.exchange
        if not (0 <= attention < self._layout.num_attention and 0 <= microbatch < shape.num_microbatches):
            raise WireError(peer, f"announces inputs of microbatch {microbatch}, which nobody has")
        at = self._layout.offset(attention, microbatch)
        slot = at // self._layout.slot_nbytes
        self._notified[slot] = number = self._notified[slot] + 1
        first, target, epoch, tokens, last = MIRROR_HEADER.unpack_from(self._bytes, at + CACHE_LINE)
        if first != number or last != number:
            # Nobody reads the aborted target that this was about. A write lands from one end to the other, so that as long as both
            # ends are old all between them is.
            return
        if epoch != self._epoch or tokens > shape.max_tokens:
            raise WireError(
                peer,
                f"announces {tokens} rows of epoch {epoch}; slots hold {shape.max_tokens}, the epoch is {self._epoch}",
                "do versions and topologies agree?",
            )
        word = at // WORD
        self._words[word + _EPOCH_WORD] = epoch
        self._words[word + _TOKENS_WORD] = tokens
        self._words[word] = target


class MirrorReader:
    """A worker's view of one attention worker's slots in its node's mirror: as ``exchange.InputReader``."""

    __slots__ = ("_epoch", "_layout", "_offsets_M", "_rows_M", "_words", "memory")

    def __init__(self, buffer: memoryview, layout: MirrorLayout, attention: int, epoch: int) -> None:
        """``buffer``: the region, own or mapped. Raises ``WireError`` for one that is too small."""
        region = _region(buffer, layout)
        self.memory: memoryview | None = region
        self._layout = layout
        self._epoch = epoch
        self._words = publishing_words(region)
        microbatches = range(layout.exchange.num_microbatches)
        self._offsets_M = [layout.offset(attention, m) // WORD for m in microbatches]
        self._rows_M = [
            _Rows(region[layout.write_offset(attention, m) : layout.offset(attention, m) + layout.slot_nbytes], layout)
            for m in microbatches
        ]

    def holds(self, microbatch: int) -> Target | None:
        """The target whose inputs the slot holds; None before the first of this epoch, and for a damaged header."""
        word = self._offsets_M[microbatch]
        target = self._words[word]
        return meant(target) if target and self._words[word + _EPOCH_WORD] == self._epoch else None

    def has(self, target: Target, tokens: int) -> bool:
        """Whether the slot of the target's microbatch holds it, with so many rows. Raises as ``read``."""
        inputs = self.read(target.microbatch, target)
        return inputs is not None and len(inputs[0]) == tokens

    def read(self, microbatch: int, target: Target) -> Inputs | None:
        """Views hidden [T, D], ids [T, K], weights [T, K] once the slot holds ``target``; None before.

        Raises ``WireError`` for a header with more than T_max rows.
        """
        word = self._offsets_M[microbatch]
        if self._words[word] != target.word() or self._words[word + _EPOCH_WORD] != self._epoch:
            return None
        tokens, limit = self._words[word + _TOKENS_WORD], self._layout.exchange.max_tokens
        if tokens > limit:
            raise WireError("its lead", f"announces {tokens} rows of {target}, its slots hold {limit}")
        return self._rows_M[microbatch].views(tokens)


def _region(buffer: memoryview, layout: MirrorLayout) -> memoryview:
    if buffer.nbytes < layout.nbytes:
        raise WireError("its lead", f"the input mirror has {buffer.nbytes} bytes, the layout needs {layout.nbytes}")
    return buffer.cast("B")[: layout.nbytes]
