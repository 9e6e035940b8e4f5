"""Experts by token in files beside a recording: joined, where files are short said, where they are wrong refused."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afore.core.demand import count_demand
from afore.core.target import Target
from afore.scheduler.traces import Event, TraceError, TraceHeader, TraceReader, TraceTarget, TraceWriter, beside
from afore.scheduler.traces.beside import ids_path

E, K, L, M = 6, 2, 2, 3
HEADER = TraceHeader(experts=E, layers=L, top_k=K, microbatches=M)


def ids_of(target: Target, rank: int, rows: int) -> NDArray[Any]:
    rng = np.random.default_rng([target.step, target.layer, target.microbatch, rank])
    return rng.integers(0, E, (rows, K), dtype=np.int32)


def row_of(target: Target, *parts: NDArray[Any]) -> TraceTarget:
    ids_TK = np.concatenate(parts)
    return TraceTarget(target=target, demand_E=count_demand(ids_TK, E), tokens=len(ids_TK), ids_TK=ids_TK)


def write(path: Path, rows: list[TraceTarget], header: TraceHeader = HEADER) -> None:
    with TraceWriter(path, header, rows=2, compress=False) as out:
        for row in rows:
            out.add(row)


def run_of(folder: Path, steps: int = 3, workers: int = 2) -> tuple[Path, dict[Target, NDArray[Any]]]:
    """A recording and its workers' files; targets of step 1 of microbatch 1 were aborted after layer 0."""
    file = folder / "run.trace.npz"
    told: dict[Target, NDArray[Any]] = {}
    targets = [Target(layer, m, step) for step in range(steps) for layer in range(L) for m in range(M)]
    rows = []
    for target in targets:
        parts = [ids_of(target, rank, 1 + rank) for rank in range(workers)]
        if (target.microbatch, target.step, target.layer) != (1, 1, 1):
            told[target] = np.concatenate(parts)
            rows.append(dataclasses.replace(row_of(target, *parts), ids_TK=None))
    write(file, rows, dataclasses.replace(HEADER, ids_files=workers))
    for rank in range(workers):
        mine = sorted(targets, key=lambda target: (target.step, -target.microbatch, target.layer))
        write(ids_path(file, rank), [row_of(target, ids_of(target, rank, 1 + rank)) for target in mine])
    return file, told


def test_names() -> None:
    assert ids_path("a/run.trace.npz", 0) == Path("a/run.trace.attention-0.npz")
    assert ids_path("run", 12) == Path("run.attention-12.npz")


def test_workers_rows_are_joined_by_rank_then_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, told = run_of(tmp_path)
    reader = TraceReader(file)
    for _ in range(2):
        rows = list(reader)
        assert [row.target for row in rows] == list(told)
        for row in rows:
            assert row.ids_TK is not None
            assert row.ids_TK.dtype == np.int32
            np.testing.assert_array_equal(row.ids_TK, told[row.target])
    assert (reader.notes, caplog.records) == ([], [])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_order_microbatches_come_in_and_whoever_takes_part(data: st.DataObject) -> None:
    """Any interleaving of microbatches, any share of the rows, none included; targets that were never planned; one pass."""
    draw, workers = data.draw, 3
    interleaved = st.permutations([m for m in range(M) for _ in range(4)])

    def in_order(order: list[int]) -> list[Target]:
        next_M = dict.fromkeys(range(M), 0)
        targets = []
        for m in order:
            targets.append(Target(next_M[m] % L, m, next_M[m] // L))
            next_M[m] += 1
        return targets

    targets = in_order(draw(interleaved))
    rows_A = {target: draw(st.tuples(*[st.integers(0, 2)] * workers).filter(any)) for target in targets}
    aborted = draw(st.sets(st.sampled_from(targets)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.npz"
        parts = {t: [ids_of(t, rank, count) for rank, count in enumerate(rows_A[t])] for t in targets}
        planned = [dataclasses.replace(row_of(t, *parts[t]), ids_TK=None) for t in targets if t not in aborted]
        write(file, planned, dataclasses.replace(HEADER, ids_files=workers))
        for rank in range(workers):
            mine = [t for t in in_order(draw(interleaved)) if rows_A[t][rank]]
            write(ids_path(file, rank), [row_of(t, parts[t][rank]) for t in mine])
        reader = TraceReader(file)
        for row in reader:
            assert row.ids_TK is not None
            np.testing.assert_array_equal(row.ids_TK, np.concatenate(parts[row.target]))
        assert reader.notes == []


def test_a_target_that_is_asked_for_again_has_its_experts_again(tmp_path: Path) -> None:
    file, told = run_of(tmp_path, steps=1)
    rows = list(TraceReader(file))
    bare = [dataclasses.replace(row, ids_TK=None) for row in rows]
    withdrawn = TraceTarget(target=bare[0].target, event=Event.WITHDRAWN)
    write(file, [bare[0], withdrawn, bare[0], *bare[1:]], dataclasses.replace(HEADER, ids_files=2))
    found = list(TraceReader(file))
    assert len(found) == len(rows) + 1
    for row in found:
        assert row.ids_TK is not None
        np.testing.assert_array_equal(row.ids_TK, told[row.target])


def test_a_copy_of_a_joined_trace_needs_no_files_beside_it(tmp_path: Path) -> None:
    file, told = run_of(tmp_path)
    reader = TraceReader(file)
    write(tmp_path / "copy.npz", list(reader), reader.header)
    copy = TraceReader(tmp_path / "copy.npz")
    assert {row.target: row.ids_TK is not None for row in copy} == dict.fromkeys(told, True)
    assert len(copy.notes) == 2, "they would be joined if rows lacked some"


def test_files_that_no_header_speaks_of_are_left_alone(tmp_path: Path) -> None:
    file, _ = run_of(tmp_path)
    bare = [dataclasses.replace(row, ids_TK=None) for row in TraceReader(file)]
    write(file, bare)
    assert all(row.ids_TK is None for row in TraceReader(file))


def test_a_file_that_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, _ = run_of(tmp_path)
    ids_path(file, 1).rename(tmp_path / "run.trace.attention-1.npz.partial")
    reader = TraceReader(file)
    for _ in range(2):
        assert all(row.ids_TK is None for row in reader)
    missing = f"{ids_path(file, 1)}: it is not there; run.trace.attention-1.npz.partial is, which --partial reads; "
    assert reader.notes == [missing + "targets with rows of this worker are without their tokens' experts"]
    assert [record.getMessage() for record in caplog.records] == reader.notes
    counts = TraceReader(file, ids=False)
    assert all(row.ids_TK is None for row in counts)
    assert counts.notes == [], "who wants no experts hears of none"
    partial = TraceReader(file, partial=True)
    assert all(row.ids_TK is not None for row in partial)


def test_a_file_that_is_cut_off_is_said_and_used_as_far_as_it_is_whole(tmp_path: Path) -> None:
    file, told = run_of(tmp_path)
    torn = ids_path(file, 0)
    whole = torn.read_bytes()
    torn.write_bytes(whole[: len(whole) // 2])
    reader = TraceReader(file)
    rows = list(reader)
    known = [row for row in rows if row.ids_TK is not None]
    assert 0 < len(known) < len(rows) == len(told)
    for row in known:
        assert row.ids_TK is not None
        np.testing.assert_array_equal(row.ids_TK, told[row.target])
    (note,) = reader.notes
    assert note.startswith(f"{torn}: it is cut off after ")


def test_a_whole_file_with_fewer_targets_is_said(tmp_path: Path) -> None:
    file, told = run_of(tmp_path)
    short = ids_path(file, 0)
    rows = list(TraceReader(short))
    write(short, rows[:6])
    reader = TraceReader(file)
    have = {row.target for row in reader if row.ids_TK is not None}
    assert have == {row.target for row in rows[:6]} & told.keys()
    (note,) = reader.notes
    assert note.endswith("experts of 2 of its 3 tokens are beside it; it and others like it are without")


def test_one_that_is_further_ahead_than_is_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: what is too far ahead is said to be missing, and later targets are found all the same."""
    file, told = run_of(tmp_path)
    mine = sorted(
        TraceReader(ids_path(file, 0)), key=lambda row: (-row.target.microbatch, row.target.step, row.target.layer)
    )
    write(ids_path(file, 0), mine)
    assert all(row.ids_TK is not None for row in TraceReader(file))
    monkeypatch.setattr(beside, "LOOKAHEAD", 3)
    reader = TraceReader(file)
    assert 0 < sum(row.ids_TK is not None for row in reader) < len(told)
    assert len(reader.notes) == 1


def test_experts_that_are_not_the_counts_are_refused_with_file_and_row(tmp_path: Path) -> None:
    file, _ = run_of(tmp_path)
    rows = list(TraceReader(ids_path(file, 1)))
    at = next(number for number, row in enumerate(rows) if row.target == Target(1, 0, 0))
    other_TK = rows[at].ids_TK
    assert other_TK is not None
    rows[at] = row_of(rows[at].target, (other_TK + 1) % E)
    write(ids_path(file, 1), rows)
    with pytest.raises(TraceError) as refused:
        list(TraceReader(file))
    assert str(refused.value).startswith(
        f"{file}: row 3: its experts by token, of run.trace.attention-0.npz, run.trace.attention-1.npz, are not its counts; "
    )
    assert (refused.value.path, refused.value.row) == (str(file), 3)


@pytest.mark.parametrize("what", ["a bit", "order", "no ids", "another run"])
def test_a_file_that_cannot_be_is_refused_by_its_name(tmp_path: Path, what: str) -> None:
    file, _ = run_of(tmp_path)
    bad = ids_path(file, 0)
    rows, header = list(TraceReader(bad)), HEADER
    if what == "order":
        rows[0], rows[1] = rows[1], rows[0]
    elif what == "no ids":
        rows[0] = dataclasses.replace(rows[0], ids_TK=None)
    elif what == "another run":
        header = dataclasses.replace(HEADER, model="another")
    write(bad, rows, header)
    if what == "a bit":
        data = bytearray(bad.read_bytes())
        data[data.index(b"000000.ids.npy") + 14 + 128] ^= 1
        bad.write_bytes(data)
    why = {
        "a bit": "000000.ids.npy is damaged: its checksum differs",
        "order": "row 1: l0/m2/s0 after a later one",
        "no ids": "row 0: without experts by token",
        "another run": "it is of another run than run.trace.npz: its model is 'another', not ''",
    }[what]
    with pytest.raises(TraceError) as refused:
        list(TraceReader(file))
    assert str(refused.value).startswith(f"{bad}: {why}")
