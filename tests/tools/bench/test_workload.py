"""What will be sent, and what a reader is told about it."""

from __future__ import annotations

import math

import pytest

from afore.core.errors import ConfigError
from afore.tools.bench.arrivals import Arrival
from afore.tools.bench.prompts import PromptText
from afore.tools.bench.workload import CHARACTERS_PER_TOKEN, Workload, from_rate, from_trace

PROMPTS = (PromptText(text="aaaa", max_tokens=64), PromptText(text="bb"))


def by_rate(count: int, max_tokens: int | None) -> Workload:
    return from_rate(
        PROMPTS, count=count, rate=math.inf, burstiness=1, seed=0, max_tokens=max_tokens, default_tokens=16
    )


def test_prompts_go_round_and_say_so() -> None:
    assert [planned.prompt for planned in by_rate(3, None).planned] == ["aaaa", "bb", "aaaa"]
    assert by_rate(3, None).notes == ("3 requests share 2 prompts: some are sent more than once",)
    assert by_rate(2, None).notes == ()


def test_lengths_are_the_prompts_own_unless_one_is_given() -> None:
    assert [planned.max_tokens for planned in by_rate(2, None).planned] == [64, 16]
    assert [planned.max_tokens for planned in by_rate(2, 32).planned] == [32, 32]
    assert [planned.max_tokens for planned in by_rate(2, 99).planned] == [99, 99]


def test_a_given_length_is_bounded_by_the_context_and_that_is_said() -> None:
    found = from_rate(
        PROMPTS, count=2, rate=math.inf, burstiness=1, seed=0, max_tokens=99, default_tokens=16, lengths=(60, 10),
        max_model_len=128,
    )  # fmt: skip
    assert [planned.max_tokens for planned in found.planned] == [68, 99]
    assert found.notes == ("the model's context cut --max-tokens 99 for 1 of 2 prompts",)


ARRIVALS = (
    Arrival(at_s=0, context_tokens=3, generated_tokens=4),
    Arrival(at_s=2, context_tokens=50, generated_tokens=30),
)


def test_a_trace_gives_times_and_lengths() -> None:
    found = from_trace(ARRIVALS, PROMPTS, [[1, 2], [3]], time_scale=0.5, max_model_len=None, max_tokens=None)
    assert [planned.due_s for planned in found.planned] == [0, 1]
    assert [planned.max_tokens for planned in found.planned] == [4, 30]
    assert found.planned[0].prompt == (1, 2, 3)
    assert found.planned[1].prompt_tokens == len(found.planned[1].prompt) == 50


def test_what_was_cut_is_said() -> None:
    found = from_trace(ARRIVALS, PROMPTS, [[1, 2], [3]], time_scale=1, max_model_len=40, max_tokens=20)
    assert [(len(planned.prompt), planned.max_tokens) for planned in found.planned] == [(3, 4), (20, 20)]
    assert "1 of 2 prompts were longer" in found.notes[1]
    assert "1 of 2 outputs were cut" in found.notes[2]


def test_without_a_tokenizer_lengths_are_guessed_and_said_to_be() -> None:
    found = from_trace(ARRIVALS[:1], PROMPTS, None, time_scale=1, max_model_len=None, max_tokens=None)
    assert found.planned[0].prompt == ("aaaabb" * 9)[: 3 * CHARACTERS_PER_TOKEN]
    assert "guessed" in found.notes[-1]


def test_a_server_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="context is 1"):
        from_trace(ARRIVALS, PROMPTS, [[1]], time_scale=1, max_model_len=1, max_tokens=None)
