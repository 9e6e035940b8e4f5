"""When requests arrive, and how long they are: drawn from a rate, or read from a trace. Pure but for reading the file."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from afore.core.errors import ConfigError, why_not
from afore.tools.bench.files import read_lines

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Of Azure's LLM inference traces."""
LONGEST_S: Final = 366 * 86_400.0
"""From the first request to the last."""
MOST_TOKENS: Final = 1 << 30
"""Of one request in a trace, before it is cut to what the server takes."""
MOST_PROMPT_TOKENS: Final = 1 << 20
"""Of one prompt, and"""
MOST_IN_ALL: Final = 1 << 26
"""of all together: they are made before the first is sent, at 8 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    """Seconds after the first."""
    context_tokens: int
    generated_tokens: int


def draw_arrivals_s(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> tuple[float, ...]:
    """Arrival times of ``count`` requests, in seconds, the first at 0; ``rate`` in requests/s, ``inf`` for all at once.

    Gaps are gamma distributed with shape ``burstiness`` and mean 1/rate: 1 is a Poisson process, less is burstier, more is evener.
    """
    if math.isinf(rate):
        return (0.0,) * count
    draw = random.Random(seed)
    times, at_s = [], 0.0
    for _ in range(count):
        times.append(at_s)
        at_s += draw.gammavariate(burstiness, 1 / (rate * burstiness))
    return tuple(times)


def read_arrivals(path: str, most: int | None = None) -> tuple[Arrival, ...]:
    """The first ``most`` requests of a CSV with Azure's columns. Raises ``ConfigError`` naming file and line."""
    try:
        return parse_arrivals(read_lines(path, "arrivals"), path, most)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            "arrivals", f"{path} cannot be read: {why_not(error)}", f"give a CSV with {', '.join(COLUMNS)}"
        ) from error


def parse_arrivals(lines: Iterable[str], name: str, most: int | None = None) -> tuple[Arrival, ...]:
    """The same of lines."""
    reader = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError("arrivals", f"{name} has no column {missing[0]}", f"give a CSV with {', '.join(COLUMNS)}")
    rows: list[tuple[datetime, int, int]] = []
    for row in reader:
        if most is not None and len(rows) == most:
            break
        try:
            tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            at = datetime.fromisoformat(row["TIMESTAMP"])
            if min(tokens) < 0:
                raise ValueError("a negative count")
            if max(tokens) > MOST_TOKENS:
                raise ValueError(f"more than {MOST_TOKENS} tokens")
            if rows and (at.tzinfo is None) != (rows[0][0].tzinfo is None):
                raise ValueError("some times have a time zone and some have none")
            rows.append((at, *tokens))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "arrivals", f"{name}, line {reader.line_num}: {error}", "mend or remove the line"
            ) from error
    if not rows:
        raise ConfigError("arrivals", f"{name} has no request", f"give a CSV with {', '.join(COLUMNS)}")
    try:
        rows.sort(key=lambda row: row[0])
        first = rows[0][0]
        return _relative(rows, first)
    except OverflowError as error:
        raise ConfigError("arrivals", f"{name}: a time is out of range: {error}", "mend or remove its line") from error


def _relative(rows: Sequence[tuple[datetime, int, int]], first: datetime) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(at_s=(at - first).total_seconds(), context_tokens=context, generated_tokens=generated)
        for at, context, generated in rows
    )


def check_schedule(option: str, last_s: float) -> None:
    """Raises ``ConfigError`` naming ``option`` where the last request, due after ``last_s``, is beyond ``LONGEST_S``."""
    if not last_s <= LONGEST_S:
        raise ConfigError(
            option, f"the last request would be due after {last_s:.3g} s, which is more than a year", "send them faster"
        )


def check_sizes(arrivals: Sequence[Arrival], *, max_model_len: int | None, max_tokens: int | None) -> None:
    """Raises ``ConfigError`` where prompts, cut to what the server takes, need more memory than a benchmark should."""
    lengths = [clip_lengths(arrival, max_model_len=max_model_len, max_tokens=max_tokens)[0] for arrival in arrivals]
    if max(lengths) > MOST_PROMPT_TOKENS:
        raise ConfigError(
            "arrivals",
            f"a prompt has {max(lengths)} tokens, more than {MOST_PROMPT_TOKENS}, and the server does not say what it takes",
            "mend or remove its line",
        )
    if sum(lengths) > MOST_IN_ALL:
        raise ConfigError(
            "arrivals",
            f"prompts have {sum(lengths)} tokens in all, more than {MOST_IN_ALL}",
            "give a lower --num-prompts",
        )


def clip_lengths(arrival: Arrival, *, max_model_len: int | None, max_tokens: int | None) -> tuple[int, int]:
    """(prompt tokens, output tokens) that the server can take: the output is cut to ``max_tokens``, then the prompt to the rest.

    Both are at least 1. A model whose length is not known takes everything.
    """
    output = max(1, arrival.generated_tokens)
    if max_tokens is not None:
        output = min(output, max_tokens)
    prompt = max(1, arrival.context_tokens)
    if max_model_len is not None:
        output = min(output, max(1, max_model_len - 1))
        prompt = min(prompt, max(1, max_model_len - output))
    return prompt, output
