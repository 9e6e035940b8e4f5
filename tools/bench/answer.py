"""What a streamed answer of OpenAI's API holds: tokens, when they came, and what the server counted. Pure.

A server may be broken or another one than meant: whatever it sends becomes a ``ValueError``, ``KeyError``, ``TypeError`` or
``AttributeError``, which the client counts as a failure of that request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

from afore.tools.printable import printable

MOST_BODY_BYTES: Final = 16 << 20
"""Of a response that is no stream."""
MOST_COUNT: Final = 1 << 40
"""Of the tokens that a server counts: what is beyond is no count."""
BROKEN_OFF: Final = frozenset({"abort", "aborted", "cancelled", "canceled", "error", "timeout"})
"""Reasons to finish with which servers say that they did not."""


class Answer:
    """One answer, chunk by chunk."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        """As the server counts; until then as the request has them."""
        self.output_tokens: int | None = None
        """As the server counts, where it says."""
        self.failure = ""
        """What the server said went wrong."""
        self._chunks: list[tuple[int, bool]] = []
        """(when it came, whether it had a text) of every chunk with a token."""
        self._last_ns: int | None = None
        """When a chunk came that only says why the answer is finished."""

    @property
    def chunks_ns(self) -> tuple[int, ...]:
        """When each chunk with a token came.

        A chunk without text may be a token that shows nothing, or none at all. Where the server counts fewer tokens than there
        are chunks, it is none; and a last chunk without text that says why the answer is finished is the model's end token only
        where the count is one more than the chunks before it.
        """
        counted = self.output_tokens
        whole = [at_ns for at_ns, _ in self._chunks]
        if counted is None or counted >= len(whole):
            last = self._last_ns is not None and counted == len(whole) + 1
            return (*whole, self._last_ns) if last and self._last_ns is not None else tuple(whole)
        return tuple(at_ns for at_ns, text in self._chunks if text)

    def take(self, chunk: Any, now_ns: int) -> None:
        """One event. Raises what broken ones cause (see above)."""
        if chunk.get("error") is not None:
            self.failure = text_of_error(chunk)
            return
        usage = chunk.get("usage")
        if usage is not None:
            counts = _count(usage["prompt_tokens"]), _count(usage["completion_tokens"])
            self.prompt_tokens, self.output_tokens = counts
        for choice in chunk["choices"]:
            finish = choice.get("finish_reason")
            if finish in BROKEN_OFF:
                self.failure = f"the server broke it off (finish_reason {finish!r})"
            if _has_text(choice):
                self._chunks.append((now_ns, True))
            elif finish is not None:
                self._last_ns = now_ns
            # A chat's opening chunk that has a role and no text is no token.
            elif "role" not in (choice.get("delta") or {}):
                self._chunks.append((now_ns, False))

    def verdict(self) -> str:
        """Why a whole answer is none, or nothing."""
        if self.failure:
            return self.failure
        texts = sum(text for _, text in self._chunks)
        if self.output_tokens is not None and self.output_tokens < texts:
            return f"the server counts {self.output_tokens} tokens in {texts} chunks with text"
        if not self.chunks_ns or (self.output_tokens is None and not texts):
            return "the answer held no token"
        return ""


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_COUNT:
        raise ValueError(f"{str(value)[:30]!r} is no count of tokens")
    return value


def parse_json(data: bytes) -> Any:
    """A JSON text. Raises ``ValueError``, also for one that is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


async def body_bytes(raw: AsyncIterator[bytes]) -> bytes:
    """The first ``MOST_BODY_BYTES`` of a body."""
    parts, left = [], MOST_BODY_BYTES
    async for received in raw:
        parts.append(received[:left])
        left -= len(parts[-1])
        if not left:
            break
    return b"".join(parts)


def coded(header: str) -> str:
    """The ``Content-Encoding`` that would have to be undone, or nothing."""
    return "" if header.strip().lower() in ("", "identity") else printable(header, 40)


def message_of(content: bytes) -> str:
    """The message of an error body, short."""
    try:
        return text_of_error(parse_json(content))
    except (ValueError, KeyError, TypeError):
        return printable(content[:200].decode("utf-8", "replace")) or "no message"


def text_of_error(body: Any) -> str:
    """The message of an error object. Raises ``KeyError``, ``TypeError`` where there is none, ``ValueError`` for a deep one."""
    error = body["error"]
    try:
        return printable(str(error["message"] if isinstance(error, dict) else error)) or "no message"
    except RecursionError as deep:
        raise ValueError("JSON that is nested too deeply") from deep
