"""A streaming client of any OpenAI-compatible server that stamps every chunk: what ``bench serve`` measures through.

Light on purpose: raw bytes, one JSON parse a chunk, no validation. The benchmark reports how much of a core it used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from afore.core.clock import Clock
from afore.core.errors import ConfigError, HostError
from afore.tools.bench.latency import Record
from afore.tools.bench.load import Planned
from afore.tools.bench.sse import EventReader

if TYPE_CHECKING:
    import httpx

PROBE_S: Final = 5.0
"""How long a server has to answer whether it lives."""
CONNECT_S: Final = 10.0
Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the server says of itself."""

    model: str
    max_model_len: int | None
    """Longest prompt plus output, where it says."""
    version: str
    """Empty where it does not say."""


class OpenAIClient:
    """One server. Use as ``async with OpenAIClient.connect(…) as client``."""

    def __init__(self, http: httpx.AsyncClient, clock: Clock, url: str, endpoint: Endpoint, ignore_eos: bool) -> None:
        self._http = http
        self._clock = clock
        self._endpoint = endpoint
        self._ignore_eos = ignore_eos
        self.url = url
        self.model = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        url: str,
        clock: Clock,
        *,
        api_key: str | None = None,
        endpoint: Endpoint = "completions",
        ignore_eos: bool = False,
        timeout_s: float = 600.0,
    ) -> AsyncIterator[OpenAIClient]:
        """``url`` without ``/v1``; ``timeout_s`` is the longest silence within an answer. Raises ``HostError`` without httpx."""
        try:
            import httpx
        except ImportError as error:
            raise HostError("httpx", "it is not installed", "pip install 'afore[bench]'") from error
        root = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        try:
            http = httpx.AsyncClient(
                base_url=root,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError("url", f"{url!r} is no address: {error}", "give http://HOST:PORT") from error
        async with http:
            yield cls(http, clock, root, endpoint, ignore_eos)

    async def describe(self) -> ServerFacts:
        """Model, context length and version. Raises ``ConfigError`` when nothing of this kind answers there."""
        listed = await self._get("/v1/models")
        cards = listed.get("data") if listed is not None else None
        if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict) or "id" not in cards[0]:
            raise ConfigError(
                "url", f"{self.url}/v1/models does not list a model", "start a server there; a key goes with --api-key"
            )
        self.model = str(cards[0]["id"])
        longest = cards[0].get("max_model_len")
        version = await self._get("/version") or {}
        return ServerFacts(
            model=self.model,
            max_model_len=longest if isinstance(longest, int) else None,
            version=str(version.get("version", "")),
        )

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Token ids of each text (as a chat, where that is the endpoint), or none where the server has no ``/tokenize``."""
        found = []
        for text in texts:
            asked: dict[str, Any] = (
                {"messages": [{"role": "user", "content": text}]} if self._endpoint == "chat" else {"prompt": text}
            )
            answer = await self._post("/tokenize", {"model": self.model, **asked})
            tokens = answer.get("tokens") if answer is not None else None
            if not isinstance(tokens, list) or not tokens:
                return None
            found.append([int(token) for token in tokens])
        return found

    async def trouble(self) -> str:
        """Why the server cannot go on, or nothing. A server without ``/health`` is asked for its models."""
        import httpx

        for path in ("/health", "/v1/models"):
            try:
                answer = await self._http.get(path, timeout=PROBE_S)
            except httpx.TransportError as error:
                return f"{self.url} does not answer ({type(error).__name__})"
            if answer.status_code == 503:
                return f"{self.url} no longer serves: {_message(answer.content)}"
            if answer.status_code < 500 and answer.status_code != 404:
                return ""
        return f"{self.url} answers {answer.status_code}"

    def begin(self, planned: Planned, due_ns: int) -> Answering:
        """One request, sent as soon as it is followed."""
        path, body = self._request(planned)
        return Answering(self._http, self._clock, path, body, planned, due_ns)

    def _request(self, planned: Planned) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": planned.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._endpoint == "chat":
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": planned.prompt}]}
        return "/v1/completions", {**body, "prompt": planned.prompt}

    async def _get(self, path: str) -> dict[str, Any] | None:
        return await self._json("GET", path, None)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return await self._json("POST", path, body)

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """The object a server answers, or none. Raises ``ConfigError`` when nobody listens or the key is refused."""
        import httpx

        try:
            answer = await self._http.request(method, path, json=body)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConfigError(
                "url", f"nothing answers at {self.url} ({type(error).__name__})", "start a server"
            ) from error
        if answer.status_code in (401, 403):
            raise ConfigError("api-key", f"{self.url} refuses it: {_message(answer.content)}", "give --api-key KEY")
        try:
            found = answer.json() if answer.status_code == 200 else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


class Answering:
    """One request under way: what has come of its answer so far, stamped."""

    def __init__(
        self, http: httpx.AsyncClient, clock: Clock, path: str, body: dict[str, Any], planned: Planned, due_ns: int
    ) -> None:
        self._http = http
        self._clock = clock
        self._path = path
        self._body = body
        self._planned = planned
        self._due_ns = due_ns
        self._sent_ns = clock.now_ns()
        self._chunks_ns: list[int] = []
        self._prompt_tokens = planned.prompt_tokens
        self._output_tokens: int | None = None

    async def follow(self) -> str:
        """Sends it and reads its answer to the end; returns why it failed, or nothing."""
        import httpx

        try:
            failure = await self._read()
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"not an answer of this API: {error!r}"
        return failure or ("" if self._chunks_ns else "the answer held no token")

    def record(self, failure: str) -> Record:
        """What has been seen of it so far. Tokens are those that the server counted; chunks, where it did not say."""
        counted = self._output_tokens
        return Record(
            index=self._planned.index,
            due_ns=self._due_ns,
            sent_ns=self._sent_ns,
            chunks_ns=tuple(self._chunks_ns),
            ended_ns=self._clock.now_ns(),
            prompt_tokens=self._prompt_tokens,
            output_tokens=len(self._chunks_ns) if counted is None else counted,
            failure=failure,
        )

    async def _read(self) -> str:
        async with self._http.stream("POST", self._path, json=self._body) as response:
            if response.status_code != 200:
                return f"HTTP {response.status_code}: {_message(await response.aread())}"
            reader = EventReader()
            failure, done = "", False
            async for received in response.aiter_raw():
                now_ns = self._clock.now_ns()
                for data in reader.feed(received):
                    if data == b"[DONE]":
                        done = True
                    else:
                        failure = self._take(json.loads(data), now_ns) or failure
        return failure or ("" if done else "the stream ended before [DONE]")

    def _take(self, chunk: dict[str, Any], now_ns: int) -> str:
        if "error" in chunk:
            return _text_of_error(chunk)
        usage = chunk.get("usage")
        if usage is not None:
            self._prompt_tokens = int(usage["prompt_tokens"])
            self._output_tokens = int(usage["completion_tokens"])
        for choice in chunk["choices"]:
            # A chat's opening chunk that has a role and no text is no token. (A first token without text is then found late.)
            delta = choice.get("delta")
            if delta is None or delta.get("content") or "role" not in delta:
                self._chunks_ns.append(now_ns)
        return ""


def _message(content: bytes) -> str:
    """The message of an error body, short."""
    try:
        return _text_of_error(json.loads(content))
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace") or "no message"


def _text_of_error(body: dict[str, Any]) -> str:
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)[:300]
