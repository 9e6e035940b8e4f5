"""The doctor: sound on this machine, and right about machines that lack something."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afore.tools import doctor
from afore.tools.doctor_check import GIB, Check
from afore.tools.doctor_machine import (
    FILES_ENOUGH,
    FILES_LEAST,
    UNLIMITED,
    cgroup_cpus,
    cgroup_memory,
    check_clock,
    check_cores,
    check_eventfd,
    check_files,
    check_memory,
    check_platform,
)
from afore.tools.doctor_shm import check_shm, check_stale
from afore.tools.doctor_software import (
    check_forkserver,
    check_numba_cache,
    check_python,
    check_torch,
    check_uvloop,
)


@pytest.mark.slow
@pytest.mark.processes
def test_this_machine_is_examined_whole(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main(["--json"])
    shown = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in shown["checks"]}
    assert list(checks) == [
        *(
            "platform",
            "python",
            "torch",
            "numba cache",
            "uvloop",
            "cores",
            "memory",
            "shared memory",
            "leftovers",
            "eventfd",
        ),
        *("file descriptors", "fork server", "clock", "huge pages", "rdma devices"),
        *(name for name in checks if (name.startswith("rdma ") and name != "rdma devices") or name == "memory lock"),
        *("peer memory", *(name for name in checks if name.startswith("distance "))),
        *("gpu", *(name for name in checks if name.startswith("gpu "))),
        *("fabric loopback", "fabric shm", "fabric tcp", "fabric verbs"),
    ]
    assert not [check for check in checks.values() if check["status"] == "fail"]
    assert (status, shown["ok"]) == (0, True)
    assert all(check["found"] for check in checks.values())
    assert all(bool(check["mend"]) == (check["status"] != "ok") for check in checks.values())
    assert checks["fabric tcp"]["status"] == "ok"


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "afore.tools.doctor", "--help"], capture_output=True, text=True, check=True
    )
    assert "python -m afore.tools.doctor --json" in done.stdout
    assert "exit status" in done.stdout


def a(status: Any) -> Check:
    return Check("thing", status, "[found]", "" if status == "ok" else "mend [it]")


@pytest.mark.parametrize(("statuses", "code"), [(["ok"], 0), (["ok", "warn"], 0), (["warn", "fail", "ok"], 1)])
def test_only_a_failure_fails(
    statuses: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", [lambda status=status: a(status) for status in statuses])
    assert doctor.main([]) == code
    shown = capsys.readouterr().out
    assert "[found]" in shown
    assert shown.count("thing: mend [it]") == sum(status != "ok" for status in statuses)
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("ok", "warn", "fail"))
    assert shown.splitlines()[-1] == counts
    assert doctor.main(["--json"]) == code
    assert json.loads(capsys.readouterr().out)["checks"][0] == dataclasses.asdict(a(statuses[0]))


def test_a_check_that_breaks_is_a_failure_and_the_others_still_run() -> None:
    def check_broken() -> Check:
        raise ZeroDivisionError("oh")

    broken, fine = doctor.examine([check_broken, lambda: a("ok")])
    assert (broken.name, broken.status, broken.found) == (
        "broken",
        "fail",
        "could not be checked: ZeroDivisionError: oh",
    )
    assert fine == a("ok")


def test_python_and_platform() -> None:
    assert check_python((3, 10, 9)).status == "fail"
    assert check_python((3, 11, 0)).status == check_python((3, 12, 4)).status == "ok"
    assert check_python((3, 14, 0)).status == "warn"
    assert check_platform("linux").status == "ok"
    assert check_platform("darwin").status == "fail"


@pytest.mark.slow
def test_libraries() -> None:
    assert check_torch().status == "ok"
    assert check_torch((99, 0)).status == "fail"
    assert "pip install 'torch>=99.0'" in check_torch((99, 0)).mend
    assert check_uvloop().status == "ok"


@pytest.mark.parametrize(
    ("module", "check"), [("torch", check_torch), ("uvloop", check_uvloop), ("numba", check_numba_cache)]
)
def test_a_missing_library_is_a_failure_that_names_it(module: str, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    found = check()
    assert found.status == "fail"
    assert "cannot be imported" in found.found
    assert f"pip install {module}" in found.mend.replace("'", "")


@pytest.mark.slow
def test_a_cache_that_cannot_be_kept_is_a_warning() -> None:
    found = check_numba_cache()
    assert found.status == "ok"
    assert re.search(r"\d+ kernels compiled, in |no kernel compiled yet", found.found)
    for folder in ("models", "scheduler", "workers"):
        assert folder in found.found
    namespace: dict[str, Any] = {}
    exec("def nowhere(x): return x", namespace)
    found = check_numba_cache(lambda: [namespace["nowhere"]])
    assert found.status == "warn"
    assert "NUMBA_CACHE_DIR" in found.mend


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.max": "garbage"}, None),
        ({}, None),
    ],
)
def test_cpu_quota_of_both_kinds_of_control_groups(files: dict[str, str], cpus: float | None, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert cgroup_cpus(tmp_path) == cpus


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)


def test_cores(tmp_path: Path) -> None:
    assert check_cores(2, tmp_path).status == "ok"
    assert check_cores(1, tmp_path).status == "warn"
    write(tmp_path, {"cpu.max": "100000 100000"})
    limited = check_cores(8, tmp_path)
    assert limited.status == "warn"
    assert "8 of" in limited.found
    assert "quota 1" in limited.found


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "max\n", "memory.current": "5\n"}, UNLIMITED),
        ({"memory.max": "100\n", "memory.current": "40\n"}, 60),
        ({"memory.max": "100\n", "memory.current": "140\n"}, 0),
        ({"memory/memory.limit_in_bytes": "70\n", "memory/memory.usage_in_bytes": "10\n"}, 60),
        ({}, UNLIMITED),
    ],
)
def test_memory_of_both_kinds_of_control_groups(files: dict[str, str], left: int, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert cgroup_memory(tmp_path) == left


def test_memory(tmp_path: Path) -> None:
    assert check_memory(8 * GIB, tmp_path).status == "ok"
    assert check_memory(2 * GIB, tmp_path).status == "warn"
    assert check_memory(GIB // 2, tmp_path).status == "fail"
    write(tmp_path, {"memory.max": str(GIB), "memory.current": str(GIB // 2)})
    limited = check_memory(8 * GIB, tmp_path)
    assert limited.status == "fail"
    assert "0.5 GiB available, limited by the control group" in limited.found


class Room:
    """What statvfs says of a file system."""

    def __init__(self, nbytes: int) -> None:
        self.f_bavail, self.f_frsize = nbytes // 4096, 4096


@pytest.mark.parametrize(("mib", "status"), [(1, "fail"), (64, "warn"), (4096, "ok")])
def test_room_in_shared_memory(mib: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Room(mib << 20))
    found = check_shm(tmp_path)
    assert found.status == status
    assert f"{mib:,} MiB free" in found.found
    assert list(tmp_path.iterdir()) == []


def test_no_shared_memory_is_a_failure_with_the_mount_that_mends_it(tmp_path: Path) -> None:
    found = check_shm(tmp_path / "missing")
    assert found.status == "fail"
    assert "No such file or directory" in found.found
    assert "mount -t tmpfs" in found.mend


def test_leftovers_are_told_from_what_is_in_use(tmp_path: Path) -> None:
    assert check_stale(tmp_path).found == "none"
    with subprocess.Popen(["true"]) as process:
        process.wait()
    (tmp_path / f"afore-r1-{os.getpid()}-ffn-0-hidden-1").write_bytes(b"x")
    (tmp_path / "afore-r1").mkdir()
    (tmp_path / "other-1").write_bytes(b"x")
    held = os.open(tmp_path / "afore-r1", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert (check_stale(tmp_path).status, check_stale(tmp_path).found) == ("ok", "none (1 cluster running)")
    finally:
        os.close(held)
    (tmp_path / f"afore-r0-{process.pid}-ring-0").write_bytes(b"x" * (3 << 20))
    found = check_stale(tmp_path)
    assert found.status == "warn"
    assert found.found == f"2 left by dead runs, 3.0 MiB: afore-r0-{process.pid}-ring-0, afore-r1"
    assert "sweeps" in found.mend


@pytest.mark.parametrize("name", [f"afore-x-{os.getpid()}-ring-1", "afore-x"], ids=["segment", "directory"])
def test_what_no_cluster_makes_is_no_running_cluster(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)  # to open it would be to wait
    check = check_stale(tmp_path)
    assert (check.status, check.found) == ("warn", f"{name}: named like a cluster's, and nothing that one makes")


def test_file_descriptors() -> None:
    assert check_files(FILES_ENOUGH, FILES_ENOUGH).status == "ok"
    assert check_files(-1, -1).found == "unlimited (hard unlimited)"
    few = check_files(FILES_LEAST, 4 * FILES_ENOUGH)
    assert (few.status, few.mend) == ("warn", "ulimit -n 4096")
    assert check_files(FILES_LEAST - 1, FILES_LEAST).status == "fail"
    assert "as root" in check_files(FILES_LEAST - 1, FILES_LEAST).mend


def test_eventfd() -> None:
    assert check_eventfd().status == "ok"


@pytest.mark.slow
@pytest.mark.processes
def test_a_fork_server_starts_a_child_or_says_why_not(tmp_path: Path) -> None:
    assert check_forkserver().status == "ok"
    missing = check_forkserver("/missing/python")
    assert (missing.status, missing.found) == ("fail", "/missing/python: No such file or directory")
    refused = check_forkserver("false")
    assert (refused.status, refused.found) == ("fail", "the child did not run")
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nsleep 300\n")
    hanging.chmod(0o700)
    late = check_forkserver(str(hanging), timeout_s=0.05)
    assert (late.status, late.found) == ("fail", "no child within 0.05 s")


def test_a_slow_clock_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "clock").write_text("tsc\n")
    assert check_clock(tmp_path / "clock", 50.0).found == "tsc, 50 ns a reading"
    assert check_clock(tmp_path / "clock", 50.0).status == "ok"
    assert check_clock(tmp_path / "missing", 5_000.0).status == "warn"
    assert check_clock(tmp_path / "missing", 50.0).found.startswith("unknown source")
