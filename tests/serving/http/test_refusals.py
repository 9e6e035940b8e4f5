"""What is refused, with which status and which field; what a door says while roles are missing or lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai as openai_errors
import pytest
from openai import OpenAI

from afore.core.clock import WallClock
from afore.core.config import RunConfig, ServeOptions
from afore.core.errors import ConfigError, PeerLost
from afore.serving.client import Client
from afore.serving.http.listen import check_listen
from afore.serving.roles import RealWorld, run_role
from afore.serving.spec import HUB_ADDRESS
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.session import HubSession
from tests.serving.http.served import CONFIG, SMALL, serving

pytestmark = pytest.mark.slow

TEXT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[1], []]}, "prompt"),
        ("completions", {"prompt": ["a", 1]}, "prompt"),
        ("completions", {"prompt": [4096]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": [5] * 3000}, "prompt"),
        ("completions", {"prompt": "a " * 3000}, "prompt"),
        ("completions", {"prompt": "a" * 1_000_000}, "prompt"),
        ("completions", {"prompt": ["a"] * 129}, "prompt"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": "2"}, "max_tokens"),
        ("completions", {"max_tokens": True}, "max_tokens"),
        ("completions", {"max_tokens": 2.5}, "max_tokens"),
        ("completions", {"max_tokens": 3000}, "max_tokens"),
        ("completions", {"temperature": -0.1}, "temperature"),
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"top_p": 0}, "top_p"),
        ("completions", {"top_p": 1.01}, "top_p"),
        ("completions", {"top_k": -2}, "top_k"),
        ("completions", {"n": 0}, "n"),
        ("completions", {"n": 10**9}, "n"),
        ("completions", {"prompt": ["a"] * 100, "n": 100}, "n"),
        ("completions", {"seed": 1.5}, "seed"),
        ("completions", {"seed": 10**40}, "seed"),
        ("completions", {"stop": ["a"] * 17}, "stop"),
        ("completions", {"stop": ""}, "stop"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": 1, "echo": True}, "logprobs"),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty"),
        ("completions", {"presence_penalty": 0.5}, "presence_penalty"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("completions", {"stream": "yes"}, "stream"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ("completions", {"temprature": 1}, "temprature"),
        ("completions", {"user": 7}, "user"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "to": 1}]}, "messages[0].to"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * 3000}]}, "messages"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"max_completion_tokens": 3}, "max_tokens"),
        ("chat/completions", {"max_tokens": None, "max_completion_tokens": 3000}, "max_completion_tokens"),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=str,
)
def test_a_bad_field_is_named(http: httpx.Client, path: str, change: dict[str, Any], param: str) -> None:
    answer = http.post(f"/v1/{path}", json={**(TEXT if path == "completions" else CHAT), **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param)
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert len(error["message"]) <= 500


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": None, "stop": None, "logit_bias": None, "unheard_of": None},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "logit_bias": {}, "suffix": "", "min_p": 0},
        {"user": "me", "metadata": {"a": [1]}, "store": False, "service_tier": "auto"},
        {"top_k": -1, "temperature": 0, "seed": -(2**63), "stop": []},
    ],
)
def test_what_asks_for_nothing_is_taken(http: httpx.Client, change: dict[str, Any]) -> None:
    assert http.post("/v1/completions", json={**TEXT, **change}).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "top_p": -Infinity}',
        b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "x", "n": 1e999}',
    ],
    ids=lambda data: repr(data[:32]),
)
def test_bytes_that_are_no_request_are_400(http: httpx.Client, data: bytes) -> None:
    answer = http.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_status_by_kind(http: httpx.Client, openai: OpenAI) -> None:
    with pytest.raises(openai_errors.NotFoundError, match="gpt-9") as missing:
        openai.completions.create(model="gpt-9", prompt="x")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai_errors.NotFoundError):
        openai.models.retrieve("gpt-9")
    with pytest.raises(openai_errors.BadRequestError, match="vocabulary"):
        openai.completions.create(model="tiny-glm4moe", prompt=[999_999])
    assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    wrong = http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    form = http.post("/v1/completions", content=json.dumps(TEXT), headers={"content-type": "text/plain"})
    assert form.status_code == 415
    assert form.json()["error"]["code"] == "unsupported_media_type"
    assert http.post("/detokenize", json={"tokens": [1, 4096]}).json()["error"]["param"] == "tokens"


def test_a_body_that_is_too_long_is_413_with_and_without_its_length(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(9):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"}
    for content in (b" " * (9 << 20), pieces()):
        with contextlib.suppress(httpx.WriteError):  # the door need not read to the end
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"


def test_a_key_is_asked_for_where_there_is_one() -> None:
    with serving(SMALL, api_key="sesame", served_model_name="mine") as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key="sesame", max_retries=0) as client:
            assert client.completions.create(model="mine", prompt="x", max_tokens=1).model == "mine"
        with (
            OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai_errors.AuthenticationError, match="API key"),
        ):
            client.models.list()
        for path in ("/v1/models", "/openapi.json", "/tokenize", "/nothing"):
            assert httpx.get(served.url + path).status_code == 401
        for path in ("/health", "/live", "/version", "/metrics"):
            assert httpx.get(served.url + path).status_code == 200


def test_a_connection_that_does_not_ask_is_closed() -> None:
    """Also one that stops within the head of its request, the first or a later one; a slow answer is no such thing."""
    whole = b"GET /live HTTP/1.1\r\nHost: door\r\n\r\n"
    impatient = dataclasses.replace(SMALL, times=dataclasses.replace(SMALL.times, control_s=0.5))
    body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
    with serving(impatient) as served, contextlib.ExitStack() as open_:
        where = urllib.parse.urlparse(served.url)
        for sent in (b"", b"GET /li", whole + b"GET /li"):
            sock = open_.enter_context(socket.create_connection((where.hostname, where.port), timeout=30))
            sock.sendall(sent)
            received = b""
            while data := sock.recv(4096):
                received += data
            assert received.startswith(b"HTTP/1.1 200") == sent.startswith(whole)
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 400


def test_a_full_queue_is_429_and_a_later_request_is_served() -> None:
    with (
        serving(SMALL) as served,
        httpx.Client(base_url=served.url, timeout=60) as http,
        contextlib.ExitStack() as open_,
    ):
        long = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
        running = open_.enter_context(http.stream("POST", "/v1/completions", json=long))
        lines = running.iter_lines()
        next(lines)
        for _ in range(2):
            # A stream's headers come once the engine has taken the request in.
            open_.enter_context(http.stream("POST", "/v1/completions", json=long))
        for body in ({**TEXT}, {**TEXT, "stream": True}):
            full = http.post("/v1/completions", json=body)
            assert full.status_code == 429
            assert full.headers["retry-after"] == "1"
            assert full.json()["error"]["code"] == "queue_full"
        open_.close()
        # The door may read this before it notices that the others are gone.
        while (again := http.post("/v1/completions", json=TEXT)).status_code == 429:
            pass
        assert again.status_code == 200


@contextlib.asynccontextmanager
async def a_door_alone(config: RunConfig) -> AsyncIterator[tuple[Client, LoopbackNetwork]]:
    """A door without any other role, and a client of its hub."""
    clock = WallClock()
    network = LoopbackNetwork(clock)
    config = dataclasses.replace(config, times=dataclasses.replace(config.times, shutdown_s=0.2))
    own = LoopbackFabric(network, "door-0")
    door = asyncio.create_task(
        run_role("door", 0, fabric=own, hub_address=HUB_ADDRESS, clock=clock, config=config, world=RealWorld())
    )
    async with contextlib.AsyncExitStack() as stack:
        fabric = LoopbackFabric(network, "client")
        stack.push_async_callback(fabric.close)
        while True:
            try:
                client = await stack.enter_async_context(Client.connect(fabric, HUB_ADDRESS, clock, timeout_us=5e6))
                break
            except PeerLost:
                await asyncio.sleep(0)
        await client.known()
        try:
            yield client, network
        finally:
            await client.stop("enough")
            await door


async def test_health_names_who_is_missing_until_everybody_is_there() -> None:
    async with a_door_alone(CONFIG) as (client, _), httpx.AsyncClient(base_url=client.status.url) as http:
        health = await http.get("/health")
        assert health.status_code == 503
        missing = ["scheduler-0", "ffn-0", "ffn-1", "attention-0", "attention-1", "prefill-0"]
        assert health.json()["missing"] == missing
        assert all(name in health.json()["error"]["message"] for name in missing)
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
        early = await http.post("/v1/completions", json=TEXT)
        assert (early.status_code, early.json()["error"]["code"]) == (503, "not_serving")


def test_a_lost_role_ends_streams_with_an_error_and_is_named() -> None:
    with serving(SMALL) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        long = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=long) as running:
            lines = running.iter_lines()
            next(lines)
            served.kill("ffn-1")
            *_, last, done = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(last)["error"]["code"] == "role_lost"
        assert "ffn-1" in json.loads(last)["error"]["message"]
        assert done == "[DONE]"
        for answer in (http.get("/health"), http.post("/v1/completions", json=TEXT)):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "role_lost"
            assert "ffn-1" in answer.json()["lost"]


def test_the_address_is_checked_beforehand() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="already in use") as refused:
            check_listen(ServeOptions(port=taken.getsockname()[1]))
        assert refused.value.field == "serve.port"
    with pytest.raises(ConfigError, match="host"):
        check_listen(ServeOptions(host="no.such.host.invalid", port=0, allow_remote_without_key=True))
    check_listen(ServeOptions(port=0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_beyond_this_machine_a_key_or_an_explicit_word_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="other machines"):
        ServeOptions(host=host)
    ServeOptions(host=host, api_key="k")
    ServeOptions(host=host, allow_remote_without_key=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_this_machine_none_is_needed(host: str) -> None:
    assert ServeOptions(host=host).loopback


async def test_roles_are_sent_everything_but_the_doors_key() -> None:
    config = dataclasses.replace(CONFIG, serve=ServeOptions(http=True, port=0, host="0.0.0.0", api_key="sesame"))
    async with a_door_alone(config) as (client, network):
        assert client.status.url.startswith("http://127.0.0.1:")
        fabric = LoopbackFabric(network, "ffn-0")
        session = await HubSession.join(fabric, HUB_ADDRESS, "ffn", 0, timeout_us=5e6)
        assert session.config == dataclasses.replace(config, serve=ServeOptions(), times=session.config.times)
        await session.close()
        await fabric.close()
