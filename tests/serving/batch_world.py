"""A little world around the batcher: real KV pools and prompt lines, a cache that remembers what was written where, and channels
that deliver in any order that real ones could: first in, first out on each, in no order between them.

A token is a function of the sequence before it, and a step reads that sequence out of the cache. So a block in two hands, a stale
write or a lost one shows up as a wrong token.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from afore.core import control
from afore.core.topology import ATTENTION, PREFILL, SCHEDULER, Topology
from afore.models.kv import BlockAllocator
from afore.serving.batching import Batcher
from afore.serving.requests import Request
from afore.serving.spoken import CLIENT
from afore.workers.kv_pool import KvPool, bell
from afore.workers.prompt_line import PromptLine

EOS = 2
VOCABULARY = 24
Place = tuple[str, int]


def next_token(sequence: Sequence[int]) -> int:
    """The token after a sequence."""
    return zlib.crc32(bytes(sequence)) % VOCABULARY


def prescribed(prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool) -> list[int]:
    """What a request must produce, whatever else goes on."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        tokens.append(next_token([*prompt, *tokens]))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens


@dataclass(slots=True)
class Running:
    """A step on an attention worker."""

    work: control.StepWork
    blocks_T: list[list[int]]
    cancelled: bool = False


@dataclass(slots=True)
class Write:
    """A prefill's one-sided write that is under way."""

    slots: list[int]
    tokens: tuple[int, ...]
    bell: int | None


class Worker:
    """An attention worker."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.pool = KvPool(BlockAllocator(blocks), block_tokens=block_tokens)
        self.cache: dict[int, int] = {}
        """Slot → token."""
        self.steps_M: dict[int, deque[Running]] = defaultdict(deque)
        """Of each microbatch, oldest first; only the last may be one that is not cancelled."""

    def slots(self, blocks: Sequence[int], start: int, end: int) -> list[int]:
        size = self.pool.block_tokens
        return [blocks[position // size] * size + position % size for position in range(start, end)]


class World:
    """Roles and clients around a batcher."""

    def __init__(
        self,
        topology: Topology,
        *,
        capacity: int = 2,
        blocks: int = 8,
        block_tokens: int = 4,
        chunk_tokens: int = 0,
        least: int = 0,
        holds: Sequence[bool] = (),
    ) -> None:
        """``least``: the fewest microbatches that may run (``run_with``); 0: always all of them. ``holds``: what is answered, in
        turns, when a step could begin; none: none is held back."""
        self.holds = holds
        self.held: list[int] = []
        """Microbatches that wait to be released."""
        self.num_asked = 0
        self.least = least
        self.topology = topology
        self.capacity = capacity
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.batcher = Batcher(
            topology,
            max_tokens_per_worker=capacity,
            kv_blocks=blocks,
            block_tokens=block_tokens,
            eos_ids=frozenset({EOS}),
            least_microbatches=least,
            hold=self._hold if holds else None,
        )
        self.workers_A = [Worker(blocks, block_tokens) for _ in range(topology.attention)]
        self.lines_P = [PromptLine(chunk_tokens, most_open=2) for _ in range(topology.prefill)]
        self.queues: dict[Place, deque[control.Message]] = defaultdict(deque)
        """To each role."""
        self.answers: dict[Place, deque[control.Message]] = defaultdict(deque)
        """From each role."""
        self.writes_PA: dict[tuple[int, int], deque[Write]] = defaultdict(deque)
        self.events: dict[str, list[control.Message]] = defaultdict(list)
        self.announced: dict[tuple[int, int], tuple[int, ...]] = {}
        self.asked: dict[str, control.Submit] = {}
        self.pull()

    # What a test may do next

    def to_deliver(self) -> list[Place]:
        return [place for place, queue in self.queues.items() if queue]

    def to_hear(self) -> list[Place]:
        return [place for place, queue in self.answers.items() if queue]

    def to_prefill(self) -> list[int]:
        return [rank for rank, line in enumerate(self.lines_P) if len(line)]

    def to_land(self) -> list[tuple[int, int]]:
        return [link for link, writes in self.writes_PA.items() if writes]

    def to_finish(self) -> list[tuple[int, int]]:
        """(attention, microbatch) with a step that computes."""
        return [(a, m) for a, worker in enumerate(self.workers_A) for m, steps in worker.steps_M.items() if steps]

    def to_abort(self) -> list[tuple[int, int]]:
        """(microbatch, step) of which no worker has finished its part."""
        batches = self.batcher._microbatches
        flights = [(m.number, m.flight) for m in batches if m.flight is not None]
        return [(number, flight.step) for number, flight in flights if self._computes_everywhere(number, flight.step)]

    def _hold(self, microbatch: int) -> bool:
        assert microbatch not in self.held, "asked again while it waits"
        self.num_asked += 1
        if self.holds[self.num_asked % len(self.holds)]:
            self.held.append(microbatch)
        return microbatch in self.held

    def _computes_everywhere(self, microbatch: int, step: int) -> bool:
        tokens_A = self.announced[microbatch, step]
        running = [
            running.work
            for worker in self.workers_A
            for running in worker.steps_M[microbatch]
            if running.work.step == step
        ]
        return len(running) == sum(tokens > 0 for tokens in tokens_A)

    # What happens

    def submit(self, name: str, prompt: tuple[int, ...], tokens: int, *, ignore_eos: bool = False) -> None:
        self.asked[name] = control.Submit(name, "", prompt, tokens, ignore_eos, control.Sampling())
        self.batcher.submit(0, self.asked[name])
        self.pull()

    def cancel(self, name: str) -> None:
        self.batcher.cancel(0, name)
        self.pull()

    def run_with(self, microbatches: int) -> None:
        self.batcher.run_with(microbatches)
        self.pull()

    def release(self, microbatch: int) -> None:
        self.held.remove(microbatch)
        self.batcher.release(microbatch)
        self.pull()

    def abort(self, microbatch: int, step: int) -> None:
        self.batcher.step_aborted(control.StepAborted(microbatch, step, 0))
        self.pull()

    def deliver(self, place: Place) -> None:
        """Hands the oldest message of a role to it."""
        role, rank = place
        message = self.queues[place].popleft()
        if role == PREFILL:
            self._obey_prefill(rank, message)
        else:
            self._obey_attention(rank, message)

    def hear(self, place: Place) -> None:
        """Hands the oldest message of a role to the engine."""
        message = self.answers[place].popleft()
        batcher, rank = self.batcher, place[1]
        match message:
            case control.Reserved():
                batcher.reserved(rank, message)
            case control.StepDone():
                batcher.step_done(rank, message)
            case control.Freed():
                batcher.freed(rank, message)
            case control.KvReady():
                batcher.kv_ready(message)
            case control.PrefillDone():
                batcher.prefill_done(message)
            case _:
                assert isinstance(message, control.PrefillStopped)
        self.pull()

    def prefill(self, rank: int) -> None:
        """A prefill worker runs one chunk."""
        turn = self.lines_P[rank].next()
        assert turn is not None
        prompt, tokens = turn
        work = prompt.work
        slots = self.workers_A[work.attention].slots(work.blocks, prompt.done - len(tokens), prompt.done)
        self.writes_PA[rank, work.attention].append(Write(slots, tokens, None if prompt.left else bell(work.blocks)))
        if not prompt.left:
            self.answers[PREFILL, rank].append(control.PrefillDone(work.request, next_token(work.prompt)))

    def land(self, link: tuple[int, int]) -> None:
        """The oldest write of a link is visible."""
        write, worker = self.writes_PA[link].popleft(), self.workers_A[link[1]]
        worker.cache.update(zip(write.slots, write.tokens, strict=True))
        if write.bell is not None:
            request = worker.pool.arrived(write.bell)
            if request is not None:
                self.answers[ATTENTION, link[1]].append(control.KvReady(request))
            self._tell_freed(link[1])

    def finish(self, where: tuple[int, int]) -> None:
        """A worker's oldest step of a microbatch comes to its end; one that was cancelled may have written until then."""
        attention, microbatch = where
        worker = self.workers_A[attention]
        running = worker.steps_M[microbatch].popleft()
        tokens = []
        for row, blocks in zip(running.work.rows, running.blocks_T, strict=True):
            slots = worker.slots(blocks, 0, row.position + 1)
            worker.cache[slots[-1]] = row.token
            tokens.append(next_token([worker.cache.get(slot, 0) for slot in slots]))
        worker.pool.unpin([row.request for row in running.work.rows])
        if not running.cancelled:
            done = control.StepDone(microbatch, running.work.step, tuple(tokens))
            self.answers[ATTENTION, attention].append(done)
        self._tell_freed(attention)

    def settle(self) -> None:
        """Everything goes on until only steps are left to be computed."""
        for _ in range(100_000):
            if places := self.to_deliver():
                self.deliver(places[0])
            elif ranks := self.to_prefill():
                self.prefill(ranks[0])
            elif links := self.to_land():
                self.land(links[0])
            elif places := self.to_hear():
                self.hear(places[0])
            elif self.held:
                self.release(self.held[0])
            else:
                return
        raise AssertionError("messages without end")

    def run_out(self) -> None:
        """Everything goes on until nothing is left to do."""
        for _ in range(100_000):
            self.settle()
            if not (steps := self.to_finish()):
                return
            self.finish(steps[0])
        raise AssertionError("the batcher never comes to rest")

    # What must hold

    def check_end(self, cancelled: set[str] = frozenset()) -> None:  # type: ignore[assignment]  # read only
        """After ``run_out``: everybody has what it asked for, nobody holds anything."""
        assert self.batcher.live == []
        assert self.batcher.blocks_held == 0
        for attention, worker in enumerate(self.workers_A):
            assert worker.pool.num_free == self.blocks
            assert worker.pool.requests == ()
            assert self.batcher._ledger.free(attention) == self.blocks
            assert self.batcher._ledger.late(attention) == 0
        for name, asked in self.asked.items():
            outs = [e for e in self.events[name] if isinstance(e, control.TokenOut)]
            ends = [e for e in self.events[name] if isinstance(e, control.Finished)]
            expected = prescribed(asked.prompt, asked.max_new_tokens, asked.ignore_eos)
            assert [out.index for out in outs] == list(range(len(outs)))
            if name in cancelled and not ends:
                assert [out.token for out in outs] == expected[: len(outs)]
                continue
            assert [out.token for out in outs] == expected
            reason = "stop" if expected[-1] == EOS and not asked.ignore_eos else "length"
            assert self.events[name][-1] == control.Finished(name, reason, len(asked.prompt), len(expected))
            assert [out.finish for out in outs] == [""] * (len(outs) - 1) + [reason]
        # Each preemption pays for a block that somebody grew, and nobody grows over the same border twice.
        grown = sum(-(-asked.max_new_tokens // self.block_tokens) for asked in self.asked.values())
        assert self.batcher.num_preemptions <= grown

    def check_seats(self) -> None:
        """Whoever is in a microbatch's line has a seat there, in one only, and no worker has more than it may."""
        seated = list(self.batcher._seated.values())
        for number, microbatch in enumerate(self.batcher._microbatches):
            assert all(request.microbatch == number for request in microbatch.requests)
            assert len({request.number for request in microbatch.requests}) == len(microbatch.requests)
            for attention in range(self.topology.attention):
                here = sum((r.attention, r.microbatch) == (attention, number) for r in seated)
                assert here == self.batcher._seats._taken_AM[attention][number] <= self.capacity
        most = self.capacity * (self.least or self.topology.microbatches)
        assert all(self.batcher._seats.of_worker(a) <= most for a in range(self.topology.attention))

    def oldest_A(self) -> list[Request | None]:
        """Of each attention worker, among those that have not been told to go."""
        seated = [request for request in self.batcher._seated.values() if not request.leaving]
        by_age = [
            sorted((r for r in seated if r.attention == a), key=lambda r: r.number) for a in range(len(self.workers_A))
        ]
        return [requests[0] if requests else None for requests in by_age]

    # Behind it

    def pull(self) -> None:
        for place, message in self.batcher.drain():
            if place[0] == CLIENT:
                if isinstance(message, control.TokensOut):
                    for token in message.each():
                        self.events[token.request].append(token)
                    continue
                assert isinstance(message, control.TokenOut | control.Finished | control.Failed)
                self.events[message.request].append(message)
            elif place[0] == SCHEDULER:
                assert isinstance(message, control.Announce)
                key = (message.microbatch, message.step)
                assert key not in self.announced, "a step number is never used twice"
                assert message.microbatch not in self.held, "begun while it is held back"
                self.announced[key] = message.tokens_A
                assert any(message.tokens_A)
                assert all(0 <= tokens <= self.capacity for tokens in message.tokens_A)
            else:
                self.queues[place].append(message)
                if isinstance(message, control.Reserve):
                    assert not self.batcher._lacking_A[place[1]], "admitted where somebody lacks a block"
        numbers = [request.number for request in self.batcher._waiting]
        assert numbers == sorted(numbers), "the line is in order of age"

    def _obey_attention(self, rank: int, message: control.Message) -> None:
        worker = self.workers_A[rank]
        match message:
            case control.Reserve():
                blocks = worker.pool.reserve(message.request, message.tokens, message.sampling, message.seen)
                self.answers[ATTENTION, rank].append(control.Reserved(message.request, blocks))
            case control.Release():
                worker.pool.release(message.request, quarantine=message.quarantine, late=message.late)
                self._tell_freed(rank)
            case control.StepWork():
                steps = worker.steps_M[message.microbatch]
                assert all(step.cancelled for step in steps), "one step of a microbatch at a time on a worker"
                assert len(message.rows) == self.announced[message.microbatch, message.step][rank]
                requests = [row.request for row in message.rows]
                worker.pool.pin(requests, [row.position for row in message.rows])
                longest = max(row.position for row in message.rows) // self.block_tokens + 1
                steps.append(Running(message, worker.pool.block_rows(requests, longest).tolist()))
            case control.CancelStep():
                for running in worker.steps_M[message.microbatch]:
                    running.cancelled |= running.work.step == message.step
            case _:
                raise AssertionError(f"an attention worker got {message}")

    def _obey_prefill(self, rank: int, message: control.Message) -> None:
        line = self.lines_P[rank]
        if isinstance(message, control.PrefillWork):
            line.add(message)
            return
        assert isinstance(message, control.CancelPrefill)
        prompt = line.drop(message.request)
        if prompt is not None:
            work = prompt.work
            self.writes_PA[rank, work.attention].append(Write([], (), bell(work.blocks)))
            self.answers[PREFILL, rank].append(control.PrefillStopped(work.request))

    def _tell_freed(self, rank: int) -> None:
        self.answers[ATTENTION, rank].extend(control.Freed(r) for r in self.workers_A[rank].pool.take_freed())
