"""The internal form: what goes in comes out, whole or in part; what is damaged is refused with file, row and reason."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.errors import ConfigError, HostError
from afore.core.target import Target
from afore.scheduler.traces import Event, TraceError, TraceHeader, TraceReader, TraceTarget, TraceWriter, read
from afore.scheduler.traces import format as form
from afore.scheduler.traces.npy import array_of, bytes_of
from tests.scheduler.traces.trace_cases import headers, plain, rows_of

HEADER = TraceHeader(experts=4, layers=2, top_k=2, workers=2, slots=2, microbatches=2)


def written(path: Path, rows: int = 20, *, per_chunk: int = 4, compress: bool = False) -> list[TraceTarget]:
    """A trace of small chunks, and its rows."""
    made = rows_of(HEADER, rows, seed=3)
    with TraceWriter(path, HEADER, compress=compress, rows=per_chunk) as out:
        for row in made:
            out.add(row)
    return made


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    header=headers(),
    count=st.integers(0, 12),
    seed=st.integers(0, 99),
    compress=st.booleans(),
    per_chunk=st.integers(1, 5),
)
def test_what_is_written_is_read(header: TraceHeader, count: int, seed: int, compress: bool, per_chunk: int) -> None:
    rows = rows_of(header, count, seed)
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder) / "a.trace.npz", Path(folder) / "b.trace.npz"
        with TraceWriter(path, header, compress=compress, rows=per_chunk) as out:
            for row in rows:
                out.add(row)
        reader = TraceReader(path)
        assert reader.header == header
        assert [plain(row) for row in reader.events()] == [plain(row) for row in rows]
        assert reader.rows == count
        assert [plain(row) for row in read(path)[1]] == [plain(row) for row in rows if row.event is Event.DEMAND]
        with TraceWriter(other, header, compress=compress, rows=per_chunk) as again:
            for row in reader.events():
                again.add(row)
        assert again.digest == out.digest
        assert other.read_bytes() == path.read_bytes()


def test_numpy_opens_it_too(tmp_path: Path) -> None:
    rows = written(tmp_path / "t.npz", compress=True)
    with np.load(tmp_path / "t.npz", allow_pickle=False) as archive:
        first = archive["000000.rows"]
        assert first["step"].tolist() == [row.target.step for row in rows[:4]]
        assert json.loads(archive["end.json"])["rows"] == 20


def test_it_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with TraceWriter(path, HEADER) as out:
        assert os.listdir(tmp_path) == ["t.npz.partial"]
        out.abandon()
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyError), TraceWriter(path, HEADER):
        raise KeyError("meanwhile")
    assert os.listdir(tmp_path) == []
    path.write_bytes(b"before")
    out = TraceWriter(path, HEADER)
    assert path.read_bytes() == b"before"
    out.close()
    out.close()
    out.abandon()
    assert [*read(path)[1]] == []
    with pytest.raises(HostError, match="no trace can take its place"):
        TraceWriter("/dev/null", HEADER)
    assert not Path("/dev/null.partial").exists()
    with pytest.raises(HostError, match=r"nowhere.*cannot be written"):
        TraceWriter(tmp_path / "nowhere" / "t.npz", HEADER)


@pytest.mark.slow
def test_what_was_cut_off_anywhere_has_its_whole_chunks(tmp_path: Path) -> None:
    path, cut = tmp_path / "t.npz", tmp_path / "cut.npz"
    rows = [plain(row) for row in written(path)]
    data = path.read_bytes()
    end = data.index(b"end.json") - 30
    seen = set()
    for at in range(0, end, 61):
        cut.write_bytes(data[:at])
        try:
            reader = TraceReader(cut, partial=True)
            got = [plain(row) for row in reader.events()]
        except TraceError as error:
            assert "header" in str(error)  # noqa: PT017  # only a file without its header cannot be read at all
            continue
        assert got == rows[: len(got)]
        assert reader.cut_off
        assert len(got) % 4 == 0
        seen.add(len(got))
        with pytest.raises(TraceError, match=rf"cut\.npz: it is cut off after {len(got)} rows.*--partial"):
            list(TraceReader(cut).events())
    assert seen == {0, 4, 8, 12, 16}


@pytest.mark.slow
def test_any_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    path, bad = tmp_path / "t.npz", tmp_path / "bad.npz"
    rows = [plain(row) for row in written(path, 8)]
    data = path.read_bytes()
    for at in range(0, len(data), 43):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            bad.write_bytes(damaged)
            try:
                got = [plain(row) for row in TraceReader(bad).events()]
            except TraceError as error:
                assert str(bad) in str(error)  # noqa: PT017
            else:
                assert got == rows  # a date, or the directory that is not read


def rewritten(path: Path, out: Path, change: dict[str, bytes]) -> None:
    """The same file with some members changed."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as other:
        for info in archive.infolist():
            other.writestr(zipfile.ZipInfo(info.filename), change.get(info.filename, archive.read(info)))


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("counts", -1, r"row 5: expert 0 has -1 pairs"),
        ("counts", 1 << 30, r"row 5: 4,294,967,296 pairs"),
        ("layer", 2, r"row 5: layer 2 is none of 0 to 1"),
        ("microbatch", -1, r"row 5: microbatch -1"),
        ("step", -3, r"row 5: step -3"),
        ("event", 77, r"row 5: event 77"),
        ("source", 9, r"row 5: source 9"),
        ("costs", np.nan, r"row 5: costs \[nan, nan, nan\] are no times"),
        ("costs", -1.0, r"row 5: costs"),
        ("shares", 5, r"its chunk has \d+ shares, its rows \d+"),
        ("ids", 1 << 30, r"its chunk has \d+ ids"),
        ("copies", -1, r"row 5: copies -1"),
    ],
)
def test_a_row_that_cannot_be_is_named(tmp_path: Path, column: str, value: float, why: str) -> None:
    path, bad = tmp_path / "t.npz", tmp_path / "bad.npz"
    rows = rows_of(HEADER, 8, seed=3)
    with TraceWriter(path, HEADER, rows=4) as out:
        for row in rows:
            out.add(row)
    with np.load(path) as archive:
        changed = archive["000001.rows"].copy()
    changed["flags"][1] |= form.HAS_COSTS | form.HAS_DEMAND
    changed[column][1] = value
    rewritten(path, bad, {"000001.rows.npy": bytes_of(changed)})
    found = TraceReader(bad).events()
    assert [plain(next(found)) for _ in range(4)] == [plain(row) for row in rows[:4]]
    with pytest.raises(TraceError, match=rf"bad\.npz: .*{why}"):
        next(found)


def test_experts_by_token_must_be_the_counts(tmp_path: Path) -> None:
    path, bad = tmp_path / "t.npz", tmp_path / "bad.npz"
    with TraceWriter(path, HEADER) as out:
        for step in range(3):
            ids_TK = np.array([[0, 1], [3, 2]], np.int32)
            out.add(TraceTarget(target=Target(0, 0, step), ids_TK=ids_TK, demand_E=np.ones(4, np.int32)))
    ids = np.tile(np.array([[0, 1], [3, 2]], np.uint8), (3, 1))
    for value, why in ((1, "row 1: its experts by token are not its counts"), (4, "row 1: expert 4, of 4")):
        ids[2, 0] = value
        rewritten(path, bad, {"000000.ids.npy": bytes_of(ids)})
        with pytest.raises(TraceError, match=why):
            list(TraceReader(bad))


@pytest.mark.parametrize(
    ("member", "data", "why"),
    [
        ("header.json", b"{}", "its header is none"),
        ("header.json", b'{"afore_targets": 9}', "format 9 of AFORE"),
        ("header.json", b'{"afore_targets": 1}', "its header"),
        ("header.json", b'{"afore_targets": 1, "experts": 1000000000, "layers": 1}', "1000000000 is no whole number"),
        ("header.json", b'{"afore_targets": 1, "experts": 4, "layers": 1, "pickle": 1}', "unknown field 'pickle'"),
        ("header.json", b"[" * 100_000, "bad.npz"),
        ("000000.rows.npy", bytes_of(np.zeros(3)), "which the header does not announce"),
        ("000000.rows.npy", b"\x93NUMPY\x01\x00\x20\x00{'descr': '|O', 'shape': (1,)}  \n", "damaged|descr|header"),
        ("end.json", b'{"rows": 3, "chunks": 2, "digest": ""}', "it ends after 8 rows; 3 were written"),
        ("end.json", b"no", "end.json is damaged"),
        ("end.json", b'{"rows": 8, "chunks": 1}', "end.json is damaged"),
    ],
)
def test_members_that_cannot_be(tmp_path: Path, member: str, data: bytes, why: str) -> None:
    path, bad = tmp_path / "t.npz", tmp_path / "bad.npz"
    written(path, 8)
    rewritten(path, bad, {member: data})
    with pytest.raises(TraceError, match=why):
        list(TraceReader(bad).events())


def test_a_row_that_could_be_but_was_not_written_is_noticed(tmp_path: Path) -> None:
    path, bad = tmp_path / "t.npz", tmp_path / "bad.npz"
    written(path, 8)
    with np.load(path) as archive:
        changed = archive["000000.rows"].copy()
    changed["now_ns"][2] += 1
    rewritten(path, bad, {"000000.rows.npy": bytes_of(changed)})
    with pytest.raises(TraceError, match=r"bad\.npz: its digest is [0-9a-f]{32}, not that of end\.json"):
        list(TraceReader(bad).events())


def test_nothing_large_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MOST_MEMBER", 1 << 20)
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", b" " * (form.MOST_MEMBER + 1))
    assert bomb.stat().st_size < 1 << 14
    with pytest.raises(TraceError, match="a member of 1,048,577 bytes"):
        TraceReader(bomb)


def test_arrays_of_objects_run_nothing() -> None:
    evil = np.array([print], dtype=object)
    with pytest.raises(ValueError, match="allow_pickle"):
        bytes_of(evil)
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    data = b"\x93NUMPY\x01\x00" + (len(head) + 1).to_bytes(2, "little") + head + b"\n" + b"cposix\nsystem\n"
    with pytest.raises(ValueError, match="pickles: they could carry code"):
        array_of(data)
    huge = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000, 1000000, 1000000), }"
    data = b"\x93NUMPY\x01\x00" + (len(huge) + 1).to_bytes(2, "little") + huge + b"\n"
    with pytest.raises(ValueError, match="0 are there"):
        array_of(data)


def test_headers_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"trace\.experts: 0 is no whole number from 1"):
        TraceHeader(experts=0, layers=1)
    with pytest.raises(ConfigError, match=r"trace\.layers: True"):
        TraceHeader(experts=1, layers=True)
