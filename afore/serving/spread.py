"""When a microbatch's next step begins, so that those of three and more are evenly apart. Pure: times are passed in.

Requests that come together make microbatches that begin their steps together, and nothing drives them apart: experts work through
them in turn. Their ends then fall together as well, and with them what an attention worker does once a step: the head over the
vocabulary, sampling, the report, the first layers. Experts wait for the last of them, each step anew. A microbatch that is held
back once, by a part of a step, stays behind by it: from then on it samples while the others keep the experts busy.

Where attention is the limit, microbatches fall together again whatever is done, and where times differ much, by chance. Nothing
is won by parting them step after step, so each may be held back a few times at first, and seldom later.

Of two microbatches neither hides the other's end better apart than together; they are left as they come.
"""

from __future__ import annotations

from typing import Final

LEAST: Final = 3
"""Microbatches from which on they are spread."""
NEAR: Final = 0.5
"""Part of an even distance below which a step is held back: what is not that near is left as it comes."""
MOST_HOLDS: Final = 4
"""Times that a microbatch can be held back in a row of steps."""
EARNED_PER_STEP: Final = 1 / 32
"""Of one more time, by each step."""
RECENT: Final = 1.5
"""Steps since its last beginning after which a microbatch counts as one that does not run."""
NEWEST: Final = 0.25
"""Weight of the newest step's time in their mean."""


class Spread:
    """Holds steps back so that each begins an even part of a step after the one before it."""

    def __init__(self, microbatches: int) -> None:
        self._begun_ns: list[int | None] = [None] * microbatches
        """When each last began, or will."""
        self._holds = [float(MOST_HOLDS)] * microbatches
        """How often each may still be held back."""
        self._step_ns = 0.0
        """How long a step takes; 0: not known."""

    def hold_ns(self, microbatch: int, now_ns: int) -> int:
        """A step of ``microbatch`` could begin: for how long it is held back; 0: it begins at once."""
        others = [
            begun_ns
            for number, begun_ns in enumerate(self._begun_ns)
            if number != microbatch and begun_ns is not None and begun_ns >= now_ns - RECENT * self._step_ns
        ]
        hold_ns = 0
        self._holds[microbatch] = min(MOST_HOLDS, self._holds[microbatch] + EARNED_PER_STEP)
        if len(others) + 1 >= LEAST and self._holds[microbatch] >= 1:
            apart_ns = self._step_ns / (len(others) + 1)
            early_ns = max(others) + apart_ns - now_ns
            if early_ns > (1 - NEAR) * apart_ns:
                hold_ns = round(early_ns)
                self._holds[microbatch] -= 1
        self._begun_ns[microbatch] = now_ns + hold_ns
        return hold_ns

    def ended(self, microbatch: int, now_ns: int) -> None:
        """The step of ``microbatch`` that began last has ended."""
        begun_ns = self._begun_ns[microbatch]
        if begun_ns is None:
            return
        took_ns = now_ns - begun_ns
        self._step_ns += (took_ns - self._step_ns) * (NEWEST if self._step_ns else 1.0)
