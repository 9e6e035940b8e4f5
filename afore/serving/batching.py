"""Continuous batching as a pure state machine: the one authority on which request is in which step.

Events in, (destination, message) pairs out; no I/O, no clock. M microbatches run side by side; each is a set of
requests spread over the attention workers; requests join and leave at their microbatch's step boundary. A worker without rows
takes no part in a step.

A request's life: waiting → reserving (KV blocks on its attention worker) → prefilling → ready ⇄ running → ended. It joins only
when its first token *and* its KV have arrived, and never if the first token ends it. Should it leave while prefill's writes may be
under way, its attention worker keeps the blocks in quarantine until they have landed; while a step may still write, until that
step's end.

KV blocks are counted here (see ``kv_ledger``), since here it is decided who gets them. A request holds blocks for the tokens that
it has, and takes one more when a step's row needs it. Where none is free, the youngest request of that worker is preempted: its
blocks are released, it goes back into the waiting line, and is later prefilled over its prompt and its tokens. It keeps its age.

- Only younger requests are preempted for a request; one that finds none waits, with its blocks, for what comes free. Free blocks
  go to the oldest of those who lack one, and a worker where anyone lacks one admits nobody. So the oldest request of a worker never
  loses a block and always gets its next: it ends (each request fits a worker's cache alone, which the engine checks), and then the
  next is the oldest.
- Each preemption pays for a block that somebody older takes, and each request takes each block by growth only once (coming back, it
  is given blocks for all it has). So there are never more preemptions than blocks grown.
- The line is in order of age, and its first is admitted first: nobody overtakes a request that waits for a large number of blocks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial

from afore.core import control
from afore.core.topology import ATTENTION, PREFILL, SCHEDULER, Topology
from afore.serving.kv_ledger import KvLedger
from afore.serving.requests import NOWHERE, Microbatch, Request, State, Step
from afore.serving.seats import Seats
from afore.serving.spelling import Spelling
from afore.serving.spoken import CLIENT, Destination, Spoken


class Batcher:
    """The engine's state machine. ``drain`` returns what to send since the last call, in order."""

    def __init__(
        self,
        topology: Topology,
        *,
        max_tokens_per_worker: int,
        kv_blocks: int,
        block_tokens: int,
        eos_ids: frozenset[int],
        least_microbatches: int = 0,
        hold: Callable[[int], bool] | None = None,
    ) -> None:
        """``kv_blocks``: those of each attention worker; no request may need more than these.

        ``least_microbatches``: the fewest that may run, ``max_tokens_per_worker`` being meant for those; 0: all of them always do.
        ``hold`` is asked before a step of a microbatch begins: whether it waits until ``release``.
        """
        self._topology = topology
        self._eos_ids = eos_ids
        self._microbatches = [Microbatch(number) for number in range(topology.microbatches)]
        self._waiting: list[Request] = []
        """Oldest first."""
        self._requests: dict[int, Request] = {}
        self._seated: dict[int, Request] = {}
        """By ticket."""
        self._regroups = least_microbatches > 0
        self._hold = hold
        self._held: set[int] = set()
        """Microbatches whose next step waits until it is released."""
        self._released: set[int] = set()
        """Those that were held and are not asked about again before a step of them begins."""
        self._seats = Seats(
            topology.attention,
            topology.microbatches,
            capacity=max_tokens_per_worker,
            per_worker=max_tokens_per_worker * (least_microbatches or topology.microbatches),
        )
        self._ledger = KvLedger(topology.attention, blocks=kv_blocks, block_tokens=block_tokens)
        self._lacking_A: list[dict[int, Request]] = [{} for _ in range(topology.attention)]
        """Requests that sit out steps because they lack a block, by number."""
        self._next_number = 0
        self._next_ticket = 0
        self._next_prefill = 0
        self._came_free = False
        self._out: list[tuple[Destination, control.Message]] = []
        self.num_preemptions = 0
        """Since the start."""

    @property
    def live(self) -> list[Request]:
        """Requests that have not ended."""
        return list(self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Requests without a seat: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def blocks_held(self) -> int:
        """KV blocks that requests hold, over all attention workers."""
        return sum(request.blocks for request in self._seated.values())

    def find(self, ticket: int) -> Request | None:
        """The request that the roles know by that number now."""
        return self._seated.get(ticket)

    def waiting_for(self, microbatch: int, step: int) -> tuple[int, ...]:
        """Attention workers whose report of that step is still out; none when the step is over."""
        flight = self._microbatches[microbatch].flight
        return tuple(sorted(flight.waiting_for)) if flight is not None and flight.step == step else ()

    def drain(self) -> list[tuple[Destination, control.Message]]:
        """Messages to send, oldest first."""
        out, self._out = self._out, []
        return out

    @property
    def num_microbatches(self) -> int:
        """How many of the M microbatches take requests."""
        return self._seats.open

    def run_with(self, microbatches: int) -> None:
        """From now on so many microbatches take requests; those of the others change over as their steps end."""
        assert self._regroups, "least_microbatches is 0"
        self._seats.open = microbatches
        self._settle()

    def release(self, microbatch: int) -> None:
        """The microbatch has been held long enough: its step begins, if anybody is in it."""
        self._held.remove(microbatch)
        self._released.add(microbatch)
        self._settle()

    # Events

    def submit(self, client: int, submit: control.Submit, spelling: Spelling | None = None) -> Request:
        """A new request; it is admitted at once when a seat and blocks are free."""
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
        self._settle()
        return request

    def reserved(self, attention: int, reserved: control.Reserved) -> None:
        """Blocks came: prefill starts."""
        request = self._seated.get(reserved.request)
        if request is None or request.state is not State.RESERVING:
            return
        request.state = State.PREFILLING
        request.prefill = self._next_prefill
        self._next_prefill = (self._next_prefill + 1) % self._topology.prefill
        self._send(
            PREFILL,
            request.prefill,
            control.PrefillWork(request.ticket, request.tokens, attention, reserved.blocks, request.sampling),
        )

    def freed(self, attention: int, freed: control.Freed) -> None:
        """Blocks that somebody might still have written into are free."""
        if self._ledger.freed(attention, freed.request):
            self._settle()

    def prefill_done(self, done: control.PrefillDone) -> None:
        """The next token: it goes out at once; the request joins when its KV has come too."""
        request = self._seated.get(done.request)
        if request is None or request.state is not State.PREFILLING:
            return
        request.prefill_done = True
        self._take_token(request, done.token, done.logprobs)
        self._join_if_complete(request)
        self._settle()

    def kv_ready(self, ready: control.KvReady) -> None:
        """The request's KV is on its attention worker."""
        request = self._seated.get(ready.request)
        if request is not None and request.state is State.PREFILLING:
            request.kv_ready = True
            self._join_if_complete(request)
            self._settle()

    def step_done(self, attention: int, done: control.StepDone) -> int:
        """An attention worker's tokens of a step; with the last participant's the next step begins.

        Returns the rows of the step that has ended by it, over all workers; 0 if none has.
        """
        microbatch = self._microbatches[done.microbatch]
        flight = microbatch.flight
        if flight is None or flight.step != done.step or attention not in flight.waiting_for:
            return 0
        flight.waiting_for.discard(attention)
        requests = flight.rows_A[attention]
        logprobs_T = done.logprobs or (None,) * len(requests)
        spoken = Spoken(self._out)
        for request, token, logprobs in zip(requests, done.tokens, logprobs_T, strict=True):
            request.cancelled_step = False
            if request.state is State.RUNNING:
                request.state = State.READY
                text, finish = request.push(token, self._eos_ids)
                if finish or logprobs is not None:
                    spoken.send()
                    self._say(
                        request,
                        control.TokenOut(request.name, len(request.produced) - 1, token, finish, text, logprobs),
                    )
                else:
                    spoken.add(request, token, text)
        spoken.send()
        for request in requests:
            if request.leaving or request.state is State.ENDED:
                self._leave_if_due(request)
        ended = not flight.waiting_for
        if ended:
            microbatch.flight = None
        self._settle()
        return sum(len(rows) for rows in flight.rows_A.values()) if ended else 0

    def step_aborted(self, aborted: control.StepAborted) -> None:
        """The step lost a target: its participants give it up and the rows come again under a new step number."""
        microbatch = self._microbatches[aborted.microbatch]
        flight = microbatch.flight
        if flight is None or flight.step != aborted.step:
            return
        microbatch.flight = None
        for attention, requests in flight.rows_A.items():
            self._send(ATTENTION, attention, control.CancelStep(aborted.microbatch, aborted.step))
            if attention in flight.waiting_for:
                for request in requests:
                    request.cancelled_step = True
                    self._step_is_over(request)
                    self._leave_if_due(request)
        self._settle()

    def cancel(self, client: int, name: str) -> None:
        """Nobody waits for the request any more; it leaves at its step boundary."""
        self._end_all([r for r in self._requests.values() if r.client == client and r.name == name])

    def end(self, request: Request) -> None:
        """Nobody waits for this request any more, as ``cancel``."""
        self._end_all([request])

    def cancel_client(self, client: int) -> None:
        """A client is gone with all of its requests."""
        self._end_all([r for r in self._requests.values() if r.client == client])

    # What follows from events

    def _settle(self) -> None:
        """Begins the steps that can begin, then admits whom there is room for; again while blocks come free by that."""
        self._came_free = True
        while self._came_free:
            self._came_free = False
            if self._regroups:
                self._regroup()
            for microbatch in self._microbatches:
                if microbatch.flight is None and microbatch.requests and not self._is_held(microbatch.number):
                    self._start_step(microbatch)
        self._admit()

    def _is_held(self, microbatch: int) -> bool:
        if self._hold is None or microbatch in self._released:
            return False
        if microbatch not in self._held and self._hold(microbatch):
            self._held.add(microbatch)
        return microbatch in self._held

    def _regroup(self) -> None:
        """Requests between two steps change over to microbatches that are open and emptier; the KV cache knows none of them."""
        for microbatch in self._microbatches:
            if microbatch.flight is not None:
                continue
            for request in tuple(microbatch.requests):
                # Of a cancelled step a worker may still be writing: the next one must wait for it, and within a microbatch does.
                if request.state is not State.READY or request.leaving or request.cancelled_step:
                    continue
                better = self._seats.better(request.attention, microbatch.number)
                if better is None:
                    continue
                self._seats.leave(request.attention, microbatch.number)
                self._seats.take(request.attention, better)
                microbatch.requests.remove(request)
                request.microbatch = better
                self._microbatches[better].requests.append(request)

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            blocks = self._ledger.blocks_for(request.positions_at_once)
            seat = self._seats.best(partial(self._has_room, blocks))
            if seat is None:
                return
            del self._waiting[0]
            self._seat(request, *seat, blocks)

    def _has_room(self, blocks: int, worker: int) -> bool:
        """Whether blocks are free beside one for each request that is there: each can then grow before anyone must go."""
        return not self._lacking_A[worker] and self._ledger.free(worker) >= blocks + self._seats.of_worker(worker)

    def _seat(self, request: Request, attention: int, microbatch: int, blocks: int) -> None:
        request.attention, request.microbatch, request.blocks = attention, microbatch, blocks
        request.ticket = self._next_ticket
        self._next_ticket += 1
        self._seated[request.ticket] = request
        self._seats.take(attention, microbatch)
        self._ledger.take(attention, blocks)
        request.state = State.RESERVING
        reserve = control.Reserve(request.ticket, request.positions_at_once, request.sampling, request.seen)
        self._send(ATTENTION, attention, reserve)

    def _join_if_complete(self, request: Request) -> None:
        if request.state is State.PREFILLING and request.kv_ready and request.prefill_done:
            request.state = State.READY
            self._microbatches[request.microbatch].requests.append(request)

    def _start_step(self, microbatch: Microbatch) -> None:
        """Begins a step of all requests that have room for its tokens; none when nobody has."""
        block_tokens = self._ledger.block_tokens
        growing = [r for r in microbatch.requests if len(r.prompt) + len(r.produced) > r.blocks * block_tokens]
        for request in sorted(growing, key=_age):
            if request.state is State.READY:  # and has not been preempted for an older one just now
                self._grow(request)
        rows_A: dict[int, list[Request]] = {}
        for request in microbatch.requests:
            if request.number not in self._lacking_A[request.attention]:
                request.state = State.RUNNING
                rows_A.setdefault(request.attention, []).append(request)
        if not rows_A:
            return
        self._released.discard(microbatch.number)
        step = microbatch.next_step
        microbatch.next_step += 1
        microbatch.flight = Step(step, rows_A, set(rows_A))
        tokens_A = tuple(len(rows_A.get(attention, ())) for attention in range(self._topology.attention))
        self._send(SCHEDULER, 0, control.Announce(microbatch.number, step, tokens_A))
        for attention, requests in sorted(rows_A.items()):
            tickets = tuple([r.ticket for r in requests])
            tokens = tuple([r.produced[-1] for r in requests])
            positions = tuple([len(r.prompt) + len(r.produced) - 1 for r in requests])
            self._send(ATTENTION, attention, control.StepWork(microbatch.number, step, tickets, tokens, positions))

    def _grow(self, request: Request) -> None:
        """One more block for the request's next position, or an entry among those who lack one."""
        worker, lacking = request.attention, self._lacking_A[request.attention]
        lacking.pop(request.number, None)
        older = sum(number < request.number for number in lacking)
        while self._ledger.free(worker) <= older and self._ledger.free(worker) + self._coming(worker) <= older:
            victim = max((r for r in self._seated.values() if self._can_go(r, worker)), key=_age)
            if victim is request:
                break
            self._preempt(victim)
        if self._ledger.free(worker) > older:
            self._ledger.take(worker, 1)
            request.blocks += 1
        else:
            lacking[request.number] = request

    def _coming(self, worker: int) -> int:
        """Blocks that will come free when steps in flight, prefills and cancelled steps are over."""
        leaving = (r for r in self._seated.values() if r.attention == worker and not self._can_go(r, worker))
        return self._ledger.late(worker) + sum(request.blocks for request in leaving)

    @staticmethod
    def _can_go(request: Request, worker: int) -> bool:
        """Whether the request is on the worker to stay."""
        return request.attention == worker and not request.leaving and request.state is not State.ENDED

    def _preempt(self, request: Request) -> None:
        """It goes back into the line: at once, or with the token of the step that it is in."""
        self.num_preemptions += 1
        request.leaving = True
        self._leave_if_due(request)

    def _take_token(self, request: Request, token: int, logprobs: control.TokenLogprobs | None) -> None:
        """Records and sends a token; the last one ends the request."""
        self._say(request, request.take(token, logprobs, self._eos_ids))

    def _say(self, request: Request, out: control.TokenOut) -> None:
        self._send(CLIENT, request.client, out)
        if out.finish:
            finished = control.Finished(request.name, out.finish, len(request.prompt), len(request.produced))
            self._send(CLIENT, request.client, finished)
            self._end(request)

    # Leaving

    def _end_all(self, requests: list[Request]) -> None:
        for request in requests:
            if request.state is not State.ENDED:
                self._end(request)
        self._settle()

    def _end(self, request: Request) -> None:
        """Ends a request; it gives back what it holds as soon as nobody can write into it any more."""
        state, request.state = request.state, State.ENDED
        if state is State.WAITING:
            self._waiting.remove(request)
            del self._requests[request.number]
        elif state is not State.RUNNING:  # a running one leaves with its worker's report
            self._leave(request, state)

    def _step_is_over(self, request: Request) -> bool:
        """The request's step has ended on its worker, or will not; returns whether anybody still wants its token."""
        if request.state is not State.RUNNING:
            return False
        request.state = State.READY
        return True

    def _leave_if_due(self, request: Request) -> None:
        """For one that has ended or is preempted, and in no step any more."""
        if request.ticket not in self._seated or request.state is State.RUNNING:
            return
        if request.leaving or request.state is State.ENDED:
            self._leave(request, request.state)

    def _leave(self, request: Request, state: State) -> None:
        """Gives up seat and blocks; ``state`` is what it did last. One that has not ended goes back into the line."""
        # Prefill's report may overtake its writes: only the attention worker knows when they have landed.
        quarantine = state is State.PREFILLING and not request.kv_ready
        late = quarantine or request.cancelled_step
        if quarantine and not request.prefill_done:
            self._send(PREFILL, request.prefill, control.CancelPrefill(request.ticket))
        self._send(ATTENTION, request.attention, control.Release(request.ticket, quarantine, late))
        self._ledger.give_back(request.attention, request.ticket, request.blocks, late=late)
        self._seats.leave(request.attention, request.microbatch)
        self._lacking_A[request.attention].pop(request.number, None)
        microbatch = self._microbatches[request.microbatch]
        microbatch.requests = [r for r in microbatch.requests if r is not request]
        del self._seated[request.ticket]
        self._came_free = True
        if request.state is State.ENDED:
            del self._requests[request.number]
            return
        request.state = State.WAITING
        request.ticket = request.attention = request.microbatch = request.prefill = NOWHERE
        request.kv_ready = request.prefill_done = request.leaving = request.cancelled_step = False
        request.blocks = 0
        bisect.insort(self._waiting, request, key=_age)

    def _send(self, role: str, rank: int, message: control.Message) -> None:
        self._out.append(((role, rank), message))


def _age(request: Request) -> int:
    return request.number
