"""What a request may ask for: checked before it takes a place in the queue."""

from __future__ import annotations

from dataclasses import dataclass

from afore.core import control
from afore.core.errors import PromptTooLong, RequestError

MOST_LOGPROBS = 20
"""Log-probabilities of the most probable tokens that a request may ask for."""
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask for; from the model and the configuration."""

    vocab_size: int
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    kv_tokens: int
    """Tokens that one attention worker's KV cache holds."""
    eos_ids: frozenset[int]


def check_request(submit: control.Submit, limits: Limits, *, has_text: bool) -> None:
    """Raises ``RequestError`` or ``PromptTooLong`` for a request that this model and cluster cannot answer.

    ``has_text``: the model has a tokenizer.
    """
    if not submit.prompt:
        raise RequestError(submit.request, "the prompt is empty", "send at least one token")
    bad = next((token for token in submit.prompt if not 0 <= token < limits.vocab_size), None)
    if bad is not None:
        raise RequestError(submit.request, f"token {bad} is not in the vocabulary of {limits.vocab_size}")
    if submit.max_new_tokens < 1:
        raise RequestError(submit.request, f"max_new_tokens is {submit.max_new_tokens}", "ask for at least 1")
    sampling = submit.sampling
    if not 0 <= sampling.temperature <= 100:
        raise RequestError(submit.request, f"temperature is {sampling.temperature}", "give a number from 0 to 100")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(submit.request, f"top_p is {sampling.top_p}", "give a number above 0, at most 1")
    if not 0 <= sampling.choice < 1 << 31:
        raise RequestError(submit.request, f"choice is {sampling.choice}", "give 0 or more")
    if sampling.top_k < 0:
        raise RequestError(submit.request, f"top_k is {sampling.top_k}", "give 0 (off) or more")
    if not 0.01 <= sampling.repetition_penalty <= 100:
        raise RequestError(
            submit.request, f"repetition_penalty is {sampling.repetition_penalty}", "give a number from 0.01 to 100"
        )
    if not -1 <= sampling.logprobs <= MOST_LOGPROBS:
        raise RequestError(submit.request, f"logprobs is {sampling.logprobs}", f"give -1 (none) to {MOST_LOGPROBS}")
    if len(submit.stop) > MOST_STOPS or any(not 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in submit.stop):
        raise RequestError(
            submit.request,
            "a stop string is empty or too long, or there are too many",
            f"give at most {MOST_STOPS} of 1 to {MOST_STOP_CHARACTERS} characters",
        )
    if submit.stop and not has_text:
        raise RequestError(submit.request, "this model has no tokenizer, so no text to stop at", "leave out stop")
    total = len(submit.prompt) + submit.max_new_tokens
    if total > limits.max_model_len:
        raise PromptTooLong(
            submit.request,
            f"{len(submit.prompt)} prompt tokens and {submit.max_new_tokens} new ones exceed {limits.max_model_len}",
            "shorten the prompt or ask for fewer tokens",
        )
    if total > limits.kv_tokens:
        raise PromptTooLong(
            submit.request,
            f"{total} tokens do not fit the KV cache of {limits.kv_tokens}",
            "raise batch.kv_blocks",
        )
