"""What one routed expert is made of and what it computes, beyond gate, up and down: said by the family, obeyed everywhere.

The form decides what an expert's row in a store holds (and so what a copy moves) and which kernel runs. In every store gate
rows lie before up rows and matrices are [out, in], whatever the file has.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Activation(IntEnum):
    """How gate and up become the hidden row of an expert."""

    SILU = 0
    """silu(gate) · up."""
    CLAMPED = 1
    """g · sigmoid(alpha · g) · (u + 1) with g = min(gate, limit) and u = up within ±limit (gpt-oss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """The form of a model's routed experts, the same for all of them."""

    activation: Activation = Activation.SILU
    biases: bool = False
    """Whether an expert adds biases [2I] (gate, then up) and [D] to its two products."""
    alpha: float = 1.702
    """Of ``Activation.CLAMPED``."""
    limit: float = 7.0
    """Of ``Activation.CLAMPED``."""

    def elements(self, hidden_size: int, expert_size: int) -> int:
        """Numbers in one expert of D x I: what a copy moves."""
        weights = 3 * hidden_size * expert_size
        return weights + (2 * expert_size + hidden_size if self.biases else 0)


SILU_GATED = ExpertForm()
"""Three matrices and silu: the form of nearly every family."""
