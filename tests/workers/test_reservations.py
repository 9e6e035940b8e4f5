"""Reservations are answered in order, and only once their answer is certain."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core import control
from afore.models.kv import BlockAllocator
from afore.workers.kv_pool import KvPool, bell
from afore.workers.reservations import Reservations

GREEDY = control.Sampling()


def make(num_blocks: int) -> tuple[KvPool, Reservations]:
    pool = KvPool(BlockAllocator(num_blocks), block_tokens=1)
    return pool, Reservations(pool)


def ask(reservations: Reservations, request: int, tokens: int) -> list[tuple[int, int]]:
    """(request, blocks) of what is answered then."""
    reservations.ask(control.Reserve(request, tokens, GREEDY))
    return [(answer.request, len(answer.blocks)) for answer in reservations.answers()]


def test_room_is_given_and_the_lack_of_it_said_at_once() -> None:
    _, reservations = make(4)
    assert ask(reservations, 0, 3) == [(0, 3)]
    assert ask(reservations, 1, 2) == [(1, 0)]
    assert ask(reservations, 2, 1) == [(2, 1)]


def test_a_reservation_waits_for_released_blocks_and_holds_up_those_behind_it() -> None:
    pool, reservations = make(4)
    reservations.ask(control.Reserve(0, 3, GREEDY))
    (given,) = reservations.answers()
    pool.release(0, quarantine=True)
    assert ask(reservations, 1, 4) == []
    assert ask(reservations, 2, 1) == []
    assert pool.arrived(bell(given.blocks)) is None
    assert [(answer.request, len(answer.blocks)) for answer in reservations.answers()] == [(1, 4), (2, 0)]


def test_what_was_withdrawn_is_not_answered() -> None:
    pool, reservations = make(4)
    reservations.ask(control.Reserve(0, 3, GREEDY))
    (given,) = reservations.answers()
    pool.release(0, quarantine=True)
    assert ask(reservations, 1, 4) == []
    reservations.withdraw(1)
    assert ask(reservations, 2, 1) == [(2, 1)]
    pool.arrived(bell(given.blocks))
    assert reservations.answers() == []


@settings(max_examples=200)
@given(data=st.data(), num_blocks=st.integers(1, 6))
def test_every_reservation_is_answered_once_and_never_refused_while_released_blocks_would_do(
    data: st.DataObject, num_blocks: int
) -> None:
    pool, reservations = make(num_blocks)
    blocks: dict[int, tuple[int, ...]] = {}
    live: set[int] = set()
    owed: set[int] = set()
    """Released while prefill's writes are under way."""
    answered: list[int] = []

    def take_answers() -> None:
        for answer in reservations.answers():
            answered.append(answer.request)
            tokens = asked[answer.request]
            if answer.blocks:
                assert len(answer.blocks) == tokens
                blocks[answer.request] = answer.blocks
                live.add(answer.request)
            else:
                assert tokens > num_blocks - sum(len(blocks[request]) for request in live)

    asked: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["ask", "release", "land"]))
        if what == "ask":
            request = len(asked)
            asked[request] = data.draw(st.integers(1, num_blocks))
            reservations.ask(control.Reserve(request, asked[request], GREEDY))
        elif what == "release" and live:
            request = data.draw(st.sampled_from(sorted(live)))
            live.discard(request)
            owed.add(request)
            pool.release(request, quarantine=True)
        elif what == "land" and owed:
            request = data.draw(st.sampled_from(sorted(owed)))
            owed.discard(request)
            pool.arrived(bell(blocks[request]))
        take_answers()
    for request in sorted(owed):
        pool.arrived(bell(blocks[request]))
    take_answers()
    assert answered == sorted(asked)
