"""Compares a cluster's greedy tokens with transformers' own, position by position."""

from __future__ import annotations

from collections.abc import Sequence

from afore.models.reference import Difference, Reference

MARGIN = 1e-4
"""The reference's own logit margin below which two tokens are a tie: float32 sums in another order move logits by 1e-5."""


def differences(
    reference: Reference, prompts_ids: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], counts: Sequence[int]
) -> list[tuple[int, Difference]]:
    """(prompt index, first difference) of every output that is not the reference's."""
    found = []
    for index, (prompt, mine, count) in enumerate(zip(prompts_ids, ours, counts, strict=True)):
        difference = reference.first_difference(prompt, mine, reference.generate(prompt, count))
        if difference is not None:
            found.append((index, difference))
    return found
