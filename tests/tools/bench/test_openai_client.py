"""The client against real sockets: what counts as a token, and that every failure has its reason."""

from __future__ import annotations

from typing import Any

import pytest

from afore.core.clock import WallClock
from afore.core.errors import ConfigError
from afore.tools.bench.latency import Record
from afore.tools.bench.load import Planned
from afore.tools.bench.openai_client import Endpoint, OpenAIClient
from tests.tools.bench.servers import CARD, Scripted, Scripts, answer, counts, stream, token

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LISTED = {"/v1/models": answer(CARD), "/version": answer({"version": "9.9"}), "/health": answer({})}


PACKED_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n\r\n"


def plain(event: bytes) -> bytes:
    """A stream of one event, of these very bytes."""
    return stream(done=False) + b"data: " + event + b"\n\ndata: [DONE]\n\n"


def finished(text: str, reason: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


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
        (plain(b"[" * 200_000), "not an answer of this API: ValueError('JSON that is nested too deeply')"),
        (plain(b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}"), "["),
        (plain(b'{"choices": [], "usage": {"prompt_tokens": 1e999, "completion_tokens": 1}}'), "not an answer"),
        (plain(b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": %s}}' % (b"9" * 400)), "not an"),
        (plain(b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": %s}}' % (b"9" * 5000)), "not an"),
        (stream(token("a"), counts(-1, 1)), "not an answer of this API: ValueError(\"'-1' is no count of tokens"),
        (stream(token("a"), counts(1, -1)), "not an answer"),
        (
            stream(token("a"), {"choices": [], "usage": {"prompt_tokens": True, "completion_tokens": 1}}),
            "not an answer",
        ),
        (stream(token("a"), token("b"), counts(1, 1)), "the server counts 1 tokens in 2 chunks with text"),
        (stream(), "the answer held no token"),
        (stream(token("")), "the answer held no token"),
        (stream(token(""), counts(1, 0)), "the answer held no token"),
        (stream(finished("", "stop")), "the answer held no token"),
        (stream(finished("", "length"), counts(1, 3)), "the answer held no token"),
        (stream(finished("", "abort")), "the server broke it off (finish_reason 'abort')"),
        (stream(token("a"), finished("b", "abort"), counts(1, 2)), "the server broke it off"),
        (stream({"error": {"message": "a\nb\x1b[2J\ud800"}}), "a b [2J "),
        (stream([]), "not an answer"),
        (stream({"choices": [{"finish_reason": []}]}), "not an answer"),
        (answer({"error": {"message": "x\ny"}}, "500 Oops"), "HTTP 500: x y"),
        (PACKED_HEAD + b"data: [DONE]\n\n", "the answer is packed (gzip)"),
        (PACKED_HEAD.replace(b"200", b"500") + b"oops", "HTTP 500: oops"),
    ],
)
async def test_every_failure_has_its_reason(script: bytes, reason: str) -> None:
    found, _ = await ask({COMPLETIONS: script})
    assert not found.completed
    assert found.failure.startswith(reason)


@pytest.mark.parametrize(
    ("events", "chunks", "tokens"),
    [
        ([token("a"), token("b"), finished("", "length"), counts(1, 2)], 2, 2),  # it only says why the answer ends
        ([token("a"), token("b"), finished("", "stop"), counts(1, 3)], 3, 3),  # the model's end token
        ([token("a b"), token("c d"), finished("", "stop"), counts(1, 5)], 2, 5),
        ([token("a"), token("b"), finished("", "stop")], 2, 2),
        ([token("a"), finished("b", "length"), counts(1, 2)], 2, 2),
        ([finished("", "stop"), counts(1, 1)], 1, 1),
        ([token("a"), token(""), token("b"), counts(1, 2)], 2, 2),
    ],
)
async def test_the_last_chunk_with_a_token_ends_an_answer(
    events: list[dict[str, Any]], chunks: int, tokens: int
) -> None:
    found, _ = await ask({COMPLETIONS: stream(*events)})
    assert found.failure == ""
    assert (len(found.chunks_ns), found.output_tokens) == (chunks, tokens)


async def test_what_comes_behind_done_is_no_part_of_an_answer() -> None:
    behind = stream(token("b"), counts(9, 9)).partition(b"\r\n\r\n")[2]
    found, _ = await ask({COMPLETIONS: stream(token("a"), counts(1, 1)) + behind + b"data: {{{\n\n"})
    assert (found.failure, found.prompt_tokens, found.output_tokens, len(found.chunks_ns)) == ("", 1, 1, 1)


async def test_nothing_is_asked_for_in_packed_form() -> None:
    _, server = await ask({COMPLETIONS: stream(token("a"))})
    assert server.heads
    assert all("accept-encoding: identity" in head.lower() for head in server.heads)


@pytest.mark.parametrize("key", ["", "a\nb", "a b", "schlüssel", "a\r\nx: y", "\x00"])
async def test_a_key_that_no_header_can_carry_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^api-key: it is empty or has a space.* as the server has it$"):
        async with OpenAIClient.connect("http://127.0.0.1:1", WallClock(), api_key=key):
            pass


@pytest.mark.parametrize("tokens", [b'["x"]', b"[1e999]", b"[true]", b"[" * 100_000, b"7"])
async def test_a_tokenizer_that_answers_something_else_is_none(tokens: bytes) -> None:
    body = b'{"tokens": ' + tokens + b"}"
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with (
        Scripted({**LISTED, "/tokenize": head + body}).running() as server,
        OpenAIClient.connect(server.url, WallClock()) as client,
    ):
        assert await client.tokenize(["x"]) is None


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
        (answer({"data": [{"id": 7}]}), "does not list a model"),
        (answer({"data": [{"id": "\ud800"}]}), "does not list a model"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"[" * 200_000, "does not list a model"),
        (PACKED_HEAD + b"{}", "does not list a model"),
        (b"", "nothing answers"),
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
