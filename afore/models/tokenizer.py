"""Text to tokens and back, from a checkpoint's own tokenizer files, and text that grows token by token.

Streaming never shows half a character: what a token adds is held back while it ends in an unfinished UTF-8 sequence.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from afore.core.errors import CheckpointError

_REPLACEMENT = "\ufffd"
_LONGEST_UNFINISHED = 3
"""Bytes of an unfinished UTF-8 character; more replacement characters than that are the model's own nonsense."""


class Tokenizer:
    """A checkpoint's tokenizer. Raises ``CheckpointError`` when its files are missing or broken."""

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        if not any((directory / name).exists() for name in names):
            raise CheckpointError(
                str(directory), "holds no tokenizer (tokenizer.json)", "copy the tokenizer files beside the weights"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers and tokenizers raise many kinds here, for what the files hold
            lines = str(error).strip().splitlines()
            raise CheckpointError(
                str(directory),
                f"tokenizer cannot be loaded ({lines[0] if lines else type(error).__name__})",
                "copy the tokenizer files again from where the model was published",
            ) from error

        # The engine says what is too long, and refuses it; the tokenizer would only grumble beside it.
        self._tokenizer.model_max_length = sys.maxsize

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end token, where it has one."""
        eos = self._tokenizer.eos_token_id
        return None if eos is None else int(eos)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token (a byte that is no character of its own counts as one)."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the special tokens that the tokenizer itself adds."""
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation by the checkpoint's chat template, ending where the assistant is to answer.

        Raises ``ValueError`` when there is no template or it refuses the messages.
        """
        return self.encode_rendered(self.render_chat(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of what ``render_chat`` wrote: its special tokens are in the text, none are added."""
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as the text that the model sees. Raises ``ValueError`` as ``encode_chat`` does."""
        if not self.has_chat_template:
            raise ValueError("this model has no chat template; use plain completions")
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise their own kinds
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return str(rendered)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are no character become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Text that grows token by token."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Turns one sequence's tokens into pieces of text; all pieces together are the text of all tokens.

    A short window of tokens is decoded again with each new one, and what its text gained is the piece. The window begins one
    piece back, since some tokenizers give a token another text at the start of a sequence than within it. (The tokenizers
    library's own DecodeStream cannot give out what it holds back when a sequence ends.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._context = 0
        """Tokens at the window's start that are there for context: their text ended with a whole character."""
        self._given = 0
        """Characters of the window's text that were given out."""

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is complete now, often empty within a character."""
        self._window.append(token_id)
        text = self._text()
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _LONGEST_UNFINISHED)
        end = max(self._given, len(text) - held)
        piece = text[self._given : end]
        self._given = end
        if piece and not held:
            del self._window[: self._context]
            self._context = len(self._window)
            self._given = len(self._text())
        return piece

    def flush(self) -> str:
        """The text that was held back, at the end of the sequence; an unfinished character becomes U+FFFD."""
        text = self._text()
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
