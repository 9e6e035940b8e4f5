"""From options to planned requests: which prompts, how long, when. What had to be cut or made up is said in notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afore.core.errors import ConfigError
from afore.tools.bench.arrivals import Arrival, clip_lengths, draw_arrivals_s
from afore.tools.bench.load import Planned
from afore.tools.bench.prompts import PromptText, tokens_of_length

CHARACTERS_PER_TOKEN = 4
"""A guess for servers that have no ``/tokenize``; the tokens that the server counts are what is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What will be sent."""

    planned: tuple[Planned, ...]
    notes: tuple[str, ...]
    """What a reader of the figures must know, a line each."""


def from_rate(
    prompts: Sequence[PromptText],
    *,
    count: int,
    rate: float,
    burstiness: float,
    seed: int,
    max_tokens: int | None,
    default_tokens: int,
    lengths: Sequence[int] | None = None,
    max_model_len: int | None = None,
) -> Workload:
    """``count`` requests with the prompts in order (counted round); each asks for what ``output_tokens`` says.

    ``lengths`` are the prompts' tokens, where they are known: with ``max_model_len`` they bound a ``max_tokens`` that was given.
    """
    notes = []
    if count > len(prompts):
        notes.append(f"{count} requests share {len(prompts)} prompts: some are sent more than once")
    wanted, cut = output_tokens(
        prompts, max_tokens=max_tokens, default_tokens=default_tokens, lengths=lengths, max_model_len=max_model_len
    )
    if cut:
        notes.append(f"the model's context cut --max-tokens {max_tokens} for {cut} of {len(prompts)} prompts")
    due_s = draw_arrivals_s(count, rate, burstiness=burstiness, seed=seed)
    planned = []
    for index, at_s in enumerate(due_s):
        at = index % len(prompts)
        planned.append(Planned(index=index, due_s=at_s, prompt=prompts[at].text, max_tokens=wanted[at]))
    return Workload(planned=tuple(planned), notes=tuple(notes))


def output_tokens(
    prompts: Sequence[PromptText],
    *,
    max_tokens: int | None,
    default_tokens: int,
    lengths: Sequence[int] | None,
    max_model_len: int | None,
) -> tuple[list[int], int]:
    """(output tokens of each prompt, how many of them the context cut).

    ``max_tokens`` overrides what prompts ask for, up to the room that the context leaves behind each; without it each prompt's own
    number goes, or ``default_tokens``.
    """
    if max_tokens is None:
        return [prompt.max_tokens or default_tokens for prompt in prompts], 0
    if lengths is None or max_model_len is None:
        return [max_tokens] * len(prompts), 0
    found = [min(max_tokens, max(1, max_model_len - length)) for length in lengths]
    return found, sum(tokens < max_tokens for tokens in found)


def from_trace(
    arrivals: Sequence[Arrival],
    prompts: Sequence[PromptText],
    pool: Sequence[Sequence[int]] | None,
    *,
    time_scale: float,
    max_model_len: int | None,
    max_tokens: int | None,
) -> Workload:
    """One request for each arrival, of its lengths and at its time × ``time_scale``.

    ``pool`` has the token ids of ``prompts``; without it, prompts are cut by characters. Raises ``ConfigError`` for an empty text.
    """
    if max_model_len is not None and max_model_len < 2:
        raise ConfigError("arrivals", f"the server's context is {max_model_len} tokens", "start it with a longer one")
    planned, cut_prompts, cut_outputs = [], 0, 0
    for index, arrival in enumerate(arrivals):
        length, output = clip_lengths(arrival, max_model_len=max_model_len, max_tokens=max_tokens)
        cut_prompts += length < arrival.context_tokens
        cut_outputs += output < arrival.generated_tokens
        prompt: str | tuple[int, ...]
        if pool is not None:
            prompt = tokens_of_length(pool, length, index)
        else:
            characters = [[*map(ord, text.text)] for text in prompts]
            prompt = "".join(map(chr, tokens_of_length(characters, length * CHARACTERS_PER_TOKEN, index)))
        planned.append(
            Planned(
                index=index,
                due_s=arrival.at_s * time_scale,
                prompt=prompt,
                max_tokens=output,
                prompt_tokens=length,
            )
        )
    notes = ["prompts are real texts, joined and cut to the trace's lengths; answers go on after the model's end token"]
    if cut_prompts:
        notes.append(
            f"{cut_prompts} of {len(planned)} prompts were longer than the model's context allows and were cut to it"
        )
    if cut_outputs:
        notes.append(f"{cut_outputs} of {len(planned)} outputs were cut to --max-tokens or the model's context")
    if pool is None:
        notes.append(
            f"the server has no /tokenize: prompt lengths are guessed at {CHARACTERS_PER_TOKEN} characters a token"
        )
    return Workload(planned=tuple(planned), notes=tuple(notes))
