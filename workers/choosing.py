"""From logits to tokens: the sampling that a request came with, applied to a step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from afore.core.control import Sampling
from afore.models.sampling import SamplingParams, sample

F32 = npt.NDArray[np.float32]


class Chooser:
    """How one request's tokens are chosen: a function of logits, seed, choice and position alone."""

    __slots__ = ("_params", "_sampling", "greedy")

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._params = SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
        self.greedy = self._params.greedy

    def token(self, logits_V: F32, position: int) -> int:
        """The token of sequence position ``position``."""
        return sample(logits_V, self._params, seed=self._sampling.seed, choice=self._sampling.choice, position=position)


def choose_rows(logits_TV: F32, choosers: Sequence[Chooser], positions: Sequence[int]) -> tuple[int, ...]:
    """One token a row, in row order; ``positions`` are those of the new tokens."""
    tokens: list[int] = np.argmax(logits_TV, axis=1).tolist()
    for row, chooser in enumerate(choosers):
        if not chooser.greedy:
            tokens[row] = chooser.token(logits_TV[row], positions[row])
    return tuple(tokens)
