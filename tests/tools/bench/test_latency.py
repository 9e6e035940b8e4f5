"""The figures of a serving benchmark, by hand and as laws."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.tools.bench.latency import (
    FORMULAS,
    UNFINISHED,
    Objectives,
    Record,
    parse_objectives,
    peak_concurrency,
    summarise,
)

MS = 1_000_000


def record(
    sent_ms: float, chunks_ms: list[float], *, tokens: int | None = None, ended_ms: float | None = None, **more: object
) -> Record:
    fields: dict[str, object] = {
        "index": 0,
        "due_ns": round(sent_ms * MS),
        "sent_ns": round(sent_ms * MS),
        "chunks_ns": tuple(round(at * MS) for at in chunks_ms),
        "ended_ns": round((ended_ms if ended_ms is not None else chunks_ms[-1] if chunks_ms else sent_ms) * MS),
        "prompt_tokens": 7,
        "output_tokens": len(chunks_ms) if tokens is None else tokens,
    }
    return Record(**{**fields, **more})  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    found = record(100, [150, 160, 180, 210])
    assert found.ttft_ms == 50
    assert found.e2e_ms == 110
    assert found.tpot_ms == 60 / 3  # (E2E - TTFT) / (n - 1)
    assert found.itls_ms == [10, 20, 30]


def test_chunks_with_several_tokens_count_tokens_in_tpot_and_chunks_in_itl() -> None:
    found = record(0, [10, 30], tokens=5)
    assert found.tpot_ms == 20 / 4
    assert found.itls_ms == [20]


def test_one_token_has_no_tpot_and_no_gap() -> None:
    found = record(0, [25])
    assert found.tpot_ms is None
    assert found.itls_ms == []
    assert found.ttft_ms == found.e2e_ms == 25


def test_a_run_by_hand() -> None:
    records = [
        record(0, [100, 200], prompt_tokens=10),
        record(50, [250, 350, 450], prompt_tokens=20, due_ns=40 * MS),
        record(60, [70], ended_ms=500, failure="HTTP 500: no", prompt_tokens=30),
        record(70, [80], ended_ms=500, failure=UNFINISHED),
    ]
    found = summarise(records, Objectives(ttft_ms=150))
    assert (found["requests"], found["completed"], found["failed"], found["unfinished"]) == (4, 2, 1, 1)
    assert found["failures"] == {"HTTP 500: no": 1}
    assert found["duration_s"] == 0.5
    assert found["requests_per_second"] == 4
    assert (found["input_tokens"], found["output_tokens"]) == (30, 5)
    assert found["output_tokens_per_second"] == 10
    assert found["total_tokens_per_second"] == 70
    assert found["ttft_ms"] == pytest.approx({"mean": 150, "p50": 150, "p90": 190, "p99": 199})
    assert found["tpot_ms"]["mean"] == 100
    assert found["itl_ms"] == pytest.approx({"mean": 100, "p50": 100, "p90": 100, "p99": 100})
    assert found["e2e_ms"]["p50"] == 300
    assert found["late_start_ms"]["mean"] == 2.5
    assert found["goodput"]["met"] == 1
    assert found["goodput"]["requests_per_second"] == 2
    assert found["peak_concurrency"] == 4


def test_what_was_not_measured_is_not_there() -> None:
    single = summarise([record(0, [5])])
    assert "tpot_ms" not in single
    assert "itl_ms" not in single
    assert "goodput" not in single
    nothing = summarise([record(0, [], ended_ms=3, failure="ConnectError")])
    assert "ttft_ms" not in nothing
    assert nothing["completed"] == 0
    assert nothing["output_tokens_per_second"] == 0
    assert summarise([record(3, [], failure="at once")])["requests_per_second"] is None
    with pytest.raises(ValueError, match="no request"):
        summarise([])


def test_goodput_asks_for_all_objectives_at_once() -> None:
    fast_start, slow_rest = record(0, [10, 110, 210]), record(0, [10, 20, 30])
    objectives = Objectives(ttft_ms=10, tpot_ms=50, e2e_ms=30)
    assert not objectives.met(fast_start)
    assert objectives.met(slow_rest)
    assert not objectives.met(dataclasses.replace(slow_rest, failure="cut off"))
    assert objectives.met(record(0, [10]))


def test_objectives_are_read_with_their_units() -> None:
    assert parse_objectives("ttft=500ms, tpot=0.05s,e2e=2s") == Objectives(ttft_ms=500, tpot_ms=50, e2e_ms=2000)
    for text, problem in (
        ("ttft=500", "is no objective"),
        ("itl=5ms", "is no objective"),
        ("ttft=1s,ttft=2s", "twice"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parse_objectives(text)


def test_one_that_ends_as_the_next_is_sent_is_not_beside_it() -> None:
    assert peak_concurrency([record(0, [10]), record(10, [20])]) == 1
    assert peak_concurrency([record(0, [11]), record(10, [20])]) == 2


def test_every_latency_has_its_formula() -> None:
    assert {"TTFT", "TPOT", "ITL", "E2E"} <= set(FORMULAS)


times = st.integers(0, 10**12)


@st.composite
def records(draw: st.DrawFn) -> Record:
    sent_ns = draw(times)
    chunks = tuple(sorted(draw(st.lists(st.integers(sent_ns, 2 * 10**12), max_size=12))))
    ended_ns = draw(st.integers(chunks[-1] if chunks else sent_ns, 3 * 10**12))
    failure = draw(st.sampled_from(["", "HTTP 500", UNFINISHED])) if chunks else "no token"
    return Record(
        index=0, due_ns=sent_ns, sent_ns=sent_ns, chunks_ns=chunks, ended_ns=ended_ns, prompt_tokens=draw(st.integers(0, 99)),
        output_tokens=len(chunks), failure=failure,
    )  # fmt: skip


@pytest.mark.slow
@given(st.lists(records(), min_size=1, max_size=20))
def test_laws_of_a_run(found: list[Record]) -> None:
    result = summarise(found, Objectives())
    assert result["completed"] + result["failed"] + result["unfinished"] == len(found)
    assert sum(result["failures"].values()) == result["failed"]
    assert result["goodput"]["met"] == result["completed"]
    assert 0 <= result["peak_concurrency"] <= len(found)
    if any(one.ended_ns > one.sent_ns for one in found):
        assert result["peak_concurrency"] >= 1
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        if name in result:
            row = result[name]
            assert 0 <= row["p50"] <= row["p90"] <= row["p99"]
    for one in found:
        assert sum(one.itls_ms) == pytest.approx((one.e2e_ms or 0) - (one.ttft_ms or 0), abs=1e-3)
        if one.tpot_ms is not None:
            assert one.tpot_ms * (one.output_tokens - 1) == pytest.approx(sum(one.itls_ms), abs=1e-3)
