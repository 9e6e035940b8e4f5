"""The arithmetic of an interleaved comparison: rounds, medians, ratios round by round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

FORMULAS: Final[Mapping[str, str]] = {
    "tokens/s": "output tokens of all requests / time from submitting all of them at once to the last token, prefill included",
    "decode tokens/s": "tokens that came after every request had its first one / the time from then to the last token",
    "ratio": "AFORE's tokens/s / transformers' of the same round; the median of these, and the smallest and the largest",
    "CPU s / 1,000 tokens": "user and system time of all processes of that side during its runs, per 1,000 output tokens",
    "equal tokens": "requests whose tokens are the same on both sides, from the first to the last",
}
"""Each figure's definition and unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of one side: every request answered."""

    wall_s: float
    tokens: tuple[tuple[int, ...], ...]
    """Of each request."""
    decode_tokens: int
    decode_s: float
    cpu_s: float
    """Of all its processes."""
    idle_cpu_s: float = 0.0
    """CPU that the sides whose turn it was not used meanwhile."""

    @property
    def count(self) -> int:
        """Output tokens."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """Over the whole run."""
        return self.count / self.wall_s

    @property
    def decode_tokens_per_second(self) -> float | None:
        """After the last first token; none where nothing came after it."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None


def decode_part(arrivals_ns: Sequence[Sequence[int]]) -> tuple[int, float]:
    """(tokens that came after every request had its first, seconds from then to the last token)."""
    begin_ns = max(times[0] for times in arrivals_ns)
    end_ns = max(times[-1] for times in arrivals_ns)
    return sum(at_ns > begin_ns for times in arrivals_ns for at_ns in times), (end_ns - begin_ns) / 1e9


def equal_requests(ours: Outcome, theirs: Outcome) -> int:
    """Requests with the same tokens."""
    return sum(mine == other for mine, other in zip(ours.tokens, theirs.tokens, strict=True))


def turns(names: Sequence[str], round_: int) -> tuple[str, ...]:
    """The order of a round: everybody is first in turn, so that what drifts hits all alike."""
    start = round_ % len(names)
    return (*names[start:], *names[:start])


def compare(rounds: Sequence[Mapping[str, Outcome]], baseline: str) -> dict[str, dict[str, Any]]:
    """For each contestant the medians over whole rounds, and its ratio to ``baseline`` round by round.

    Raises ``ValueError`` for no round.
    """
    if not rounds:
        raise ValueError("no round was finished, so there is nothing to compare")
    found: dict[str, dict[str, Any]] = {}
    for name in rounds[0]:
        outcomes = [round_[name] for round_ in rounds]
        decode = [rate for outcome in outcomes if (rate := outcome.decode_tokens_per_second) is not None]
        row: dict[str, Any] = {
            "rounds": [outcome.tokens_per_second for outcome in outcomes],
            "tokens_per_second": median(outcome.tokens_per_second for outcome in outcomes),
            "cpu_s_per_1000_tokens": median(outcome.cpu_s / outcome.count * 1000 for outcome in outcomes),
            "tokens": outcomes[-1].count,
        }
        if decode:
            row["decode_tokens_per_second"] = median(decode)
        if name != baseline:
            ratios = [round_[name].tokens_per_second / round_[baseline].tokens_per_second for round_ in rounds]
            row["ratio"] = {"median": median(ratios), "min": min(ratios), "max": max(ratios), "rounds": ratios}
            row["equal_requests"] = min(equal_requests(round_[name], round_[baseline]) for round_ in rounds)
            both = [
                (mine, theirs)
                for round_ in rounds
                if (mine := round_[name].decode_tokens_per_second) is not None
                and (theirs := round_[baseline].decode_tokens_per_second) is not None
            ]
            if both:
                row["decode_ratio"] = median(mine / theirs for mine, theirs in both)
        found[name] = row
    return found
