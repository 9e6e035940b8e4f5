"""Ranks of roles started by hand: however their steps interleave, nobody shares one, and the dead hold none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.serving.ranks import FREE, Claim, CompareAndSet, claiming, releasing


class Cells:
    """What the rendezvous does with a step."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def do(self, step: CompareAndSet) -> str:
        if self.held.get(step.rank, FREE) == step.expected:
            self.held[step.rank] = step.desired
        return self.held.get(step.rank, FREE)


class Racer:
    """One process that asks for a rank, a step at a time."""

    def __init__(self, name: str, size: int, wanted: int | None, dead: set[str]) -> None:
        self.name = name
        self._machine = claiming("ffn", size, wanted, name, lambda holder: holder not in dead)
        self._answer: str | None = None
        self.claim: Claim | None = None
        self.refused = False

    @property
    def done(self) -> bool:
        return self.claim is not None or self.refused

    def step(self, cells: Cells) -> None:
        try:
            step = next(self._machine) if self._answer is None else self._machine.send(self._answer)
            self._answer = cells.do(step)
        except StopIteration as done:
            self.claim = done.value
        except ConfigError:
            self.refused = True


@given(
    size=st.integers(1, 4),
    wants=st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=1, max_size=6),
    turns=st.lists(st.integers(0, 5), max_size=60),
    deaths=st.sets(st.integers(0, 5), max_size=3),
)
def test_whatever_the_order_of_steps_no_two_that_live_share_a_rank(
    size: int, wants: list[int | None], turns: list[int], deaths: set[int]
) -> None:
    cells, dead = Cells(), set[str]()
    racers = [Racer(f"p{i}", size, wanted, dead) for i, wanted in enumerate(wants)]
    for number, turn in enumerate([*turns, *list(range(len(racers))) * (4 * size + 4)]):
        racer = racers[turn % len(racers)]
        if racer.name in dead or racer.done:
            continue
        racer.step(cells)
        if number % 7 == 0 and turn in deaths:
            dead.add(racer.name)
    living = [racer for racer in racers if racer.name not in dead]
    assert all(racer.done for racer in living)
    taken = [racer.claim.rank for racer in living if racer.claim is not None]
    assert len(taken) == len(set(taken))
    assert all(cells.held[r.claim.rank] == r.name for r in living if r.claim is not None)
    # Nobody without a wish is refused while a rank is held by nobody that lives.
    if any(racer.refused and wanted is None for racer, wanted in zip(racers, wants, strict=True) if racer in living):
        everybody = {racer.name for racer in racers}
        assert all(cells.held.get(rank, FREE) in everybody for rank in range(size))


def take(cells: Cells, me: str, wanted: int | None = None, dead: frozenset[str] = frozenset()) -> Claim:
    machine = claiming("ffn", 2, wanted, me, lambda holder: holder not in dead)
    answer: str | None = None
    while True:
        try:
            answer = cells.do(next(machine) if answer is None else machine.send(answer))
        except StopIteration as done:
            claim: Claim = done.value
            return claim


def test_ranks_are_taken_in_order_and_refused_by_name() -> None:
    cells = Cells()
    assert [take(cells, "a"), take(cells, "b")] == [Claim(0, FREE), Claim(1, FREE)]
    with pytest.raises(ConfigError, match=r"all 2 ffn ranks of the topology are taken; raise topology\.ffn"):
        take(cells, "c")
    with pytest.raises(ConfigError, match="ffn-1 is taken"):
        take(cells, "c", 1)
    with pytest.raises(ConfigError, match="ffn has ranks 0 to 1, not 2"):
        take(cells, "c", 2)


def test_a_dead_holder_is_replaced_and_a_released_rank_is_free() -> None:
    cells = Cells()
    take(cells, "a")
    second = take(cells, "b")
    assert take(cells, "c", dead=frozenset({"a"})) == Claim(0, "a")
    cells.do(releasing(second, "b"))
    assert take(cells, "d") == Claim(1, FREE)
    cells.do(releasing(second, "b"))
    assert cells.held[1] == "d", "a late release takes nobody else's rank"
