"""Chats through OpenAI's own clients, plain and asynchronous."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from afore.models.bundle import bundled_model_path
from afore.models.tokenizer import Tokenizer
from tests.serving.http.served import Served

pytestmark = pytest.mark.slow

MODEL = "tiny-glm4moe"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story."}]},
]
PLAIN = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def expected(served: Served) -> str:
    return served.generate(Tokenizer(bundled_model_path()).encode_chat(PLAIN), max_new_tokens=14)[1]


def test_a_chat_is_its_templates_text(openai: OpenAI, expected: str) -> None:
    answer = openai.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=14, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (14, 0)  # type: ignore[union-attr]  # it is there


def test_the_role_goes_with_the_first_token(openai: OpenAI, expected: str) -> None:
    chunks = list(
        openai.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=14,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * 13
    assert pieces[0].choices[0].delta.content, "the first chunk has text already"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 14


def test_logprobs_of_a_chat(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    report = answer.choices[0].logprobs
    assert report is not None
    assert report.content is not None
    assert "".join(entry.token for entry in report.content) == answer.choices[0].message.content
    for entry in report.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the best"
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob
        assert bytes(entry.bytes or []).decode() == entry.token


def test_without_a_limit_a_chat_may_fill_what_room_there_is(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": PLAIN, "temperature": 0, "stop": "."})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


async def test_many_chats_at_once_stay_apart(served: Served) -> None:
    tokenizer = Tokenizer(bundled_model_path())
    topics = [f"Count from {number}." for number in range(8)]
    alone = [
        served.generate(tokenizer.encode_chat([{"role": "user", "content": topic}]), max_new_tokens=6 + number)[1]
        for number, topic in enumerate(topics)
    ]
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int, topic: str) -> str:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": topic}],
                max_tokens=6 + number,
                temperature=0,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*(ask(number, topic) for number, topic in enumerate(topics)))
    assert list(together) == alone
