"""From logits to tokens: the sampling that a request came with, applied to a step's rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from afore.core.control import Sampling, TokenLogprobs
from afore.models.sampling import SamplingParams, logprobs, penalise, sample

F32 = npt.NDArray[np.float32]


class Chooser:
    """How one request's tokens are chosen: a function of logits, seed, choice, position and the sequence so far."""

    __slots__ = ("_params", "_sampling", "_seen", "_seen_ids", "plain", "remembers", "reports")

    def __init__(self, sampling: Sampling, seen: Iterable[int] = ()) -> None:
        """``seen``: tokens of the sequence so far; of interest only where repetition is penalised."""
        self._sampling = sampling
        self._params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
        )
        self._seen = set(seen) if sampling.repetition_penalty != 1.0 else None
        self._seen_ids: npt.NDArray[np.int64] | None = None
        self.plain = self._params.greedy and self._seen is None
        """Whether the token is the logits' argmax and nothing else."""
        self.remembers = self._seen is not None
        """Whether its choice depends on the tokens so far: else nobody need tell it of them."""
        self.reports = sampling.logprobs >= 0
        """Whether log-probabilities were asked for."""

    def saw(self, token: int) -> None:
        """``token`` is part of the sequence now. Saying it twice, as a step that comes again does, changes nothing."""
        if self._seen is not None and token not in self._seen:
            self._seen.add(token)
            self._seen_ids = None

    def token(self, logits_V: F32, position: int) -> int:
        """The token of sequence position ``position``."""
        if self._seen:
            if self._seen_ids is None:
                self._seen_ids = np.fromiter(self._seen, np.int64, len(self._seen))
            logits_V = penalise(logits_V, self._seen_ids, self._params.repetition_penalty)
        return sample(logits_V, self._params, seed=self._sampling.seed, choice=self._sampling.choice, position=position)

    def logprobs(self, logits_V: F32, token: int) -> TokenLogprobs | None:
        """What the request wants to know of ``token``; none where it asked for nothing."""
        return TokenLogprobs(*logprobs(logits_V, token, self._sampling.logprobs)) if self.reports else None


def choose_rows(logits_TV: F32, choosers: Sequence[Chooser], positions: Sequence[int]) -> tuple[int, ...]:
    """One token a row, in row order; ``positions`` are those of the new tokens."""
    tokens: list[int] = np.argmax(logits_TV, axis=1).tolist()
    for row, chooser in enumerate(choosers):
        if not chooser.plain:
            tokens[row] = chooser.token(logits_TV[row], positions[row])
    return tuple(tokens)


def logprobs_of_rows(
    logits_TV: F32, choosers: Sequence[Chooser], tokens: Sequence[int]
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of each row's token, where asked for; empty when no row asks, which costs nothing."""
    if not any(chooser.reports for chooser in choosers):
        return ()
    return tuple(
        chooser.logprobs(logits_V, token) for logits_V, chooser, token in zip(logits_TV, choosers, tokens, strict=True)
    )
