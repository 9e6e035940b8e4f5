"""How many of the M microbatches run: by trial, from what steps really served. Pure: times are passed in.

More microbatches hide more: attention computes while experts do. But each costs its own launches, collectives and half-filled
tiles, and once neither side waits for the other, one microbatch less serves the same requests in fewer, larger targets. Where that
is depends on the times of attention and experts, of collectives, sampling and wires together, so the sum of them is measured:
tokens of whole rounds by the time that they took.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

SETTLE_STEPS: Final = 2
"""Steps of microbatch 0 after a change, until everybody has changed over."""
MEASURE_STEPS: Final = 3
"""Steps of microbatch 0 that are measured."""
MARGIN: Final = 0.01
"""Part by which another number must be faster to be kept."""
HOLD_STEPS: Final = 128
"""Steps of microbatch 0 until the next trial; twice as many after each that changed nothing, up to ``MOST_HOLD_STEPS``."""
MOST_HOLD_STEPS: Final = 8192
SAME_LOAD: Final = 0.1
"""Two measurements compare if their rounds differ by at most this part in tokens."""
OTHER_LOAD: Final = 0.25
"""A round that differs so much from the one measured last is another load: there is no waiting for the next trial."""


class _Phase(enum.Enum):
    SETTLING = "settling"
    MEASURING = "measuring"
    HOLDING = "holding"


@dataclass(slots=True)
class _Rate:
    """What a measurement showed."""

    tokens_per_ns: float
    round_tokens: float
    """Tokens of one step of each microbatch."""

    def compares(self, other: _Rate) -> bool:
        return abs(self.round_tokens - other.round_tokens) <= SAME_LOAD * other.round_tokens


class Pace:
    """Tries ``most``, then one fewer as long as that is faster, not below ``least``; later again, both ways."""

    def __init__(self, *, most: int, least: int) -> None:
        assert 1 <= least <= most
        self._most, self._least = most, least
        self._kept = most
        """The best number so far."""
        self._trying: int | None = None
        """Another one that runs for now."""
        self._down = True
        """Which way the next trial goes."""
        self._rate: _Rate | None = None
        """Of the kept number."""
        self._hold = HOLD_STEPS
        self._phase = _Phase.SETTLING
        self._steps = 0
        """Steps of microbatch 0 in this phase."""
        self._tokens = 0
        """Since ``_since_ns``."""
        self._since_ns = 0

    @property
    def microbatches(self) -> int:
        """How many shall run now."""
        return self._kept if self._trying is None else self._trying

    def step_ended(self, microbatch: int, tokens: int, now_ns: int) -> int:
        """A step of ``microbatch`` has ended with so many tokens; how many microbatches shall run from here on."""
        self._tokens += tokens
        if microbatch != 0:  # microbatch 0 always runs: its steps are the rounds
            return self.microbatches
        self._steps += 1
        if self._phase is _Phase.SETTLING:
            if self._steps >= SETTLE_STEPS:
                self._enter(_Phase.MEASURING, now_ns)
        elif self._phase is _Phase.MEASURING:
            if self._steps >= MEASURE_STEPS:
                self._measured(now_ns)
        else:
            assert self._rate is not None
            before = self._rate.round_tokens
            if self._steps >= self._hold or abs(self._tokens - before) > OTHER_LOAD * before:
                self._measure_again(now_ns, other_load=self._steps < self._hold)
            else:
                self._tokens = 0
        return self.microbatches

    def _enter(self, phase: _Phase, now_ns: int) -> None:
        self._phase, self._steps, self._tokens, self._since_ns = phase, 0, 0, now_ns

    def _measure_again(self, now_ns: int, *, other_load: bool) -> None:
        if other_load:
            self._hold = HOLD_STEPS
        self._trying = None
        self._enter(_Phase.SETTLING, now_ns)

    def _measured(self, now_ns: int) -> None:
        elapsed_ns = max(1, now_ns - self._since_ns)
        rate = _Rate(self._tokens / elapsed_ns, self._tokens / MEASURE_STEPS)
        if self._trying is None:
            self._rate = rate
            self._try_next(now_ns)
            return
        before = self._rate
        assert before is not None
        if not rate.compares(before):
            self._measure_again(now_ns, other_load=True)
        elif rate.tokens_per_ns > (1 + MARGIN) * before.tokens_per_ns:
            self._kept, self._rate, self._hold = self._trying, rate, HOLD_STEPS
            self._try_next(now_ns)
        else:
            self._wait(now_ns)

    def _try_next(self, now_ns: int) -> None:
        candidate = self._kept + (-1 if self._down else 1)
        if self._least <= candidate <= self._most:
            self._trying = candidate
            self._enter(_Phase.SETTLING, now_ns)
        else:
            self._wait(now_ns)

    def _wait(self, now_ns: int) -> None:
        """Nothing better was found this way: the next trial, later, goes the other way."""
        if self._trying is not None and self._trying != self._kept:
            self._hold = min(2 * self._hold, MOST_HOLD_STEPS)
        self._trying = None
        self._down = not self._down
        self._enter(_Phase.HOLDING, now_ns)
