"""The client against real sockets: what counts as a token, and that every failure has its reason."""

from __future__ import annotations

import pytest

from afore.core.clock import WallClock
from afore.core.errors import ConfigError
from afore.tools.bench.latency import Record
from afore.tools.bench.load import Planned
from afore.tools.bench.openai_client import Endpoint, OpenAIClient
from tests.tools.bench.servers import CARD, Scripted, Scripts, answer, counts, stream, token

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LISTED = {"/v1/models": answer(CARD), "/version": answer({"version": "9.9"}), "/health": answer({})}


async def ask(
    scripts: Scripts, *, endpoint: Endpoint = "completions", ignore_eos: bool = False
) -> tuple[Record, Scripted]:
    async with (
        Scripted({**LISTED, **scripts}).running() as server,
        OpenAIClient.connect(server.url, WallClock(), endpoint=endpoint, ignore_eos=ignore_eos, timeout_s=5) as client,
    ):
        await client.describe()
        sending = client.begin(Planned(index=3, due_s=0, prompt="p", max_tokens=4, prompt_tokens=1), 0)
        return sending.record(await sending.follow()), server


async def test_an_answer_is_counted_as_the_server_counts() -> None:
    found, server = await ask({COMPLETIONS: stream(token("a"), token(""), token("c"), counts(11, 3))}, ignore_eos=True)
    assert found.completed
    assert (found.index, found.prompt_tokens, found.output_tokens, len(found.chunks_ns)) == (3, 11, 3, 3)
    assert 0 < found.sent_ns <= found.chunks_ns[0] <= found.chunks_ns[-1] <= found.ended_ns
    assert server.bodies[-1] == {
        "model": "tiny", "prompt": "p", "max_tokens": 4, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip


async def test_without_usage_chunks_are_tokens() -> None:
    found, server = await ask({COMPLETIONS: stream(token("a"), token("b"))})
    assert (found.prompt_tokens, found.output_tokens) == (1, 2)
    assert "ignore_eos" not in server.bodies[-1]


async def test_a_chats_opening_without_text_is_no_token() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    found, server = await ask({CHAT: stream(*events)}, endpoint="chat")
    assert len(found.chunks_ns) == 2
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "p"}]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (answer({"error": {"message": "queue is full"}}, "429 Too Many Requests"), "HTTP 429: queue is full"),
        (answer("oops", "500 Internal Server Error"), 'HTTP 500: "oops"'),
        (stream(token("a"), {"error": {"message": "role lost: ffn-1"}}), "role lost: ffn-1"),
        (stream(token("a"), done=False), "the stream ended before [DONE]"),
        (stream(counts(1, 0)), "the answer held no token"),
        (stream({"no": "choices"}), "not an answer of this API: KeyError('choices')"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: ", "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
    ],
)
async def test_every_failure_has_its_reason(script: bytes, reason: str) -> None:
    found, _ = await ask({COMPLETIONS: script})
    assert not found.completed
    assert found.failure.startswith(reason)


async def test_a_failed_answer_keeps_the_tokens_that_came() -> None:
    found, _ = await ask({COMPLETIONS: stream(token("a"), token("b"), done=False)})
    assert found.output_tokens == 2


async def test_what_the_server_says_of_itself() -> None:
    async with (
        Scripted({**LISTED, "/tokenize": answer({"tokens": [1, 2]})}).running() as server,
        OpenAIClient.connect(server.url + "/v1/", WallClock()) as client,
    ):
        facts = await client.describe()
        assert (facts.model, facts.max_model_len, facts.version) == ("tiny", 64, "9.9")
        assert await client.tokenize(["x", "y"]) == [[1, 2], [1, 2]]
        assert await client.trouble() == ""


async def test_servers_that_say_little_are_served_too() -> None:
    async with (
        Scripted({"/v1/models": answer({"data": [{"id": "m"}]})}).running() as server,
        OpenAIClient.connect(server.url, WallClock()) as client,
    ):
        facts = await client.describe()
        assert (facts.max_model_len, facts.version) == (None, "")
        assert await client.tokenize(["x"]) is None
        assert await client.trouble() == ""


async def test_a_server_that_cannot_go_on_is_named() -> None:
    gone = {"/health": answer({"error": {"message": "role lost: ffn-1"}}, "503 Service Unavailable")}
    async with (
        Scripted({**LISTED, **gone}).running() as server,
        OpenAIClient.connect(server.url, WallClock()) as client,
    ):
        assert "no longer serves: role lost: ffn-1" in await client.trouble()


async def test_nobody_at_home_is_refused_and_seen_as_trouble() -> None:
    async with Scripted({}).running() as server:
        url = server.url
    async with OpenAIClient.connect(url, WallClock()) as client:
        with pytest.raises(ConfigError, match="nothing answers"):
            await client.describe()
        assert "does not answer" in await client.trouble()


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        (answer({"data": []}), "does not list a model"),
        (answer([1]), "does not list a model"),
        (answer({"error": {"message": "wrong key"}}, "401 Unauthorized"), "wrong key"),
    ],
)
async def test_another_server_is_refused(listed: bytes, problem: str) -> None:
    async with (
        Scripted({"/v1/models": listed}).running() as server,
        OpenAIClient.connect(server.url, WallClock()) as client,
    ):
        with pytest.raises(ConfigError, match=problem):
            await client.describe()
