"""What a serving benchmark reports, as pure functions over the times of its requests. Definitions are in ``FORMULAS``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from afore.core.errors import ConfigError
from afore.core.metrics import percentiles

FORMULAS: Final[Mapping[str, str]] = {
    "TTFT": "time to first token, ms: request sent → first chunk with a token",
    "E2E": "end-to-end latency, ms: request sent → last chunk with a token",
    "TPOT": "time per output token after the first, ms: (E2E - TTFT) / (n - 1), of requests with n ≥ 2 output tokens",
    "ITL": "inter-token latency, ms: gap between successive chunks with tokens, over all requests",
    "duration": "s: first request sent → last answer ended (or the moment of interruption)",
    "tokens/s": "tokens of completed requests / duration; input = prompt tokens, output = generated tokens",
    "goodput": "completed requests that meet every objective of --slo / duration, requests/s",
    "peak concurrency": "most requests that were sent and had not ended, at any moment",
    "late start": "ms: request sent - when its arrival was due; what --concurrency or a busy client held back",
}
"""Each figure's definition and unit, as printed below the table."""
UNFINISHED: Final = "unfinished when the benchmark ended"
PERCENTS: Final = (50, 90, 99)
LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")
_MOST_MS: Final = 366 * 86_400e3
_UNITS_MS: Final = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request as the client saw it. All times are of one monotonic clock, in ns."""

    index: int
    due_ns: int
    """When its arrival was due."""
    sent_ns: int
    chunks_ns: tuple[int, ...]
    """When each chunk with a token (or several) came."""
    ended_ns: int
    """When the answer, or the failure, was complete."""
    prompt_tokens: int
    output_tokens: int
    failure: str = ""
    """Why it failed; empty for a request that was completed."""

    @property
    def completed(self) -> bool:
        """Whether every token came."""
        return not self.failure

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token; none before one came."""
        return (self.chunks_ns[0] - self.sent_ns) / 1e6 if self.chunks_ns else None

    @property
    def e2e_ms(self) -> float | None:
        """Until the last token; none before one came."""
        return (self.chunks_ns[-1] - self.sent_ns) / 1e6 if self.chunks_ns else None

    @property
    def tpot_ms(self) -> float | None:
        """(E2E - TTFT) / (n - 1); none for fewer than two tokens."""
        if self.output_tokens < 2 or not self.chunks_ns:
            return None
        return (self.chunks_ns[-1] - self.chunks_ns[0]) / 1e6 / (self.output_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        """Gaps between successive chunks."""
        return [(late - early) / 1e6 for early, late in pairwise(self.chunks_ns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Latency objectives of one request, in ms; none asks for nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, record: Record) -> bool:
        """Whether a completed request met all of them. One token has no TPOT and meets any."""
        pairs = ((self.ttft_ms, record.ttft_ms), (self.tpot_ms, record.tpot_ms), (self.e2e_ms, record.e2e_ms))
        return record.completed and all(most is None or value is None or value <= most for most, value in pairs)


def parse_objectives(text: str) -> Objectives:
    """``ttft=500ms,tpot=50ms,e2e=5s`` as objectives. Raises ``ConfigError`` for unknown names, missing units, doubles, years."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot|e2e)\s*=\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", part)
        if match is None:
            raise ConfigError("slo", f"{part.strip()!r} is no objective", "write ttft=500ms,tpot=50ms,e2e=5s")
        name = match[1] + "_ms"
        if name in found:
            raise ConfigError("slo", f"{match[1]} is given twice", "give each once")
        found[name] = float(match[2]) * _UNITS_MS[match[3]]
        if not found[name] <= _MOST_MS:
            raise ConfigError("slo", f"{match[1]} asks for more than a year", "give a shorter time")
    return Objectives(**found)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99; none of no values."""
    if not values:
        return None
    found = percentiles(values, PERCENTS)
    return {
        "mean": float(np.mean(values)),
        **{name: float(value) for name, value in found.items() if value is not None},
    }


def peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests in flight at a moment; one that ends just when another is sent is not beside it."""
    # Ends sort before starts of the same moment.
    edges = sorted(edge for record in records for edge in ((record.sent_ns, 1), (record.ended_ns, -1)))
    peak = running = 0
    for _, step in edges:
        running += step
        peak = max(peak, running)
    return peak


def summarise(records: Sequence[Record], objectives: Objectives | None = None) -> dict[str, Any]:
    """All figures of a run; what was not measured is not there.

    Raises ``ValueError`` for no records.
    """
    if not records:
        raise ValueError("no request was sent, so there is nothing to sum up")
    completed = [record for record in records if record.completed]
    failures = Counter(record.failure for record in records if not record.completed)
    unfinished = failures.pop(UNFINISHED, 0)
    duration_s = (max(record.ended_ns for record in records) - min(record.sent_ns for record in records)) / 1e9
    input_tokens = sum(record.prompt_tokens for record in completed)
    output_tokens = sum(record.output_tokens for record in completed)

    def rate(amount: float) -> float | None:
        return amount / duration_s if duration_s > 0 else None

    result: dict[str, Any] = {
        "requests": len(records),
        "completed": len(completed),
        "failed": sum(failures.values()),
        "unfinished": unfinished,
        "failures": dict(failures.most_common()),
        "duration_s": duration_s,
        "requests_per_second": rate(len(completed)),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "input_tokens_per_second": rate(input_tokens),
        "output_tokens_per_second": rate(output_tokens),
        "total_tokens_per_second": rate(input_tokens + output_tokens),
        "peak_concurrency": peak_concurrency(records),
        "late_start_ms": spread([max(0, record.sent_ns - record.due_ns) / 1e6 for record in records]),
    }
    of_one: Mapping[str, Callable[[Record], Sequence[float | None]]] = {
        "ttft": lambda record: [record.ttft_ms],
        "tpot": lambda record: [record.tpot_ms],
        "itl": lambda record: record.itls_ms,
        "e2e": lambda record: [record.e2e_ms],
    }
    for name in LATENCIES:
        values = [value for record in completed for value in of_one[name](record) if value is not None]
        found = spread(values)
        if found is not None:
            result[f"{name}_ms"] = found
    if objectives is not None:
        met = sum(map(objectives.met, records))
        result["goodput"] = {
            "ttft_ms": objectives.ttft_ms,
            "tpot_ms": objectives.tpot_ms,
            "e2e_ms": objectives.e2e_ms,
            "met": met,
            "requests_per_second": rate(met),
        }
    return result
