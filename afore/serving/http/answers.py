"""How answers are written: OpenAI's objects for completions and chat completions, whole and in chunks.

Every token is a chunk of its own, also where it adds no text yet (within a character or a possible stop string), so that clients
that count chunks count tokens. The role goes with the first one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from afore.core.control import TokenLogprobs, TokenOut
from afore.serving.engine import Text

DONE = b"data: [DONE]\n\n"
_REPLACEMENT = "\ufffd"


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Token counts. Nothing of a prompt is taken from a cache in this version."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@dataclass(slots=True)
class Choice:
    """One output while it grows."""

    index: int
    prefix: str = ""
    """Text before the output's own: the prompt, where it is echoed."""
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenOut] = field(default_factory=list)
    spelled: int = 0
    """Characters of the tokens' own spellings so far: the next token's text offset."""
    finish: str | None = None

    def take(self, token: TokenOut) -> str:
        """Adds a token; returns the text that goes out with it."""
        first = not self.tokens
        piece = (self.prefix if first else "") + token.text
        self.tokens.append(token)
        self.pieces.append(piece)
        self.finish = token.finish or None
        return piece


class Form(Protocol):
    """One endpoint's way to write choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        ...

    def chunk(self, choice: Choice, piece: str, token: TokenOut) -> dict[str, Any]:
        """What one token adds to a choice."""
        ...


class CompletionForm:
    """/v1/completions"""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, text: Text | None, *, logprobs: bool) -> None:
        self._text = text
        self._logprobs = logprobs

    def whole(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, "".join(choice.pieces), choice.tokens)

    def chunk(self, choice: Choice, piece: str, token: TokenOut) -> dict[str, Any]:
        return self._choice(choice, piece, (token,))

    def _choice(self, choice: Choice, text: str, tokens: Sequence[TokenOut]) -> dict[str, Any]:
        logprobs = self._written(choice, tokens) if self._logprobs else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}

    def _written(self, choice: Choice, tokens: Sequence[TokenOut]) -> dict[str, Any]:
        spellings, offsets = [], []
        for token in tokens:
            spellings.append(spell(self._text, token.token))
            offsets.append(choice.spelled)
            choice.spelled += len(spellings[-1])
        reports = [token.logprobs for token in tokens]
        return {
            "tokens": spellings,
            "token_logprobs": [None if report is None else report.logprob for report in reports],
            "top_logprobs": [None if report is None else self._best(report) for report in reports],
            "text_offset": offsets,
        }

    def _best(self, report: TokenLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for token, logprob in report.top:
            # Different tokens can be spelled alike (parts of characters): the more probable one stays.
            best.setdefault(spell(self._text, token), logprob)
        return best


class ChatForm:
    """/v1/chat/completions"""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, text: Text | None, *, logprobs: bool) -> None:
        self._text = text
        self._logprobs = logprobs

    def whole(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.pieces), "refusal": None}
        return {"index": choice.index, "message": message, **self._rest(choice, choice.tokens)}

    def chunk(self, choice: Choice, piece: str, token: TokenOut) -> dict[str, Any]:
        delta = {"role": "assistant", "content": piece} if token.index == 0 else {"content": piece}
        return {"index": choice.index, "delta": delta, **self._rest(choice, (token,))}

    def _rest(self, choice: Choice, tokens: Sequence[TokenOut]) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._entry(token) for token in tokens], "refusal": None}
        return {"logprobs": logprobs, "finish_reason": choice.finish}

    def _entry(self, token: TokenOut) -> dict[str, Any]:
        report = token.logprobs
        if report is None:
            return {**self._spelled(token.token, 0.0), "top_logprobs": []}
        best = [self._spelled(other, logprob) for other, logprob in report.top]
        return {**self._spelled(token.token, report.logprob), "top_logprobs": best}

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        spelling = spell(self._text, token)
        octets = None if _REPLACEMENT in spelling else list(spelling.encode())
        return {"token": spelling, "logprob": logprob, "bytes": octets}


def spell(text: Text | None, token: int) -> str:
    """A token by itself; its number where there is no tokenizer."""
    return str(token) if text is None else text.decode([token], skip_special_tokens=False)


class Writer:
    """Puts choices into answers and chunks of one response."""

    def __init__(self, form: Form, *, name: str, model: str, created_s: int, include_usage: bool) -> None:
        """``include_usage``: every chunk says that its usage is null, and one more at the end says it."""
        self._form = form
        self._nulls: dict[str, Any] = {"usage": None} if include_usage else {}
        self._head = {"id": form.id_prefix + name, "created": created_s, "model": model}

    def whole(self, choices: Sequence[Choice], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        written = [self._form.whole(choice) for choice in choices]
        return {**self._head, "object": self._form.whole_object, "choices": written, "usage": counts}

    def chunk(self, choice: Choice, token: TokenOut) -> bytes:
        """The event of one token."""
        piece = choice.take(token)
        return self._event([self._form.chunk(choice, piece, token)], **self._nulls)

    def counts(self, counts: dict[str, Any]) -> bytes:
        """The event with the usage: no choices."""
        return self._event([], usage=counts)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "object": self._form.chunk_object, "choices": choices, **more})
