"""Files that a user names: bounded when read, whole when written."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from afore.core.errors import ConfigError, HostError
from afore.tools.bench.files import read_lines, write_whole
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


def test_a_device_is_written_to() -> None:
    write_whole("/dev/null", b"x")
    assert not Path("/dev/null").is_file()
    with pytest.raises(HostError, match="No space left"):
        write_whole("/dev/full", b"x")
