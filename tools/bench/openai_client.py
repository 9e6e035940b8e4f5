"""A streaming client of any OpenAI-compatible server that stamps every chunk: what ``bench serve`` measures through.

Light on purpose: raw bytes, one JSON parse a chunk, no validation. The benchmark reports how much of a core it used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from afore.core.clock import Clock
from afore.core.errors import ConfigError, HostError
from afore.tools.bench.answer import Answer, body_bytes, coded, message_of, parse_json
from afore.tools.bench.latency import Record
from afore.tools.bench.load import Planned
from afore.tools.bench.sse import EventReader
from afore.tools.printable import printable

if TYPE_CHECKING:
    import httpx

PROBE_S: Final = 5.0
"""How long a server has to answer whether it lives."""
CONNECT_S: Final = 10.0
TELL_S: Final = 60.0
"""How long it has to answer anything else that is no generation."""
DRAIN_S: Final = 1.0
"""How long a connection may stay open behind an answer's end, so that it can be used again."""
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
        """``url`` without ``/v1``; ``timeout_s`` is the longest silence within an answer.

        Raises ``HostError`` without httpx, ``ConfigError`` for an address or a key that cannot be one.
        """
        try:
            import httpx
        except ImportError as error:
            raise HostError("httpx", "it is not installed", "pip install 'afore[bench]'") from error
        root = url.rstrip("/").removesuffix("/v1")
        # Bytes are stamped as they come, so nothing may have to be unpacked first.
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            check_key(api_key)
            headers["Authorization"] = f"Bearer {api_key}"
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
        card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        if not _sendable(card.get("id")):
            raise ConfigError(
                "url", f"{self.url}/v1/models does not list a model", "start a server there; a key goes with --api-key"
            )
        self.model = card["id"]
        longest = card.get("max_model_len")
        version = await self._get("/version") or {}
        return ServerFacts(
            model=self.model,
            max_model_len=longest if type(longest) is int else None,
            version=printable(found) if isinstance(found := version.get("version"), str) else "",
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
            if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
                return None
            found.append(tokens)
        return found

    async def trouble(self) -> str:
        """Why the server cannot go on, or nothing. A server without ``/health`` is asked for its models."""
        import httpx

        for path in ("/health", "/v1/models"):
            try:
                async with asyncio.timeout(PROBE_S):
                    status, content = await self._fetch("GET", path, None)
            except (httpx.HTTPError, TimeoutError) as error:
                return f"{self.url} does not answer ({type(error).__name__})"
            if status == 503:
                return f"{self.url} no longer serves: {message_of(content)}"
            if status < 500 and status != 404:
                return ""
        return f"{self.url} answers {status}"

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
            async with asyncio.timeout(TELL_S):
                status, content = await self._fetch(method, path, body)
        # A name that is no host's is a ValueError of the resolver.
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError, ValueError) as error:
            raise ConfigError(
                "url", f"nothing answers at {self.url} ({type(error).__name__})", "start a server"
            ) from error
        if status in (401, 403):
            raise ConfigError("api-key", f"{self.url} refuses it: {message_of(content)}", "give --api-key KEY")
        try:
            found = parse_json(content) if status == 200 else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """(status, raw body). Raises httpx's errors."""
        async with self._http.stream(method, path, json=body) as response:
            return response.status_code, await body_bytes(response.aiter_raw())


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
        self._ended_ns: int | None = None
        self._answer = Answer(planned.prompt_tokens)

    async def follow(self) -> str:
        """Sends it and reads its answer to the end; returns why it failed, or nothing."""
        import httpx

        try:
            return await self._read()
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {printable(str(error))}" if str(error) else type(error).__name__
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"not an answer of this API: {printable(repr(error))}"

    def record(self, failure: str) -> Record:
        """What has been seen of it so far. Tokens are those that the server counted; chunks, where it did not say."""
        chunks_ns = self._answer.chunks_ns
        counted = self._answer.output_tokens
        return Record(
            index=self._planned.index,
            due_ns=self._due_ns,
            sent_ns=self._sent_ns,
            chunks_ns=chunks_ns,
            ended_ns=self._clock.now_ns() if self._ended_ns is None else self._ended_ns,
            prompt_tokens=self._answer.prompt_tokens,
            output_tokens=len(chunks_ns) if counted is None else counted,
            failure=failure,
        )

    async def _read(self) -> str:
        async with self._http.stream("POST", self._path, json=self._body) as response:
            raw = response.aiter_raw()
            if response.status_code != 200:
                return f"HTTP {response.status_code}: {message_of(await body_bytes(raw))}"
            if coding := coded(response.headers.get("content-encoding", "")):
                return f"the answer is packed ({coding}), which nobody asked for"
            reader = EventReader()
            async for received in raw:
                now_ns = self._clock.now_ns()
                for data in reader.feed(received):
                    if data == b"[DONE]":
                        # What comes behind it is no part of the answer.
                        self._ended_ns = now_ns
                        await _drain(raw)
                        return self._answer.verdict()
                    self._answer.take(parse_json(data), now_ns)
        return self._answer.failure or "the stream ended before [DONE]"


async def _drain(raw: AsyncIterator[bytes]) -> None:
    """Reads a connection to the end of its response, so that the next request can use it; for a moment only."""
    import httpx

    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in raw:
                pass


def check_key(api_key: str) -> None:
    """Raises ``ConfigError`` for a key that no header can carry; the message does not tell it."""
    if not api_key or not all("!" <= letter <= "~" for letter in api_key):
        raise ConfigError(
            "api-key",
            "it is empty or has a space, a line end or a letter outside ASCII",
            "give it as the server has it",
        )


def _sendable(model: Any) -> bool:
    """Whether this names a model: half a surrogate pair, which JSON can write, cannot be sent back."""
    return isinstance(model, str) and bool(model) and not any("\ud800" <= letter <= "\udfff" for letter in model)
