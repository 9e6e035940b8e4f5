"""Small real servers for the benchmark's client: scripted answers over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

Scripts = Mapping[str, bytes]
CARD = {"data": [{"id": "tiny", "max_model_len": 64}]}


def answer(body: object, status: str = "200 OK") -> bytes:
    """A whole response with a JSON body."""
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + content


def stream(*events: object, done: bool = True) -> bytes:
    """A whole response of server-sent events."""
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        + b"".join(lines)
        + (b"data: [DONE]\n\n" if done else b"")
    )


def token(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}


def counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


class Scripted:
    """Answers each path with fixed bytes, then closes; remembers what it was sent."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.asked = asyncio.Event()
        """Set with the first body."""
        self.url = ""
        self._open: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Scripted]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
        # Connections that were accepted at the last moment, or that a client keeps open, would outlive the event loop.
        for _ in range(20):
            await asyncio.sleep(0)
            for writer in self._open.values():
                writer.transport.abort()
        await asyncio.gather(*self._open, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            await self._answer(reader, writer)
        finally:
            writer.transport.abort()
            del self._open[task]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            length = next(
                (int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line), 0
            )
            if length:
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.asked.set()
            writer.write(
                self._scripts.get(head.split()[1], answer({"error": {"message": "no such path"}}, "404 Not Found"))
            )
            await writer.drain()
            writer.close()
            await writer.wait_closed()
