"""The unit of work: one MoE layer of one step of one microbatch.

Letters (used in names all over the project): E routed experts, K experts per token, L MoE layers, D hidden size, I expert
hidden size, N FFN workers, A attention workers, M microbatches in flight, R redundant slots per worker and layer, T tokens of a
microbatch (T_a those of attention worker a), S slots.
"""

from __future__ import annotations

import enum

from afore.core.record import record

STEP_BITS = 40
MICROBATCH_BITS = 12
LAYER_BITS = 11
_LAYERS, _MICROBATCHES, _STEPS = 1 << LAYER_BITS, 1 << MICROBATCH_BITS, (1 << (STEP_BITS - 1)) - 1


class Phase(enum.IntEnum):
    """What the tokens of a target are: the two are never mixed in a statistic."""

    DECODE = 0
    PREFILL = 1


class _Packed:
    """A target's word, once somebody has asked for it: some hundred and fifty do. No field: it says nothing new."""

    __slots__ = ("_word",)
    _word: int


@record(order=True)
class Target(_Packed):
    """(layer, microbatch, step): ``layer`` is the MoE ordinal 0…L-1; ``step`` never repeats within a microbatch."""

    layer: int
    microbatch: int
    step: int

    def word(self) -> int:
        """Packs the target into one non-zero word below 2^63, which a header publishes with a single 8-byte store."""
        try:
            return self._word
        except AttributeError:
            pass
        assert 0 <= self.layer < _LAYERS and 0 <= self.microbatch < _MICROBATCHES and 0 <= self.step < _STEPS, self  # noqa: PT018
        self._word = ((self.step + 1) << (MICROBATCH_BITS + LAYER_BITS)) | (self.microbatch << LAYER_BITS) | self.layer
        return self._word

    @classmethod
    def from_word(cls, word: int) -> Target:
        """The inverse of ``word``; raises ``ValueError`` for a word that no target packs to."""
        step = (word >> (MICROBATCH_BITS + LAYER_BITS)) - 1
        if step < 0 or step >= (1 << (STEP_BITS - 1)) - 1:
            raise ValueError(f"{word:#x} is not a target word")
        microbatch = (word >> LAYER_BITS) & ((1 << MICROBATCH_BITS) - 1)
        return cls(layer=word & ((1 << LAYER_BITS) - 1), microbatch=microbatch, step=step)

    def __str__(self) -> str:
        return f"l{self.layer}/m{self.microbatch}/s{self.step}"
