"""What the batcher knows of a request, of a step in flight and of a microbatch: records."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from afore.core import control
from afore.serving.spelling import Spelling

NOWHERE = -1


class State(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    """In line for a seat: new, or preempted."""
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    READY = "ready"
    """Has its KV and its last token; the next step of its microbatch takes it, unless it lacks a KV block."""
    RUNNING = "running"
    """In a step that its worker has not reported."""
    ENDED = "ended"


@dataclass(slots=True)
class Request:
    """One request inside the engine."""

    number: int
    """Unique in this engine, and its age: the lower, the older, however often it is preempted."""
    client: int
    name: str
    """The client's own name for it."""
    prompt: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    sampling: control.Sampling
    spelling: Spelling | None = None
    """Its text so far; none for a model that has no tokenizer."""
    state: State = State.WAITING
    produced: list[int] = field(default_factory=list)
    ticket: int = NOWHERE
    """The name under which the roles know it. Each admission gives a new one: what is said of an old ticket concerns nobody."""
    attention: int = NOWHERE
    microbatch: int = NOWHERE
    prefill: int = NOWHERE
    kv_ready: bool = False
    prefill_done: bool = False
    blocks: int = 0
    """KV blocks that it holds."""
    leaving: bool = False
    """Preempted in mid-step: it goes when its worker has reported the step."""
    cancelled_step: bool = False
    """A step of it was cancelled and none has ended since: its worker may still be writing into its blocks."""

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.produced)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sequence so far: what a prefill runs over."""
        return (*self.prompt, *self.produced)

    @property
    def seen(self) -> tuple[int, ...]:
        """Distinct tokens of the sequence so far, where the sampling wants to know them."""
        return tuple(set(self.tokens)) if self.sampling.repetition_penalty != 1.0 else ()

    @property
    def positions_at_once(self) -> int:
        """Positions that its first KV blocks must hold: the sequence so far, and the token that prefill will sample, unless it is
        the last one, which is never fed.
        """
        return min(self.length + 1, len(self.prompt) + self.max_new_tokens - 1)

    def take(self, token: int, logprobs: control.TokenLogprobs | None, eos_ids: frozenset[int]) -> control.TokenOut:
        """Records its next token and says what the client is to hear; ``finish`` is set when it is the last."""
        text, finish = self.push(token, eos_ids)
        return control.TokenOut(self.name, len(self.produced) - 1, token, finish, text, logprobs)

    def push(self, token: int, eos_ids: frozenset[int]) -> tuple[str, str]:
        """Records its next token: (what it adds to the text, ``finish`` as in ``take``)."""
        self.produced.append(token)
        finish = ""
        if token in eos_ids and not self.ignore_eos:
            finish = "stop"
        elif len(self.produced) >= self.max_new_tokens:
            finish = "length"
        text = ""
        if self.spelling is not None:
            text, stopped = self.spelling.push(token, last=bool(finish))
            finish = "stop" if stopped else finish
        return text, finish


@dataclass(slots=True)
class Step:
    """A step in flight."""

    step: int
    rows_A: dict[int, list[Request]]
    """Requests of each participating attention worker, in row order."""
    waiting_for: set[int]


@dataclass(slots=True)
class Microbatch:
    """One of the M microbatches."""

    number: int
    next_step: int = 0
    requests: list[Request] = field(default_factory=list)
    """Those whose next token comes from a step of it, in the order in which they joined."""
    flight: Step | None = None
