"""Whose chunk a prefill worker runs next, as a pure state machine: no I/O, no clock.

Turn by turn: one chunk of the prompt with the fewest chunks left, one chunk of the oldest. So a short prompt waits for the chunk
that runs, and then at most for as many chunks of the oldest prompt as of short ones that came before it; a long prompt gets every
second chunk at the latest when it is the oldest, so nobody starves. (Taking turns among all would give a long prompt ever less as
others come, and finish equal prompts all at the end; the shortest alone would let a stream of short ones starve a long one.)

A prompt that has begun holds the keys and values of its tokens so far, which is memory. At most ``most_open`` have begun and not
ended. The shortest may not open the last place, which is the oldest's, so the oldest always runs. A prompt that needs one chunk
more holds nothing behind it and is never kept waiting for a place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from afore.core import control

MOST_OPEN = 4


@dataclass(slots=True, eq=False)
class Prompt:
    """A sequence on its way through the model."""

    work: control.PrefillWork
    done: int = 0
    """Tokens that have been run."""
    state: Any = None
    """What the model keeps of them."""

    @property
    def left(self) -> int:
        """Tokens to run."""
        return len(self.work.prompt) - self.done


class PromptLine:
    """Prompts that wait or are under way."""

    def __init__(self, chunk_tokens: int, *, most_open: int = MOST_OPEN) -> None:
        """``chunk_tokens`` 0 makes every prompt one chunk."""
        assert most_open >= 1
        self._chunk_tokens = chunk_tokens
        self._most_open = most_open
        self._prompts: dict[int, Prompt] = {}
        """By request, oldest first."""
        self._turn_of_oldest = False

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_open(self) -> int:
        """Prompts that have begun and not ended."""
        return sum(prompt.done > 0 for prompt in self._prompts.values())

    def add(self, work: control.PrefillWork) -> None:
        """A new prompt, the youngest. A request comes once."""
        assert work.request not in self._prompts, f"request {work.request} came twice"
        self._prompts[work.request] = Prompt(work)

    def drop(self, request: int) -> Prompt | None:
        """Takes a prompt out of the line; none when it is not there."""
        return self._prompts.pop(request, None)

    def next(self) -> tuple[Prompt, tuple[int, ...]] | None:
        """The prompt whose turn it is, and its next tokens, which count as run; after its last ones it is in the line no more."""
        if not self._prompts:
            return None
        self._turn_of_oldest = not self._turn_of_oldest
        oldest = next(iter(self._prompts.values()))
        prompt = oldest if self._turn_of_oldest else min(self._may_run(oldest), key=self._chunks_left)
        tokens = prompt.work.prompt[prompt.done : prompt.done + (self._chunk_tokens or prompt.left)]
        prompt.done += len(tokens)
        if not prompt.left:
            del self._prompts[prompt.work.request]
        return prompt, tokens

    def _may_run(self, oldest: Prompt) -> list[Prompt]:
        room = self.num_open < self._most_open - 1
        return [p for p in self._prompts.values() if p is oldest or p.done or room or self._chunks_left(p) == 1]

    def _chunks_left(self, prompt: Prompt) -> int:
        return -(-prompt.left // (self._chunk_tokens or prompt.left))
