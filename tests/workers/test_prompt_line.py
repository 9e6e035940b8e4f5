"""Whose chunk is next: nobody starves, short prompts are soon done, memory is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afore.core import control
from afore.workers.prompt_line import PromptLine


def work(request: int, length: int) -> control.PrefillWork:
    return control.PrefillWork(request, tuple(range(length)), 0, (0,), control.Sampling())


def order(line: PromptLine) -> list[int]:
    """The requests whose chunks run until the line is empty."""
    turns = []
    while (turn := line.next()) is not None:
        turns.append(turn[0].work.request)
    return turns


def test_equal_prompts_run_one_after_another_as_they_came() -> None:
    line = PromptLine(4)
    for request in (3, 1, 2):
        line.add(work(request, 4))
    assert order(line) == [3, 1, 2]


def test_without_chunks_every_prompt_is_one() -> None:
    line = PromptLine(0)
    line.add(work(1, 1000))
    line.add(work(2, 3))
    assert order(line) == [1, 2]


def test_short_prompts_and_the_oldest_take_turns() -> None:
    line = PromptLine(10)
    line.add(work(0, 60))
    for request in (1, 2, 3):
        line.add(work(request, 10))
    assert order(line) == [0, 1, 0, 2, 0, 3, 0, 0, 0]


def test_a_dropped_prompt_runs_no_further() -> None:
    line = PromptLine(1)
    line.add(work(0, 5))
    line.add(work(1, 2))
    line.next()
    assert line.drop(0) is not None
    assert line.drop(0) is None
    assert order(line) == [1, 1]


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=20),
    chunk=st.integers(0, 6),
    most_open=st.integers(1, 4),
    drops=st.sets(st.integers(0, 19)),
)
def test_everybody_is_served_within_bounds_and_in_order(
    arrivals: list[tuple[int, int]], chunk: int, most_open: int, drops: set[int]
) -> None:
    """``arrivals``: (turns since the one before, tokens)."""
    line = PromptLine(chunk, most_open=most_open)
    chunks_left: dict[int, int] = {}
    ran: dict[int, list[int]] = {}
    served_since_oldest = 0
    oldest = -1

    def turn() -> bool:
        nonlocal served_since_oldest, oldest
        if oldest not in chunks_left:
            served_since_oldest = 0
        oldest = next(iter(chunks_left), -1)
        taken = line.next()
        if taken is None:
            return False
        prompt, tokens = taken
        request = prompt.work.request
        ran[request].extend(tokens)
        served_since_oldest = 0 if request == oldest else served_since_oldest + 1
        assert served_since_oldest < 2, "the oldest has every second chunk"
        chunks_left[request] -= 1
        if not chunks_left[request]:
            del chunks_left[request]
        assert line.num_open <= most_open
        return True

    for request, (wait, length) in enumerate(arrivals):
        for _ in range(wait):
            turn()
        line.add(work(request, length))
        chunks_left[request] = -(-length // (chunk or length))
        ran[request] = []
        if request - 1 in drops and line.drop(request - 1) is not None:
            del chunks_left[request - 1]
    while turn():
        pass
    assert chunks_left == {}
    assert len(line) == line.num_open == 0
    for request, tokens in ran.items():
        assert tokens == list(range(arrivals[request][1]))[: len(tokens)]
        assert request in drops or len(tokens) == arrivals[request][1]
