"""Where the time of a target goes: parts that add up, by hand and as a law; what roles' spans took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.clock import WallClock
from afore.core.target import Target
from afore.core.topology import ATTENTION, FFN, SCHEDULER
from afore.core.trace import SPANS, SpanName, Tracer
from afore.tools.span_table import BETWEEN_LAYERS, BETWEEN_STEPS, LIFE, SpanTable, build, cut, kind_of, wall
from afore.tools.trace import main
from afore.tools.trace_files import open_directory

STEP = {step: index for index, step in enumerate(LIFE)}


def spans(*found: tuple[str, str, int, int]) -> list[tuple[int, int, int]]:
    return [(start, end, STEP[role, name]) for role, name, start, end in found]


def test_parts_of_a_target_by_hand() -> None:
    life = spans(
        (ATTENTION, "attention", 0, 10),
        (SCHEDULER, "plan", 15, 25),
        (ATTENTION, "a2f", 12, 20),  # two at once: the earlier step holds the target up
        (FFN, "experts", 30, 40),
        (FFN, "experts", 35, 55),  # the slower worker does
        (FFN, "reply", 41, 60),
        (ATTENTION, "reduce", 70, 80),
    )
    assert wall(life) == (0, 80)
    assert cut(life, 0, 80) == {
        "attention attention": 10,
        "wait for attention a2f": 2,
        "attention a2f": 8,
        "scheduler plan": 5,
        "wait for ffn experts": 5,
        "ffn experts": 25,
        "ffn reply": 5,
        "wait for attention reduce": 10,
        "attention reduce": 10,
    }


def test_a_target_without_both_ends_is_not_whole() -> None:
    assert wall(spans((ATTENTION, "attention", 0, 10))) is None
    assert wall(spans((ATTENTION, "reduce", 0, 10))) is None
    assert wall([]) is None


lengths = st.tuples(st.integers(0, 300), st.integers(0, 80), st.integers(0, len(LIFE) - 1))


@pytest.mark.slow
@given(st.lists(lengths, max_size=25), st.integers(1, 300))
def test_parts_add_up_to_the_wall(found: list[tuple[int, int, int]], end: int) -> None:
    parts = cut([(start, start + length, step) for start, length, step in found], 0, end)
    assert sum(parts.values()) == end
    assert all(length > 0 for length in parts.values())


def write(directory: Path, process: str, *found: tuple[SpanName, Target | None, int, int]) -> None:
    tracer = Tracer(process, WallClock(), directory)
    for name, target, start_us, end_us in found:
        tracer.span(name, target, start_us * 1000, end_us * 1000)
    tracer.close()


def a_run(directory: Path) -> None:
    first, second, next_step = Target(0, 0, 1), Target(1, 0, 1), Target(0, 0, 2)
    write(
        directory,
        "attention-0",
        ("attention", first, 0, 100), ("reduce", first, 180, 200),
        ("attention", second, 210, 300), ("reduce", second, 350, 400),
        ("sample", None, 400, 450),
        ("attention", next_step, 500, 600), ("reduce", next_step, 650, 700),
        ("attention", Target(1, 0, 2), 700, 800),
    )  # fmt: skip
    write(directory, "ffn-0", ("experts", first, 120, 170), ("copy", first, 0, 500))
    write(directory, "ffn-1", ("experts", first, 120, 180))


def table_of(directory: Path, **window: int) -> SpanTable:
    files, _ = open_directory(directory)
    return build(files, **window)


def test_a_run_by_hand(tmp_path: Path) -> None:
    a_run(tmp_path)
    table = table_of(tmp_path)
    assert table.targets == 3
    assert table.wall_p50_us == 200
    assert sum(row.share for row in table.parts) == pytest.approx(1)
    experts = next(row for row in table.parts if row.part == "ffn experts")
    assert (experts.targets, experts.p50_us, experts.kind) == (1, 60, "computes")
    assert experts.share == pytest.approx(60 / 590)
    assert not any("copy" in row.part for row in table.parts)  # it runs beside its target
    assert table.waiting_share == pytest.approx((20 + 50 + 50) / 590)
    assert table.gaps[BETWEEN_LAYERS] == {"count": 1, "p50_us": 10, "of_targets_wall": pytest.approx(10 / 590)}
    assert table.gaps[BETWEEN_STEPS]["p50_us"] == 100
    rows = {(row.role, row.span): row for row in table.roles}
    assert rows[FFN, "experts"].count == 2
    assert rows[FFN, "experts"].total_ms == pytest.approx(0.110)
    assert rows[FFN, "copy"].kind == "moves"
    assert [row.role for row in table.roles] == [ATTENTION] * 3 + [FFN] * 2


def test_only_what_is_within_the_window_counts(tmp_path: Path) -> None:
    a_run(tmp_path)
    table = table_of(tmp_path, since_ns=200_000, until_ns=460_000)
    assert table.targets == 1
    assert {(row.role, row.span) for row in table.roles} == {
        (ATTENTION, name) for name in ("attention", "reduce", "sample")
    }


def test_a_trace_without_targets_has_no_parts(tmp_path: Path) -> None:
    write(tmp_path, "prefill-0", ("prefill", None, 0, 5))
    table = table_of(tmp_path)
    assert (table.targets, table.parts, table.wall_p50_us) == (0, [], None)
    assert len(table.roles) == 1


def test_every_span_has_a_kind_and_every_step_is_a_span() -> None:
    assert {name for _, name in LIFE} <= set(SPANS)
    assert {kind_of(name) for name in SPANS} == {"computes", "moves", "waits"}


def test_the_command_shows_and_gives_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path)
    assert main(["summary", str(tmp_path), "--targets"]) == 0
    shown = capsys.readouterr().out
    for text in ("where the time of a target goes", "experts", BETWEEN_LAYERS, "spans by role", "wall of a target"):
        assert text in shown
    assert main(["summary", str(tmp_path), "--targets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["targets"]
    assert found["targets"] == 3
    assert sum(row["share"] for row in found["parts"]) == pytest.approx(1)
    assert main(["summary", str(tmp_path)]) == 0
    assert "where the time" not in capsys.readouterr().out
