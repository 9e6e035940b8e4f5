"""The batcher in a little world that delivers its messages in any order that real channels could."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from afore.core import control
from afore.core.topology import ATTENTION, PREFILL, Topology
from afore.serving.batching import Batcher
from afore.serving.requests import Request, State
from tests.serving.batch_world import EOS, World, next_token, prescribed

ENDS_AT_ONCE = next(p for p in ((a, b) for a in range(24) for b in range(24)) if next_token(p) == EOS)
LONG = next(p for p in ((a, b, 7) for a in range(24) for b in range(24)) if EOS not in prescribed(p, 12, True))


def submit(world: World, name: str, *, tokens: int = 4, prompt: tuple[int, ...] = LONG) -> None:
    world.submit(name, prompt, tokens, ignore_eos=True)


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
        blocks=st.integers(2, 9),
        block_tokens=st.integers(1, 3),
        chunk_tokens=st.integers(0, 3),
    )
    def begin(self, attention: int, microbatches: int, prefill: int, **shape: int) -> None:
        topology = Topology(attention=attention, ffn=2, prefill=prefill, microbatches=microbatches)
        self.world = World(topology, **shape)
        self.oldest_A = [None] * attention

    def pick(self, data: st.DataObject, some: list[Any]) -> Any:
        return data.draw(st.sampled_from(some))

    @rule(prompt=st.lists(st.integers(0, 23), min_size=1, max_size=9), tokens=st.integers(1, 9), ignore=st.booleans())
    def submit(self, prompt: list[int], tokens: int, ignore: bool) -> None:
        room = self.world.blocks * self.world.block_tokens
        prompt = prompt[: room - 1]
        tokens = min(tokens, room - len(prompt))
        self.world.submit(f"r{len(self.world.asked)}", tuple(prompt), tokens, ignore_eos=ignore)

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = self.pick(data, list(self.world.asked))
        self.cancelled.add(name)
        self.world.cancel(name)

    @precondition(lambda self: self.world.to_abort())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(*self.pick(data, self.world.to_abort()))

    @precondition(lambda self: self.world.to_deliver())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.world.deliver(self.pick(data, self.world.to_deliver()))

    @precondition(lambda self: self.world.to_hear())
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        self.world.hear(self.pick(data, self.world.to_hear()))

    @precondition(lambda self: self.world.to_prefill())
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        self.world.prefill(self.pick(data, self.world.to_prefill()))

    @precondition(lambda self: self.world.to_land())
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.world.land(self.pick(data, self.world.to_land()))

    @precondition(lambda self: self.world.to_finish())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.finish(self.pick(data, self.world.to_finish()))

    @precondition(lambda self: self.world.to_finish())
    @rule(times=st.integers(1, 8))
    def all_goes_on(self, times: int) -> None:
        """Without this most examples would end before anybody has decoded much."""
        for _ in range(times):
            self.world.settle()
            if steps := self.world.to_finish():
                self.world.finish(steps[0])

    @invariant()
    def the_oldest_of_a_worker_keeps_its_seat_until_it_ends(self) -> None:
        for before in self.oldest_A:
            if before is not None:
                request, ticket = before
                assert request.ticket == ticket or request.state is State.ENDED
        oldest_A = self.world.oldest_A()
        self.oldest_A = [None if request is None else (request, request.ticket) for request in oldest_A]

    @invariant()
    def the_line_is_in_order_of_age(self) -> None:
        numbers = [request.number for request in self.world.batcher._waiting]
        assert numbers == sorted(numbers)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_out()
            self.world.check_end(self.cancelled)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
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
