"""The batcher in a little world that delivers its messages in any order that real channels could."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from afore.core import control
from afore.core.topology import ATTENTION, PREFILL, Topology
from afore.serving.batching import Batcher
from afore.serving.requests import NOWHERE, Request, State
from tests.serving.batch_world import EOS, World, next_token, prescribed

ENDS_AT_ONCE = next(p for p in ((a, b) for a in range(24) for b in range(24)) if next_token(p) == EOS)
LONG = next(p for p in ((a, b, 7) for a in range(24) for b in range(24)) if EOS not in prescribed(p, 12, True))


def submit(world: World, name: str, *, tokens: int = 4, prompt: tuple[int, ...] = LONG) -> None:
    world.submit(name, prompt, tokens, ignore_eos=True)


def anything(world: World, choice: int) -> bool:
    """One of the things that can happen by themselves; false when there is none."""
    kinds: list[tuple[Callable[[Any], None], list[Any]]] = [
        (world.deliver, world.to_deliver()),
        (world.hear, world.to_hear()),
        (world.prefill, world.to_prefill()),
        (world.land, world.to_land()),
        (world.finish, world.to_finish()),
        (world.release, world.held),
    ]
    possible = [(act, places) for act, places in kinds if places]
    if possible:
        act, places = possible[choice % len(possible)]
        act(places[choice // 7 % len(places)])
    return bool(possible)


class AnyOrder(RuleBasedStateMachine):
    """Requests come and go, steps are lost, caches are tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World
        self.cancelled: set[str] = set()
        self.oldest_A: list[tuple[Request, int] | None] = []

    @initialize(
        attention=st.integers(1, 2),
        microbatches=st.integers(1, 3),
        prefill=st.integers(1, 2),
        capacity=st.integers(1, 3),
        blocks=st.integers(3, 8),
        block_tokens=st.integers(1, 3),
        chunk_tokens=st.integers(0, 3),
        least=st.integers(0, 3),
        holds=st.lists(st.booleans(), max_size=5),
    )
    def begin(self, attention: int, microbatches: int, prefill: int, least: int, **shape: Any) -> None:
        topology = Topology(attention=attention, ffn=2, prefill=prefill, microbatches=microbatches)
        self.world = World(topology, least=min(least, microbatches), **shape)
        self.oldest_A = [None] * attention

    @precondition(lambda self: len(self.world.batcher.live) < 12)
    @rule(
        prompts=st.lists(st.lists(st.integers(0, 23), min_size=1, max_size=6), min_size=1, max_size=5),
        tokens=st.sampled_from([1, 2, 6, 24]),
        ignore_eos=st.sampled_from([True, True, False]),
    )
    def submit(self, prompts: list[list[int]], tokens: int, ignore_eos: bool) -> None:
        room = self.world.blocks * self.world.block_tokens
        for prompt in prompts:
            prompt = prompt[: room - 1]
            name = f"r{len(self.world.asked)}"
            self.world.submit(name, tuple(prompt), min(tokens, room - len(prompt)), ignore_eos=ignore_eos)

    @rule(choice=st.integers(0, 1 << 20))
    def cancel(self, choice: int) -> None:
        if live := self.world.batcher.live:
            name = live[choice % len(live)].name
            self.cancelled.add(name)
            self.world.cancel(name)

    @rule(choice=st.integers(0, 1 << 20))
    def abort(self, choice: int) -> None:
        if steps := self.world.to_abort():
            self.world.abort(*steps[choice % len(steps)])

    @precondition(lambda self: self.world.least > 0)
    @rule(choice=st.integers(0, 2))
    def others_run(self, choice: int) -> None:
        most = self.world.topology.microbatches
        self.world.run_with(min(most, self.world.least + choice))

    @rule(choices=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=20))
    def time_goes_by(self, choices: list[int]) -> None:
        for choice in choices:
            anything(self.world, choice)

    @invariant()
    def everybody_has_a_seat(self) -> None:
        if hasattr(self, "world"):
            self.world.check_seats()

    @invariant()
    def the_oldest_of_a_worker_keeps_its_seat_until_it_ends(self) -> None:
        for before in self.oldest_A:
            if before is not None:
                request, ticket = before
                assert request.ticket == ticket or request.state is State.ENDED
        oldest_A = self.world.oldest_A()
        self.oldest_A = [None if request is None else (request, request.ticket) for request in oldest_A]

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_out()
            self.world.check_end(self.cancelled)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 160, 40))
def test_storms_of_requests_in_tiny_caches(first_seed: int) -> None:
    """As above, but long: hundreds of events, and many preemptions, which a machine that is shrunk seldom comes to."""
    preemptions = 0
    for seed in range(first_seed, first_seed + 40):
        numbers = random.Random(seed)
        world = World(
            Topology(
                attention=numbers.randint(1, 2),
                ffn=2,
                prefill=numbers.randint(1, 2),
                microbatches=(most := numbers.randint(1, 3)),
            ),
            least=numbers.choice([0, 1, most]),
            capacity=numbers.randint(1, 4),
            blocks=numbers.randint(3, 9),
            block_tokens=numbers.randint(1, 3),
            chunk_tokens=numbers.randint(0, 3),
            holds=numbers.choices([True, False], k=numbers.randint(0, 5)),
        )
        room = world.blocks * world.block_tokens
        cancelled: set[str] = set()
        oldest_A = world.oldest_A()
        tickets_A = [request.ticket if request is not None else -1 for request in oldest_A]
        abort, cancel = numbers.choice([0, 0.02, 0.1]), numbers.choice([0, 0.01])
        for event in range(500):
            if world.least and event % 50 == 0:
                world.run_with(numbers.randint(world.least, most))
                world.check_seats()
            if numbers.random() < 0.05 and len(world.batcher.live) < 10:
                prompt = tuple(numbers.randrange(24) for _ in range(numbers.randint(1, min(6, room - 1))))
                tokens = min(numbers.randint(1, 24), room - len(prompt))
                world.submit(f"r{len(world.asked)}", prompt, tokens, ignore_eos=numbers.random() < 0.7)
            if numbers.random() < abort and (steps := world.to_abort()):
                world.abort(*numbers.choice(steps))
            if numbers.random() < cancel and (live := world.batcher.live):
                name = numbers.choice(live).name
                cancelled.add(name)
                world.cancel(name)
            anything(world, numbers.randrange(1 << 20))
            for request, ticket in zip(oldest_A, tickets_A, strict=True):
                assert request is None or request.ticket == ticket or request.state is State.ENDED
            oldest_A = world.oldest_A()
            tickets_A = [request.ticket if request is not None else -1 for request in oldest_A]
        world.run_out()
        world.check_end(cancelled)
        preemptions += world.batcher.num_preemptions
    assert preemptions > 100, "the caches are not tiny enough to show anything"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]  # pytest reads it off the class


def test_rows_carry_the_last_token_and_its_position() -> None:
    world = World(Topology(attention=1, ffn=1, microbatches=1))
    submit(world, "a", tokens=3)
    world.settle()
    (running,) = world.workers_A[0].steps_M[0]
    assert running.work.rows == (control.Row(request=0, token=next_token(LONG), position=3),)


def test_an_aborted_step_comes_again_with_the_same_rows() -> None:
    world = World(Topology(attention=2, ffn=1, prefill=2, microbatches=1))
    submit(world, "a", tokens=4)
    submit(world, "b", tokens=4)
    world.settle()
    while not all(worker.steps_M[0] for worker in world.workers_A):
        world.finish(world.to_finish()[0])
        world.settle()
    before = [worker.steps_M[0][0].work for worker in world.workers_A]
    world.abort(0, before[0].step)
    world.settle()
    after = [worker.steps_M[0][-1].work for worker in world.workers_A]
    assert [work.rows for work in after] == [work.rows for work in before]
    assert [work.step for work in after] == [work.step + 1 for work in before]
    world.run_out()
    world.check_end()


def test_first_token_that_ends_the_request_never_joins() -> None:
    world = World(Topology(attention=1, ffn=1, microbatches=1))
    world.submit("a", ENDS_AT_ONCE, 3)
    world.settle()
    assert world.announced == {}
    world.check_end()


@pytest.mark.parametrize("why", ["first token ends it", "cancelled after its first token", "cancelled before"])
def test_blocks_into_which_prefill_may_still_write_are_quarantined(why: str) -> None:
    """Prefill's report comes over another way than its writes, and may overtake them."""
    world = World(Topology(attention=1, ffn=1, microbatches=1), blocks=1)
    world.submit("a", ENDS_AT_ONCE if why == "first token ends it" else LONG[:2], 2)
    world.deliver((ATTENTION, 0))
    world.hear((ATTENTION, 0))
    world.deliver((PREFILL, 0))
    world.prefill(0)
    if why != "cancelled before":
        world.hear((PREFILL, 0))
    world.cancel("a")
    submit(world, "b", tokens=1)
    while places := world.to_deliver():
        world.deliver(places[0])
    assert world.workers_A[0].pool.num_free == 0
    assert world.batcher.num_waiting == 1
    world.run_out()
    world.check_end({"a"})


def test_a_cancelled_prefill_stops_between_chunks_and_its_blocks_come_back() -> None:
    world = World(Topology(attention=1, ffn=1, microbatches=1), chunk_tokens=1)
    submit(world, "a")
    world.deliver((ATTENTION, 0))
    world.hear((ATTENTION, 0))
    world.deliver((PREFILL, 0))
    world.prefill(0)
    world.cancel("a")
    world.settle()
    assert world.events["a"] == []
    assert len(world.workers_A[0].cache) == 1, "it ran on"
    world.check_end({"a"})


def test_a_request_joins_only_with_both_token_and_kv() -> None:
    topology = Topology(attention=1, ffn=1, microbatches=1)
    batcher = Batcher(topology, max_tokens_per_worker=2, kv_blocks=4, block_tokens=4, eos_ids=frozenset({EOS}))
    request = batcher.submit(0, control.Submit("a", "", (1,), 3, False, control.Sampling()))
    batcher.reserved(0, control.Reserved(request.ticket, (0,)))
    batcher.prefill_done(control.PrefillDone(request.ticket, 9))
    states = [request.state]
    batcher.kv_ready(control.KvReady(request.ticket))
    states.append(request.state)
    assert states == [State.PREFILLING, State.RUNNING]


@pytest.mark.parametrize("attention", [1, 2, 3])
def test_requests_are_spread_evenly(attention: int) -> None:
    world = World(Topology(attention=attention, ffn=1, microbatches=2), capacity=4, blocks=100)
    for number in range(4 * attention):
        submit(world, f"r{number}", tokens=2)
    seats: dict[tuple[int, int], int] = {}
    for request in world.batcher.live:
        seats[request.attention, request.microbatch] = seats.get((request.attention, request.microbatch), 0) + 1
    assert set(seats.values()) == {2}
    assert len(seats) == 2 * attention


def test_a_free_block_is_the_oldests_who_lacks_one() -> None:
    """The oldest lacks a block, the youngest gives one, and a third one whose step begins first needs it as well."""
    world = World(Topology(attention=1, ffn=1, microbatches=2), blocks=5, block_tokens=8)
    submit(world, "goes", prompt=(1,))
    submit(world, "oldest", prompt=(1,) * 7, tokens=6)
    world.cancel("goes")
    submit(world, "middle", prompt=(2,) * 5, tokens=6)
    submit(world, "youngest", prompt=(3,), tokens=6)
    oldest, middle, youngest = world.batcher.live
    assert [request.microbatch for request in world.batcher.live] == [1, 0, 0]
    world.settle()
    for _ in range(2):
        world.finish((0, 0))
        world.settle()
    assert [request.length for request in (oldest, middle)] == [8, 8], "a block is full"
    assert {request.state for request in world.batcher.live} == {State.RUNNING}
    # From here on it is as if others held the rest.
    rest = world.batcher._ledger.free(0)
    world.batcher._ledger.take(0, rest)
    world.finish((0, 1))
    world.settle()
    assert youngest.leaving
    world.finish((0, 0))
    world.settle()
    assert [request.state for request in (oldest, middle, youngest)] == [State.RUNNING, State.READY, State.WAITING]
    assert world.batcher.num_preemptions == 1
    world.batcher._ledger.give_back(0, NOWHERE, rest, late=False)
    world.run_out()
    world.check_end({"goes"})


def test_requests_change_over_to_the_microbatches_that_run() -> None:
    """At their step's end; and back, evenly. Seats are then as many as before."""
    world = World(Topology(attention=2, ffn=1, microbatches=3), capacity=6, blocks=100, least=2)
    for number in range(12):
        submit(world, f"r{number}", tokens=40)
    world.settle()

    def sizes() -> list[int]:
        for _ in range(3):
            for where in world.to_finish():
                world.finish(where)
                world.settle()
                world.check_seats()
        return [len(microbatch.requests) for microbatch in world.batcher._microbatches]

    assert sizes() == [4, 4, 4]
    world.run_with(2)
    assert [len(microbatch.requests) for microbatch in world.batcher._microbatches] == [4, 4, 4], "all are in a step"
    assert sizes() == [6, 6, 0]
    submit(world, "later", tokens=1)
    assert world.batcher.live[-1].microbatch < 2
    world.run_with(3)
    assert sizes() == [4, 4, 4]
    world.run_out()
    world.check_end()
