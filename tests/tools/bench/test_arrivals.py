"""Arrival times and lengths: drawn, and read from a trace."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.tools.bench.arrivals import (
    LONGEST_S,
    Arrival,
    check_schedule,
    check_sizes,
    clip_lengths,
    draw_arrivals_s,
    parse_arrivals,
    read_arrivals,
)

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.1805900,91,16
"""


def test_a_trace_by_hand() -> None:
    found = parse_arrivals(AZURE.splitlines(), "hand")
    assert [arrival.context_tokens for arrival in found] == [374, 91, 396]  # by time, whatever the file's order
    assert [arrival.at_s for arrival in found] == pytest.approx([0, 1.5, 4.314579])
    assert found[-1].generated_tokens == 109


def test_only_the_first_requests_are_read() -> None:
    assert len(parse_arrivals(AZURE.splitlines(), "hand", most=2)) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        (AZURE + "yesterday,1,2\n", "line 5"),
        (AZURE + "2023-11-16 18:15:51,1,two\n", "line 5"),
        (AZURE + "2023-11-16 18:15:51,-1,2\n", "negative"),
        (AZURE + "2023-11-16 18:15:51,1\n", "line 5"),
        (AZURE + "2023-11-16 18:15:51+00:00,1,2\n", "line 5: some times have a time zone"),
        (AZURE + f"2023-11-16 18:15:51,{10**400},2\n", "line 5: more than"),
        (AZURE + f"2023-11-16 18:15:51,1,{'9' * 5000}\n", "line 5"),
    ],
)
def test_broken_traces_are_refused_by_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_arrivals(text.splitlines(), "hand")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_arrivals(str(tmp_path / "none.csv"))


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "excel.csv"
    path.write_bytes(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode())
    assert read_arrivals(str(path)) == parse_arrivals(AZURE.splitlines(), "hand")


@pytest.mark.parametrize("last_s", [LONGEST_S * 1.01, math.inf, math.nan, 1e300])
def test_a_schedule_of_years_is_refused(last_s: float) -> None:
    check_schedule("time-scale", LONGEST_S)
    with pytest.raises(ConfigError, match="time-scale: the last request would be due after"):
        check_schedule("time-scale", last_s)


def test_prompts_beyond_memory_are_refused_unless_the_server_cuts_them() -> None:
    huge = Arrival(at_s=0, context_tokens=999_999_999, generated_tokens=1)
    check_sizes([huge] * 32, max_model_len=4096, max_tokens=None)
    with pytest.raises(ConfigError, match="a prompt has 999999999 tokens"):
        check_sizes([huge], max_model_len=None, max_tokens=None)
    with pytest.raises(ConfigError, match="tokens in all"):
        check_sizes([huge] * 99, max_model_len=1_000_000, max_tokens=None)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert draw_arrivals_s(3, math.inf) == (0, 0, 0)


@pytest.mark.slow
@given(st.integers(1, 60), st.floats(0.01, 1e4), st.floats(0.1, 10), st.integers(0, 2**32))
def test_drawn_times_are_ordered_and_repeatable(count: int, rate: float, burstiness: float, seed: int) -> None:
    found = draw_arrivals_s(count, rate, burstiness=burstiness, seed=seed)
    assert len(found) == count
    assert found[0] == 0
    assert list(found) == sorted(found)
    assert found == draw_arrivals_s(count, rate, burstiness=burstiness, seed=seed)
    assert found[: count // 2] == draw_arrivals_s(count // 2, rate, burstiness=burstiness, seed=seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(burstiness: float) -> None:
    times = draw_arrivals_s(20_001, 5.0, burstiness=burstiness)
    gaps = [late - early for early, late in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    # A gamma distribution's squared coefficient of variation is 1/shape; a Poisson process has 1.
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


@pytest.mark.slow
@given(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(2, 5000), st.none() | st.integers(1, 5000))
def test_clipped_lengths_fit_and_are_not_cut_without_need(
    context: int, generated: int, longest: int, max_tokens: int | None
) -> None:
    arrival = Arrival(at_s=0, context_tokens=context, generated_tokens=generated)
    prompt, output = clip_lengths(arrival, max_model_len=longest, max_tokens=max_tokens)
    assert prompt >= 1
    assert output >= 1
    assert prompt + output <= longest
    assert prompt <= max(1, context)
    assert output <= max(1, generated)
    if max_tokens is not None:
        assert output <= max_tokens
    if context >= 1 and 1 <= generated <= (max_tokens or generated) and context + generated <= longest:
        assert (prompt, output) == (context, generated)


@pytest.mark.slow
def test_azures_traces_are_read_whole() -> None:
    path = Path(__file__).resolve().parents[4] / "shared/data/arrivals/azure2023_conv.csv"
    if not path.exists():
        pytest.skip("Azure's trace is no part of the repository, and there is no folder shared/data beside it")
    assert len(read_arrivals(str(path))) == 19_366
