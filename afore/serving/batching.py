"""Continuous batching as a pure state machine: the one authority on which request is in which step.

Events in, (destination, message) pairs out; no I/O, no clock. M microbatches run side by side; each is a set of
requests spread over the attention workers; requests join and leave at their microbatch's step boundary. A worker without rows
takes no part in a step.

A request's life: waiting → reserving (KV blocks on its attention worker) → prefilling → ready → running → ended. It joins only
when its first token *and* its KV have arrived, and never if the first token ends it. Should it end while prefill's writes may be
under way, its attention worker keeps the blocks in quarantine until they have landed; while a step may still write, until that
step's end.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from afore.core import control
from afore.core.topology import ATTENTION, PREFILL, SCHEDULER, Topology
from afore.serving.spelling import Spelling

CLIENT = "client"
Destination = tuple[str, int]


class State(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Request:
    """One request inside the engine."""

    number: int
    """Unique in this engine."""
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
    attention: int = -1
    microbatch: int = -1
    prefill: int = -1
    produced: list[int] = field(default_factory=list)
    kv_ready: bool = False
    prefill_done: bool = False
    blocks: int = 0
    """KV blocks that it holds."""
    asked_after: int = 0
    """Releases that its attention worker had been sent when it was asked for blocks."""

    @property
    def seen(self) -> tuple[int, ...]:
        """Distinct tokens of the sequence so far, where the sampling wants to know them."""
        return tuple({*self.prompt, *self.produced}) if self.sampling.repetition_penalty != 1.0 else ()

    @property
    def tokens_reserved(self) -> int:
        """Positions that its KV blocks must hold: the last sampled token is never fed."""
        return len(self.prompt) + max(self.max_new_tokens - 1, 0)


@dataclass(slots=True)
class Step:
    """A step in flight."""

    step: int
    rows_A: dict[int, list[Request]]
    """Requests of each participating attention worker, in row order."""
    waiting_for: set[int]
    ending: list[Request] = field(default_factory=list)
    """Cancelled in mid-step: released when their worker has finished the step."""


@dataclass(slots=True)
class Microbatch:
    """One of the M microbatches."""

    number: int
    next_step: int = 0
    requests: list[Request] = field(default_factory=list)
    flight: Step | None = None


class Batcher:
    """The engine's state machine. ``drain`` returns what to send since the last call, in order."""

    def __init__(self, topology: Topology, *, max_tokens_per_worker: int, eos_ids: frozenset[int]) -> None:
        self._topology = topology
        self._eos_ids = eos_ids
        self._capacity = max_tokens_per_worker
        self._microbatches = [Microbatch(number) for number in range(topology.microbatches)]
        self._waiting: deque[Request] = deque()
        self._requests: dict[int, Request] = {}
        self._seats_AM = [[0] * topology.microbatches for _ in range(topology.attention)]
        """Requests that hold a seat of (attention worker, microbatch), from admission to their end."""
        self._no_room: set[int] = set()
        """Attention workers that refused a reservation; asked again once one of their requests ends, or they say ``Room``."""
        self._releases_A = [0] * topology.attention
        self._next_number = 0
        self._next_prefill = 0
        self._out: list[tuple[Destination, control.Message]] = []

    @property
    def live(self) -> list[Request]:
        """Requests that have not ended."""
        return list(self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Requests without a seat yet."""
        return len(self._waiting)

    @property
    def blocks_held(self) -> int:
        """KV blocks that requests hold, over all attention workers."""
        return sum(request.blocks for request in self._requests.values())

    def find(self, number: int) -> Request | None:
        """The request of that number, if it has not ended."""
        return self._requests.get(number)

    def waiting_for(self, microbatch: int, step: int) -> tuple[int, ...]:
        """Attention workers whose report of that step is still out; none when the step is over."""
        flight = self._microbatches[microbatch].flight
        return tuple(sorted(flight.waiting_for)) if flight is not None and flight.step == step else ()

    def drain(self) -> list[tuple[Destination, control.Message]]:
        """Messages to send, oldest first."""
        out, self._out = self._out, []
        return out

    # Events

    def submit(self, client: int, submit: control.Submit, spelling: Spelling | None = None) -> Request:
        """A new request; it is admitted at once when a seat is free."""
        request = Request(
            number=self._next_number,
            client=client,
            name=submit.request,
            prompt=submit.prompt,
            max_new_tokens=submit.max_new_tokens,
            ignore_eos=submit.ignore_eos,
            sampling=submit.sampling,
            spelling=spelling,
        )
        self._next_number += 1
        self._requests[request.number] = request
        self._waiting.append(request)
        self._admit()
        return request

    def reserved(self, attention: int, reserved: control.Reserved) -> None:
        """Blocks came (or none): prefill starts, or the request waits for another one's end."""
        request = self._requests.get(reserved.request)
        if request is None or request.state is not State.RESERVING:
            return
        if not reserved.blocks:
            # What was released while the refusal was under way may be room enough: then nothing else would bring us back here.
            if self._releases_A[attention] == request.asked_after:
                self._no_room.add(attention)
            self._seats_AM[request.attention][request.microbatch] -= 1
            request.state = State.WAITING
            request.attention = request.microbatch = -1
            self._waiting.appendleft(request)
            self._admit()
            return
        request.state = State.PREFILLING
        request.blocks = len(reserved.blocks)
        request.prefill = self._next_prefill
        self._next_prefill = (self._next_prefill + 1) % self._topology.prefill
        self._out.append(
            (
                (PREFILL, request.prefill),
                control.PrefillWork(
                    request.number, request.prompt, request.attention, reserved.blocks, request.sampling
                ),
            )
        )

    def room(self, attention: int) -> None:
        """Blocks of an earlier release have come free only now: who was refused may ask again."""
        self._no_room.discard(attention)
        self._admit()

    def prefill_done(self, done: control.PrefillDone) -> None:
        """The first token: it goes out at once; the request joins when its KV has come too."""
        request = self._requests.get(done.request)
        if request is None:
            return
        request.prefill_done = True
        if self._take_token(request, done.token, done.logprobs):
            self._join_if_complete(request)

    def kv_ready(self, ready: control.KvReady) -> None:
        """The request's KV is on its attention worker."""
        request = self._requests.get(ready.request)
        if request is not None and request.state is not State.ENDED:
            request.kv_ready = True
            self._join_if_complete(request)

    def step_done(self, attention: int, done: control.StepDone) -> None:
        """An attention worker's tokens of a step; with the last participant's the next step begins."""
        microbatch = self._microbatches[done.microbatch]
        flight = microbatch.flight
        if flight is None or flight.step != done.step or attention not in flight.waiting_for:
            return
        flight.waiting_for.discard(attention)
        self._release_ending(flight, {attention})
        requests = flight.rows_A[attention]
        logprobs_T = done.logprobs or (None,) * len(requests)
        for request, token, logprobs in zip(requests, done.tokens, logprobs_T, strict=True):
            if request.state is State.RUNNING:
                self._take_token(request, token, logprobs)
        if not flight.waiting_for:
            microbatch.flight = None
            self._start_step(microbatch)

    def step_aborted(self, aborted: control.StepAborted) -> None:
        """The step lost a target: its participants give it up and the rows come again under a new step number."""
        microbatch = self._microbatches[aborted.microbatch]
        flight = microbatch.flight
        if flight is None or flight.step != aborted.step:
            return
        microbatch.flight = None
        for attention in flight.rows_A:
            self._out.append(((ATTENTION, attention), control.CancelStep(aborted.microbatch, aborted.step)))
        self._release_ending(flight, set(flight.rows_A))
        self._start_step(microbatch)

    def cancel(self, client: int, name: str) -> None:
        """Nobody waits for the request any more; it leaves at its step boundary."""
        for request in list(self._requests.values()):
            if request.client == client and request.name == name and request.state is not State.ENDED:
                self._end(request)

    def cancel_client(self, client: int) -> None:
        """A client is gone with all of its requests."""
        for request in list(self._requests.values()):
            if request.client == client and request.state is not State.ENDED:
                self._end(request)

    # Transitions

    def _admit(self) -> None:
        while self._waiting:
            seat = self._best_seat()
            if seat is None:
                return
            request = self._waiting.popleft()
            request.attention, request.microbatch = seat
            self._seats_AM[request.attention][request.microbatch] += 1
            request.state = State.RESERVING
            request.asked_after = self._releases_A[request.attention]
            self._out.append(
                (
                    (ATTENTION, request.attention),
                    control.Reserve(request.number, request.tokens_reserved, request.sampling, request.seen),
                )
            )

    def _best_seat(self) -> tuple[int, int] | None:
        """The emptiest microbatch of the emptiest attention worker that has room; ties by rank."""
        open_workers = [
            attention
            for attention, seats_M in enumerate(self._seats_AM)
            if attention not in self._no_room and min(seats_M) < self._capacity
        ]
        if not open_workers:
            return None
        attention = min(open_workers, key=lambda a: (sum(self._seats_AM[a]), a))
        # Over all workers, so that a microbatch is not filled on one of them and left empty on the others.
        microbatch = min(
            (m for m in range(self._topology.microbatches) if self._seats_AM[attention][m] < self._capacity),
            key=lambda m: (self._seats_AM[attention][m], sum(seats_M[m] for seats_M in self._seats_AM), m),
        )
        return attention, microbatch

    def _take_token(self, request: Request, token: int, logprobs: control.TokenLogprobs | None) -> bool:
        """Records and sends a token; returns whether the request goes on."""
        request.produced.append(token)
        finish = ""
        if token in self._eos_ids and not request.ignore_eos:
            finish = "stop"
        elif len(request.produced) >= request.max_new_tokens:
            finish = "length"
        text = ""
        if request.spelling is not None:
            text, stopped = request.spelling.push(token, last=bool(finish))
            finish = "stop" if stopped else finish
        out = control.TokenOut(request.name, len(request.produced) - 1, token, finish, text, logprobs)
        self._out.append(((CLIENT, request.client), out))
        if finish:
            finished = control.Finished(request.name, finish, len(request.prompt), len(request.produced))
            self._out.append(((CLIENT, request.client), finished))
            self._end(request)
        return not finish

    def _join_if_complete(self, request: Request) -> None:
        if not (request.kv_ready and request.prefill_done and request.state is State.PREFILLING):
            return
        request.state = State.READY
        microbatch = self._microbatches[request.microbatch]
        microbatch.requests.append(request)
        if microbatch.flight is None:
            self._start_step(microbatch)

    def _start_step(self, microbatch: Microbatch) -> None:
        microbatch.requests = [r for r in microbatch.requests if r.state is not State.ENDED]
        if not microbatch.requests:
            return
        rows_A: dict[int, list[Request]] = {}
        for request in microbatch.requests:
            request.state = State.RUNNING
            rows_A.setdefault(request.attention, []).append(request)
        step = microbatch.next_step
        microbatch.next_step += 1
        microbatch.flight = Step(step, rows_A, set(rows_A))
        tokens_A = tuple(len(rows_A.get(attention, ())) for attention in range(self._topology.attention))
        self._out.append(((SCHEDULER, 0), control.Announce(microbatch.number, step, tokens_A)))
        for attention, requests in sorted(rows_A.items()):
            rows = tuple(control.Row(r.number, r.produced[-1], len(r.prompt) + len(r.produced) - 1) for r in requests)
            self._out.append(((ATTENTION, attention), control.StepWork(microbatch.number, step, rows)))

    def _release_ending(self, flight: Step, attention_workers: set[int]) -> None:
        for request in flight.ending:
            if request.attention in attention_workers:
                self._release(request, quarantine=False)
        flight.ending = [r for r in flight.ending if r.attention not in attention_workers]

    def _end(self, request: Request) -> None:
        """Ends a request and gives back what it holds, as soon as nobody can write into it any more."""
        state, request.state = request.state, State.ENDED
        if state is State.WAITING:
            self._waiting.remove(request)
            del self._requests[request.number]
            return
        if state is State.RUNNING:
            flight = self._microbatches[request.microbatch].flight
            if flight is not None and request.attention in flight.waiting_for:
                flight.ending.append(request)
                return
        # Prefill's report may overtake its writes: only the attention worker knows when they have landed.
        self._release(request, quarantine=state is State.PREFILLING and not request.kv_ready)

    def _release(self, request: Request, *, quarantine: bool) -> None:
        self._out.append(((ATTENTION, request.attention), control.Release(request.number, quarantine)))
        self._seats_AM[request.attention][request.microbatch] -= 1
        self._releases_A[request.attention] += 1
        self._no_room.discard(request.attention)
        del self._requests[request.number]
        self._admit()
