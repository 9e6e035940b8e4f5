"""The arithmetic of an interleaved comparison."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.tools.bench.ab import Outcome, compare, decode_part, equal_requests, turns


def outcome(
    wall_s: float, tokens: list[list[int]], *, decode: tuple[int, float] = (10, 1.0), cpu_s: float = 1.0
) -> Outcome:
    return Outcome(
        wall_s=wall_s, tokens=tuple(map(tuple, tokens)), decode_tokens=decode[0], decode_s=decode[1], cpu_s=cpu_s
    )


def test_a_comparison_by_hand() -> None:
    same, other = [[1, 2, 3], [4]], [[1, 2, 9], [4]]
    rounds = [
        {"ours": outcome(1, same, cpu_s=2), "theirs": outcome(2, same)},
        {"ours": outcome(1, other, cpu_s=4), "theirs": outcome(3, same)},
        {"ours": outcome(4, same, cpu_s=8), "theirs": outcome(1, same)},
    ]
    found = compare(rounds, "theirs")
    assert found["ours"]["rounds"] == [4, 4, 1]
    assert found["ours"]["tokens_per_second"] == 4
    assert found["theirs"]["tokens_per_second"] == 2
    # The median of the rounds' ratios, not the ratio of the medians (which is 2 too here only by its own luck).
    assert found["ours"]["ratio"] == {"median": 2, "min": 0.25, "max": 3, "rounds": [2, 3, 0.25]}
    assert found["ours"]["equal_requests"] == 1
    assert found["ours"]["cpu_s_per_1000_tokens"] == 1000
    assert "ratio" not in found["theirs"]


def test_decoding_is_what_came_after_the_last_first_token() -> None:
    s = 10**9
    assert decode_part([[0, 2 * s, 5 * s], [1 * s, 3 * s]]) == (3, 4.0)
    assert decode_part([[7 * s]]) == (0, 0.0)
    assert outcome(1, [[1]], decode=(0, 0.0)).decode_tokens_per_second is None
    assert "decode_tokens_per_second" not in compare([{"a": outcome(1, [[1]], decode=(0, 0.0))}], "a")["a"]


def test_requests_are_equal_to_the_last_token() -> None:
    assert equal_requests(outcome(1, [[1, 2], [3], [4]]), outcome(1, [[1, 2], [3, 5], [9]])) == 1


def test_no_round_is_refused() -> None:
    with pytest.raises(ValueError, match="no round"):
        compare([], "theirs")


@given(st.integers(1, 6))
def test_everybody_is_first_equally_often(count: int) -> None:
    names = [f"side {index}" for index in range(count)]
    orders = [turns(names, round_) for round_ in range(count * 3)]
    assert all(sorted(order) == names for order in orders)
    assert {sum(order[0] == name for order in orders) for name in names} == {3}
