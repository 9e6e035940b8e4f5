"""The batcher against a little world that delivers its messages in any order that real channels could."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core import control
from afore.core.topology import ATTENTION, PREFILL, SCHEDULER, Topology
from afore.serving.batching import CLIENT, Batcher, State

EOS = 2


class World:
    """Roles and clients: one FIFO of messages to each role and one back, delivered when the test says so."""

    def __init__(self, topology: Topology, capacity: int, blocks: int) -> None:
        self.topology = topology
        self.capacity = capacity
        self.batcher = Batcher(topology, max_tokens_per_worker=capacity, eos_ids=frozenset({EOS}))
        self.queues: dict[tuple[str, int], deque[control.Message]] = {}
        """To each role."""
        self.answers: dict[tuple[str, int], deque[control.Message]] = {}
        """From each role."""
        self.refused_A = [False] * topology.attention
        """Whether a worker has refused since it last said that there is room."""
        self.free_A = [blocks] * topology.attention
        self.held: dict[int, tuple[int, str]] = {}
        """request → (attention, 'held' | 'quarantined')"""
        self.in_step: dict[tuple[int, int], control.StepWork] = {}
        """(attention, microbatch) → the step it computes now"""
        self.flying: list[int] = []
        """Requests whose prefill has written all their KV, which has not landed."""
        self.landed: set[int] = set()
        self.events: dict[str, list[control.Message]] = {}
        self.announced: dict[tuple[int, int], tuple[int, ...]] = {}
        self.pull()

    def pull(self) -> None:
        for destination, message in self.batcher.drain():
            if destination[0] == CLIENT:
                assert isinstance(message, control.TokenOut | control.Finished | control.Failed)
                self.events.setdefault(message.request, []).append(message)
            elif destination[0] == SCHEDULER:
                assert isinstance(message, control.Announce)
                key = (message.microbatch, message.step)
                assert key not in self.announced, "a step number is never used twice"
                self.announced[key] = message.tokens_A
                assert any(message.tokens_A)
                assert all(0 <= tokens <= self.capacity for tokens in message.tokens_A)
            else:
                self.queues.setdefault(destination, deque()).append(message)

    def ready(self) -> list[tuple[str, int]]:
        """Roles with a message before them."""
        return [destination for destination, queue in self.queues.items() if queue]

    def talking(self) -> list[tuple[str, int]]:
        """Roles with a message under way to the engine."""
        return [source for source, queue in self.answers.items() if queue]

    def answer(self, source: tuple[str, int], message: control.Message) -> None:
        self.answers.setdefault(source, deque()).append(message)

    def deliver(self, destination: tuple[str, int], token: int) -> None:
        """Hands the oldest message of a role to it."""
        message = self.queues[destination].popleft()
        attention = destination[1]
        if isinstance(message, control.Reserve):
            assert message.request not in self.held
            blocks: tuple[int, ...] = ()
            if self.free_A[attention] > 0:
                self.free_A[attention] -= 1
                blocks = (1,)
                self.held[message.request] = (attention, "held")
            else:
                self.refused_A[attention] = True
            self.answer(destination, control.Reserved(message.request, blocks))
        elif isinstance(message, control.Release):
            self.release(message)
        elif isinstance(message, control.StepWork):
            key = (attention, message.microbatch)
            assert key not in self.in_step, "one step of a microbatch at a time on a worker"
            assert len(message.rows) == self.announced[message.microbatch, message.step][attention]
            for row in message.rows:
                assert self.held[row.request] == (attention, "held")
                assert row.request in self.landed
            self.in_step[key] = message
        elif isinstance(message, control.CancelStep):
            work = self.in_step.get((attention, message.microbatch))
            if work is not None and work.step == message.step:
                del self.in_step[attention, message.microbatch]
        elif isinstance(message, control.PrefillWork):
            assert self.held[message.request][0] == message.attention
            self.flying.append(message.request)
            self.answer(destination, control.PrefillDone(message.request, token))

    def hear(self, source: tuple[str, int]) -> None:
        """Hands the oldest message of a role to the engine."""
        message = self.answers[source].popleft()
        if isinstance(message, control.Reserved):
            self.batcher.reserved(source[1], message)
        elif isinstance(message, control.StepDone):
            self.batcher.step_done(source[1], message)
        elif isinstance(message, control.Room):
            self.batcher.room(source[1])
        elif isinstance(message, control.KvReady):
            self.batcher.kv_ready(message)
        else:
            assert isinstance(message, control.PrefillDone)
            self.batcher.prefill_done(message)
        self.pull()

    def release(self, message: control.Release) -> None:
        if message.request not in self.held:
            return
        attention, state = self.held[message.request]
        assert state == "held", "released twice"
        for (worker, _), work in self.in_step.items():
            if worker == attention:
                assert message.request not in {row.request for row in work.rows}, "released while a step may write"
        if message.quarantine and message.request not in self.landed:
            self.held[message.request] = (attention, "quarantined")
            return
        assert message.request not in self.flying, "its blocks would be given out while writes into them are under way"
        del self.held[message.request]
        self.free_A[attention] += 1

    def land(self, request: int) -> None:
        """The request's KV is complete on its attention worker."""
        self.flying.remove(request)
        self.landed.add(request)
        attention, state = self.held[request]
        if state == "held":
            self.answer((ATTENTION, attention), control.KvReady(request))
        else:
            del self.held[request]
            self.free_A[attention] += 1
            if self.refused_A[attention]:
                self.refused_A[attention] = False
                self.answer((ATTENTION, attention), control.Room())

    def finish_step(self, key: tuple[int, int], token: int) -> None:
        work = self.in_step.pop(key)
        done = control.StepDone(work.microbatch, work.step, (token,) * len(work.rows))
        self.answer((ATTENTION, key[0]), done)

    def settle(self, token: int = 7) -> None:
        """Delivers until only steps are left to be computed."""
        for _ in range(100_000):
            if ready := self.ready():
                self.deliver(ready[0], token)
            elif self.flying:
                self.land(self.flying[0])
            elif talking := self.talking():
                self.hear(talking[0])
            else:
                return
        raise AssertionError("messages without end")

    def run_out(self) -> None:
        """Delivers until nothing is left to do."""
        for _ in range(100_000):
            self.settle()
            if not self.in_step:
                return
            self.finish_step(next(iter(self.in_step)), 7)
        raise AssertionError("the batcher never comes to rest")


def submit(world: World, name: str, *, tokens: int = 4, ignore_eos: bool = False) -> None:
    world.batcher.submit(0, control.Submit(name, "", (5, 6, 7), tokens, ignore_eos, control.Sampling()))
    world.pull()


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    attention=st.integers(1, 3),
    microbatches=st.integers(1, 3),
    capacity=st.integers(1, 3),
    blocks=st.integers(1, 4),
)
def test_any_order_of_events_serves_everybody(
    data: st.DataObject, attention: int, microbatches: int, capacity: int, blocks: int
) -> None:
    world = World(Topology(attention=attention, ffn=2, prefill=2, microbatches=microbatches), capacity, blocks)
    names: list[str] = []
    cancelled: set[str] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        ready, talking, steps = world.ready(), world.talking(), list(world.in_step)
        choices = ["submit", "cancel", "abort", *["deliver"] * 4, *["hear"] * 4, *["land"] * 2, *["step"] * 4]
        choice = data.draw(st.sampled_from(choices))
        token = data.draw(st.sampled_from([7, 8, EOS]))
        if choice == "submit":
            names.append(f"r{len(names)}")
            submit(world, names[-1], tokens=data.draw(st.integers(1, 5)), ignore_eos=data.draw(st.booleans()))
        elif choice == "cancel" and names:
            name = data.draw(st.sampled_from(names))
            cancelled.add(name)
            world.batcher.cancel(0, name)
            world.pull()
        elif choice == "abort" and steps:
            _, microbatch = data.draw(st.sampled_from(steps))
            step = next(w.step for (_, m), w in world.in_step.items() if m == microbatch)
            world.batcher.step_aborted(control.StepAborted(microbatch, step, 0))
            world.pull()
        elif choice == "deliver" and ready:
            world.deliver(data.draw(st.sampled_from(ready)), token)
        elif choice == "hear" and talking:
            world.hear(data.draw(st.sampled_from(talking)))
        elif choice == "land" and world.flying:
            world.land(data.draw(st.sampled_from(world.flying)))
        elif choice == "step" and steps:
            world.finish_step(data.draw(st.sampled_from(steps)), token)
    world.run_out()
    assert world.held == {}
    assert world.free_A == [blocks] * attention
    assert world.batcher.live == []
    for name in names:
        events = world.events.get(name, [])
        tokens = [e for e in events if isinstance(e, control.TokenOut)]
        assert [t.index for t in tokens] == list(range(len(tokens)))
        ends = [e for e in events if isinstance(e, control.Finished)]
        assert len(ends) == 1 or name in cancelled
        if ends:
            assert events[-1] is ends[0]
            assert ends[0].generated_tokens == len(tokens)


def test_rows_carry_the_last_token_and_its_position() -> None:
    world = World(Topology(attention=1, ffn=1, microbatches=1), capacity=2, blocks=4)
    submit(world, "a", tokens=3)
    world.settle(token=11)
    assert world.in_step[0, 0].rows == (control.Row(request=0, token=11, position=3),)


def test_an_aborted_step_comes_again_with_the_same_rows() -> None:
    world = World(Topology(attention=2, ffn=1, prefill=2, microbatches=1), capacity=2, blocks=4)
    submit(world, "a", tokens=3)
    submit(world, "b", tokens=3)
    world.settle(token=11)
    while (0, 0) not in world.in_step or (1, 0) not in world.in_step:
        world.finish_step(next(iter(world.in_step)), 7)
        world.settle()
    before = {key: work.rows for key, work in world.in_step.items()}
    step = world.in_step[0, 0].step
    world.batcher.step_aborted(control.StepAborted(0, step, 1))
    world.pull()
    world.settle()
    assert {key: work.rows for key, work in world.in_step.items()} == before
    assert world.in_step[0, 0].step == step + 1


def test_first_token_that_ends_the_request_never_joins() -> None:
    world = World(Topology(attention=1, ffn=1, microbatches=1), capacity=2, blocks=4)
    submit(world, "a", tokens=3)
    world.settle(token=EOS)
    assert world.announced == {}
    assert world.held == {}


@pytest.mark.parametrize("why", ["first token ends it", "cancelled after its first token", "cancelled before"])
def test_blocks_into_which_prefill_may_still_write_are_quarantined(why: str) -> None:
    """Prefill's report comes over another way than its writes, and may overtake them."""
    world = World(Topology(attention=1, ffn=1, microbatches=1), capacity=2, blocks=1)
    submit(world, "a", tokens=3)
    world.deliver((ATTENTION, 0), 0)
    world.hear((ATTENTION, 0))
    world.deliver((PREFILL, 0), EOS if why == "first token ends it" else 7)
    if why != "cancelled before":
        world.hear((PREFILL, 0))
    world.batcher.cancel(0, "a")
    submit(world, "b", tokens=1)
    while world.ready():
        world.deliver(world.ready()[0], 7)
    assert world.held == {0: (0, "quarantined")}
    assert world.refused_A == [True]
    world.run_out()
    assert [type(event) for event in world.events["b"]] == [control.TokenOut, control.Finished]


def test_a_refusal_that_crosses_a_release_is_asked_again() -> None:
    world = World(Topology(attention=1, ffn=1, microbatches=1), capacity=2, blocks=1)
    submit(world, "a", tokens=2)
    world.settle()
    submit(world, "b", tokens=1)
    world.deliver((ATTENTION, 0), 0)
    world.finish_step((0, 0), 7)
    refusal, done = world.answers[ATTENTION, 0]
    assert refusal == control.Reserved(1, ())
    world.answers[ATTENTION, 0] = deque([done, refusal])
    world.run_out()
    assert [type(event) for event in world.events["b"]] == [control.TokenOut, control.Finished]


def test_a_request_joins_only_with_both_token_and_kv() -> None:
    topology = Topology(attention=1, ffn=1, microbatches=1)
    batcher = Batcher(topology, max_tokens_per_worker=2, eos_ids=frozenset({EOS}))
    request = batcher.submit(0, control.Submit("a", "", (1,), 3, False, control.Sampling()))
    batcher.reserved(0, control.Reserved(request.number, (0,)))
    batcher.prefill_done(control.PrefillDone(request.number, 9))
    states = [request.state]
    batcher.kv_ready(control.KvReady(request.number))
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
