"""The sweep takes what dead processes left, and nothing else."""

from __future__ import annotations

import os
import socket
import stat
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from afore.core.errors import HostError
from afore.transport.shm_segments import HEADER_BYTES, Segment
from afore.transport.shm_sweep import SECRET_BYTES, RunDirectory, sweep_stale

REPOSITORY = Path(__file__).parents[2]
MAKE_AND_DIE = """
import os, signal, sys
from afore.transport.shm_segments import Segment
from afore.transport.shm_sweep import RunDirectory
root = sys.argv[1]
directory = RunDirectory(f"{root}/afore-dead")
directory.secret()
kept = Segment(root, "dead", label="r", region=1, nbytes=4096, address="a")
print(kept.name, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def child(root: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKE_AND_DIE, str(root), how],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_killed_process_left_goes_and_what_lives_stays(tmp_path: Path) -> None:
    with child(tmp_path, "die") as doomed:
        assert doomed.stdout is not None
        name = doomed.stdout.readline().strip()
        doomed.wait()
    assert names(tmp_path) == ["afore-dead", name]
    assert sweep_stale(str(tmp_path)) == ("afore-dead", name)
    with child(tmp_path, "stay") as alive:
        assert alive.stdout is not None
        name = alive.stdout.readline().strip()
        assert sweep_stale(str(tmp_path)) == ()
        assert names(tmp_path) == ["afore-dead", name]
        alive.kill()
    assert sweep_stale(str(tmp_path)) == ("afore-dead", name)
    assert names(tmp_path) == []


def test_what_this_process_uses_stays(tmp_path: Path) -> None:
    kept = Segment(str(tmp_path), "run", label="r", region=1, nbytes=1, address="a")
    directory = RunDirectory(f"{tmp_path}/afore-run")
    assert sweep_stale(str(tmp_path)) == ()
    kept.close()
    assert directory.close(remove=True)
    assert not directory.close(remove=True)
    assert names(tmp_path) == []


def left_behind(root: Path, name: str, pid: int, ticks: int, magic: bytes = b"AFORESHM") -> None:
    header = struct.pack("<8sIIQQQQ", magic, 1, 0, pid, ticks, 1, 1)
    (root / name).write_bytes(header.ljust(HEADER_BYTES + 1, b"\0"))


def test_a_recycled_pid_is_not_trusted(tmp_path: Path) -> None:
    # This process is alive, but it did not start then.
    left_behind(tmp_path, f"afore-run-{os.getpid()}-r-1", os.getpid(), 12345)
    assert sweep_stale(str(tmp_path)) == (f"afore-run-{os.getpid()}-r-1",)


def test_a_segment_without_a_header_belongs_to_the_pid_in_its_name(tmp_path: Path) -> None:
    mine, gone = f"afore-run-{os.getpid()}-r-1", f"afore-run-{dead_pid()}-r-1"
    for name in (mine, gone):
        (tmp_path / name).write_bytes(b"")
    assert sweep_stale(str(tmp_path)) == (gone,)
    assert names(tmp_path) == [mine]


def test_only_what_looks_like_ours_is_taken(tmp_path: Path) -> None:
    for name in ("afore", "afore-notes.txt", "psm_1234", "afore-run-12-r", "other-run-1-r-1"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / f"afore-run-{dead_pid()}-link-1").symlink_to(tmp_path / "afore-notes.txt")
    before = names(tmp_path)
    assert sweep_stale(str(tmp_path)) == ()
    assert names(tmp_path) == before


def test_a_directory_that_is_somebody_s_own_stays_whole(tmp_path: Path) -> None:
    for name, mode in (("afore-data", 0o700), ("afore-open", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "afore-data" / "secret").write_bytes(b"x")
    (tmp_path / "afore-data" / "notes.txt").write_bytes(b"x")
    assert sweep_stale(str(tmp_path)) == ()
    assert names(tmp_path) == ["afore-data", "afore-open"]
    assert names(tmp_path / "afore-data") == ["notes.txt", "secret"]


def test_a_sweep_of_one_run_leaves_the_others(tmp_path: Path) -> None:
    for run in ("one", "one2", "two"):
        left_behind(tmp_path, f"afore-{run}-{dead_pid()}-r-1", dead_pid(), 1)
        (tmp_path / f"afore-{run}").mkdir(mode=0o700)
    swept = sweep_stale(str(tmp_path), "one")
    assert [name.split("-")[1] for name in swept] == ["one", "one"]
    assert [name.split("-")[1] for name in names(tmp_path)] == ["one2", "one2", "two", "two"]


def test_sockets_and_secret_of_a_dead_run_go_with_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "afore-run"
    directory = RunDirectory(str(folder))
    directory.secret()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "hub"))
    assert sweep_stale(str(tmp_path)) == ()
    assert directory.close(remove=True)
    assert names(tmp_path) == []


def test_the_last_one_out_takes_the_directory_away(tmp_path: Path) -> None:
    path = f"{tmp_path}/afore-run"
    first, second, third = RunDirectory(path), RunDirectory(path), RunDirectory(path)
    assert not first.close(remove=True)
    assert not second.close(remove=False)
    assert third.close(remove=True)
    assert names(tmp_path) == []
    kept = RunDirectory(path)
    assert not kept.close(remove=False)
    assert names(tmp_path) == ["afore-run"]


def test_a_run_directory_is_private_and_so_is_its_secret(tmp_path: Path) -> None:
    directory = RunDirectory(f"{tmp_path}/afore-run")
    secret = directory.secret()
    assert stat.S_IMODE((tmp_path / "afore-run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "afore-run" / "secret").stat().st_mode) == 0o600
    assert (len(secret), names(tmp_path / "afore-run")) == (SECRET_BYTES, ["secret"])
    assert RunDirectory(f"{tmp_path}/afore-run").secret() == secret
    directory.close(remove=False)


def test_all_who_come_at_once_get_one_secret(tmp_path: Path) -> None:
    def come(_: int) -> bytes:
        return RunDirectory(f"{tmp_path}/afore-run").secret()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(come, range(64)))) == 1


def test_coming_and_going_at_once_never_fails_and_leaves_nothing(tmp_path: Path) -> None:
    def come_and_go(_: int) -> None:
        for _ in range(25):
            directory = RunDirectory(f"{tmp_path}/afore-run")
            # Nobody may take it away while it is open.
            assert os.path.samestat(os.fstat(directory.fd), os.stat(directory.path))
            directory.close(remove=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(8)))
    assert names(tmp_path) == []


def test_directories_that_cannot_be_used_are_host_errors(tmp_path: Path) -> None:
    (tmp_path / "afore-open").mkdir(mode=0o700)
    (tmp_path / "afore-open").chmod(0o755)
    (tmp_path / "afore-file").write_bytes(b"")
    (tmp_path / "afore-link").symlink_to(tmp_path / "afore-open")
    for name, problem in (
        ("afore-open", "open to other users"),
        ("afore-file", "cannot make the run's directory"),
        ("afore-link", "cannot make the run's directory"),
        ("nowhere/afore-run", "parent directory does not exist"),
    ):
        with pytest.raises(HostError, match=problem):
            RunDirectory(f"{tmp_path}/{name}")
