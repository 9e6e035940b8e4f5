"""Prompts for a benchmark: the bundled ones, a JSONL file, or a plain text; and prompts of a wanted length made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from afore.core.errors import ConfigError, why_not
from afore.models.bundle import bundled_prompts
from afore.tools.bench.files import read_lines

KEYS: Final = ("prompt", "question", "text", "sat")
"""Where a JSON object may have its text; the first that is there is taken."""
MOST_PROMPTS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """One prompt."""

    text: str
    max_tokens: int | None = None
    """How many tokens it asks for, where it says."""


def read_prompts(path: str | None) -> tuple[PromptText, ...]:
    """The prompts of a file (none: the bundled ones). ``.jsonl``: one object a line, text under one of ``KEYS``, optionally
    ``max_new_tokens``; any other file: one prompt a line. Raises ``ConfigError`` naming file and line."""
    if path is None:
        return tuple(PromptText(text=found.prompt, max_tokens=found.max_new_tokens) for found in bundled_prompts())
    try:
        lines = enumerate(read_lines(path, "prompts"), start=1)
        whole = list(islice(((number, line) for number, line in lines if line.strip()), MOST_PROMPTS + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompts", f"{path} cannot be read: {why_not(error)}", "give a JSONL or text file") from error
    if len(whole) > MOST_PROMPTS:
        raise ConfigError("prompts", f"{path} has more than {MOST_PROMPTS} prompts", "give a part of it")
    if not whole:
        raise ConfigError("prompts", f"{path} holds no prompt", "write one a line")
    if not path.endswith(".jsonl"):
        return tuple(PromptText(text=line.removesuffix("\n").rstrip("\r")) for _, line in whole)
    return tuple(_from_json(line, f"{path}, line {number}") for number, line in whole)


def _from_json(line: str, where: str) -> PromptText:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("prompts", f"{where} is not JSON: {error}", "write one object a line") from error
    text = next((fields[key] for key in KEYS if key in fields), None) if isinstance(fields, dict) else None
    if not isinstance(text, str) or not text:
        raise ConfigError("prompts", f"{where} has no text", f"give an object with one of {', '.join(KEYS)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("prompts", f"{where} holds half a surrogate pair", "write whole characters") from error
    most = fields.get("max_new_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ConfigError("prompts", f"{where}: max_new_tokens is {most!r}", "give a whole number of 1 or more")
    return PromptText(text=text, max_tokens=most)


def tokens_of_length(pool: Sequence[Sequence[int]], length: int, start: int) -> tuple[int, ...]:
    """Exactly ``length`` token ids: prompt ``start`` of ``pool`` (counted round), the next ones behind it, cut off at the end.

    Raises ``ValueError`` where the pool has no token.
    """
    if not any(pool):
        raise ValueError("the prompts have no tokens")
    found: list[int] = []
    at = start
    while len(found) < length:
        found += pool[at % len(pool)][: length - len(found)]
        at += 1
    return tuple(found)
