"""Where a trace is written and read: one writer a file, files only, and no name out of a file chooses code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from afore.core.errors import HostError
from afore.scheduler.repeat import recorded_policy
from afore.scheduler.traces import TraceHeader, TraceReader, TraceWriter
from afore.scheduler.traces.import_files import read_json, read_matrix
from afore.scheduler.traces.records import TraceError


def header(policy: str = "", planner: dict[str, Any] | None = None) -> TraceHeader:
    return TraceHeader(experts=4, layers=2, workers=2, slots=1, policy=policy, planner=planner or {})


def test_a_second_writer_of_a_file_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.trace.npz"
    with TraceWriter(path, header()), pytest.raises(HostError, match="somebody else is writing it"):
        TraceWriter(path, header())
    assert list(TraceReader(path)) == []
    # What a run that was killed has left is nobody's.
    path.with_name(path.name + ".partial").write_bytes(b"left")
    TraceWriter(path, header()).close()
    assert list(TraceReader(path)) == []


def test_a_pipe_is_no_file_and_nobody_waits_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.npy"
    os.mkfifo(pipe)
    for read in (read_json, read_matrix, TraceReader):
        with pytest.raises(TraceError, match="no file"):
            read(pipe)
    os.mkfifo(tmp_path / "run.npz.partial")
    with pytest.raises(HostError):
        TraceWriter(tmp_path / "run.npz", header())
    with pytest.raises(TraceError, match="no file"):
        read_matrix(Path("/dev/zero"))


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_what_names_no_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(HostError):
        TraceWriter(tmp_path / name if name else "", header())


def test_a_policy_of_a_file_is_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    planted = header(policy="planted:Policy", planner={"num_experts": 4, "num_workers": 2, "primaries": [0, 0, 1, 1]})
    with pytest.raises(TraceError, match="none of AFORE's"):
        recorded_policy(planted, lambda layer: None, "trace")  # type: ignore[arg-type,return-value]  # never asked
