"""Choosing the next token from logits, one row at a time: nothing here depends on what else is in the batch.

A sampled token's random number is a function of (seed, choice, position) alone, so that a request that is replayed after a
failure, or preempted, gets the same tokens.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from afore.core.errors import ConfigError
from afore.models.attention import F32

_MAX_SEED = 2**64 - 1
LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of a probability of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose; the default is greedy. Raises ``ConfigError`` naming the field for a value that makes no sense."""

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Then keep the fewest most probable tokens whose probabilities reach this sum; 1 keeps all."""
    repetition_penalty: float = 1.0
    """See ``penalise``; 1 is off."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:  # NaN fails this too
            raise ConfigError("temperature", f"{self.temperature} is not in 0…100", "0 is greedy, 1 is the model's own")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError("top_p", f"{self.top_p} is not in (0, 1]", "1 keeps every token")
        if self.top_k < 0:
            raise ConfigError("top_k", f"{self.top_k} is negative", "0 keeps every token")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise ConfigError("repetition_penalty", f"{self.repetition_penalty} is not in 0.01…100", "1 is off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


GREEDY = SamplingParams()


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of choice ``choice`` (of n) at sequence position ``position``: 53 bits of BLAKE2b."""
    key = struct.pack("<QQQ", seed & _MAX_SEED, choice, position)
    word = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"afore-sample").digest(), "little")
    return (word >> 11) / 2**53


def sample(logits_V: F32, params: SamplingParams, *, seed: int, choice: int, position: int) -> int:
    """The next token: argmax (the lowest id among equals), or one drawn from the filtered softmax.

    ``position`` is the new token's own position in its sequence, prompt included.
    """
    if params.greedy:
        return int(np.argmax(logits_V))
    tokens, cumulative = _filtered(logits_V, params)
    index = int(np.searchsorted(cumulative, uniform(seed, choice, position) * cumulative[-1], side="right"))
    return int(tokens[min(index, len(tokens) - 1)])


def penalise(logits_V: F32, seen: npt.NDArray[np.int64], penalty: float) -> F32:
    """A copy of the logits in which the tokens ``seen`` are less likely (penalty > 1) or more (< 1), as in CTRL
    (arXiv:1909.05858, § 4.1): positive logits are divided by ``penalty``, negative ones multiplied.
    """
    penalised_V = logits_V.copy()
    logits = penalised_V[seen]
    penalised_V[seen] = np.where(logits > 0, logits / penalty, logits * penalty)
    return penalised_V


def logprobs(logits_V: F32, token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """ln softmax of ``token``, and (token, ln softmax) of the ``top`` most probable ones, best first (lowest id among equals).

    What is impossible, or no number, comes as ``LEAST_LOGPROB``, not as an infinity or NaN, which JSON cannot write.
    """
    scores_V = logits_V.astype(np.float64)
    with np.errstate(invalid="ignore"):
        highest = float(scores_V.max())
        normaliser = highest + float(np.log(np.exp(scores_V - highest).sum()))

    def value(index: int) -> float:
        exact = float(scores_V[index]) - normaliser
        return exact if exact > LEAST_LOGPROB else LEAST_LOGPROB  # also for a NaN, which is not greater

    best: list[int] = []
    if top:
        top = min(top, len(scores_V))
        # Everything as good as the top-th best: a partition alone would pick any of the equals at the border.
        border = np.partition(scores_V, -top)[-top]
        candidates = np.flatnonzero(scores_V >= border)
        best = candidates[np.argsort(-scores_V[candidates], kind="stable")][:top].tolist()
    return value(token), tuple((index, value(index)) for index in best)


def _filtered(logits_V: F32, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that may be drawn, most probable first, and their cumulative probabilities (not rescaled)."""
    order = np.argsort(-logits_V, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    scaled = logits_V[order].astype(np.float64)
    # The maximum goes before the division: a tiny temperature must sharpen, not overflow.
    weights = np.exp((scaled - scaled[0]) / params.temperature)
    cumulative = np.cumsum(weights / weights.sum())
    if params.top_p < 1.0:
        kept = int(np.searchsorted(cumulative, params.top_p, side="left")) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    return order, cumulative
