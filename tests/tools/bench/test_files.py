"""Files that a user names: bounded when read, whole when written."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from afore.core.errors import ConfigError, HostError
from afore.tools.bench.files import check_place, read_kept, read_lines, sweep, write_whole
from afore.tools.bench.prompts import read_prompts


def test_a_pipe_that_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"\xef\xbb\xbfone\ntwo",))
    writer.start()
    assert list(read_lines(str(path), "prompts")) == ["one\n", "two"]
    writer.join()


def test_an_endless_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afore.tools.bench.files.MOST_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match="prompts: /dev/zero has more than 1 MiB"):
        read_prompts("/dev/zero")


@pytest.mark.parametrize("excess", [0, 1])
def test_the_bound_is_for_all_lines_together(excess: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afore.tools.bench.files.MOST_BYTES", 10)
    path = tmp_path / "lines"
    path.write_bytes(b"abcd\n" * 2 + b"e" * excess)
    lines = read_lines(str(path), "prompts")
    assert [next(lines), next(lines)] == ["abcd\n"] * 2
    if excess:
        with pytest.raises(ConfigError, match="has more than"):
            next(lines)
    else:
        assert list(lines) == []


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_whole(str(path), b"old")
    path.chmod(0o640)
    write_whole(str(path), b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    assert [found.name for found in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_whole(str(path), b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(HostError, match="it cannot be written: File too large"):
            write_whole(str(path), b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to nowhere", "device"])
def test_what_is_in_a_files_way_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    check_place(path)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nowhere")
    with pytest.raises(HostError, match="no result can take its place; remove it"):
        check_place(path)
    with pytest.raises(OSError, match=r"it is no file|No such file"):
        read_kept(path)


def test_only_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    for name in ("cell.json.a1b2c3d_.partial", "cell.json", "mine.partial", "cell.json.UPPERCAS.partial"):
        (tmp_path / name).touch()
    (tmp_path / "folder.a1b2c3d4.partial").mkdir()
    sweep(tmp_path)
    sweep(tmp_path / "nowhere")
    assert not (tmp_path / "cell.json.a1b2c3d_.partial").exists()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
def test_what_a_killed_writer_leaves_is_known_by_its_name(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from afore.tools.bench import files\n"
        "files._fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_whole(sys.argv[1], b'x')"
    )
    for name in ("out.json", "x" * 240):
        assert (
            subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], timeout=60).returncode == -signal.SIGKILL
        )
    assert len(list(tmp_path.iterdir())) == 2
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_written_to() -> None:
    write_whole("/dev/null", b"x")
    assert not Path("/dev/null").is_file()
    with pytest.raises(HostError, match="No space left"):
        write_whole("/dev/full", b"x")
