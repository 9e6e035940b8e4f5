"""The GPU check as a command: its parts, its deadline, what it leaves, and what it says of a driver that is odd or not there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from afore.tools import gpu_check
from afore.tools.gpu_check import PARTS, TOTAL_S, WHOLE_S, run_parts
from afore.tools.gpu_child import END_S
from afore.tools.gpu_host import caches, describe_machine, version_of, writable
from afore.tools.gpu_parts import PARTS as RUNNERS
from afore.tools.gpu_report import LIMITS, write_report
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.probe import Found, describe_gpus
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.presence import missing_gpu
from tests.workers.device.cuda.test_probe import PACKAGE

ROOT = Path(__file__).resolve().parent.parent.parent
LATE = {"outcome": "not run", "why": "no time was left"}
FINE = {"outcome": "passed", "about": "a part", "took_s": 1.0}


def no_wait(limit_s: float) -> bool:
    """Nothing is compiled."""
    return True


def test_every_part_has_a_runner_and_all_fit_into_eight_minutes() -> None:
    assert set(PARTS) == set(RUNNERS)
    assert WHOLE_S == 480
    assert TOTAL_S + 2 * END_S < WHOLE_S, "what was killed last, and what that has left, has time to end"
    assert sum(part.share_s for part in PARTS.values()) < TOTAL_S - gpu_check.PROBE_S
    assert all(part.share_s <= part.limit_s < TOTAL_S / 2 for part in PARTS.values())


def test_earlier_parts_leave_every_later_one_its_share() -> None:
    late = dict(run_parts(["device"], time.monotonic() - 1, no_wait))
    assert late["device"]["why"] == "no time was left"
    until = time.monotonic() + PARTS["serving"].share_s + 1
    parts = run_parts(["device", "serving"], until, no_wait)
    assert next(parts) == ("device", {"about": PARTS["device"].about, "took_s": pytest.approx(0, abs=1), **LATE})


def test_what_times_the_host_waits_for_the_compiler_and_says_where_it_could_not() -> None:
    asked: list[float] = []

    def never(limit_s: float) -> bool:
        asked.append(limit_s)
        return False

    # Behind its deadline nothing is started, but all that is decided is.
    (_, part), *rest = run_parts(["calibration", "device"], time.monotonic() - 1, never)
    assert "still being compiled beside it" in part["beside"]
    assert asked == [0.0], "a part that times nothing does not wait"
    assert "beside" not in dict(rest)["device"]
    assert {name for name, part in PARTS.items() if part.quiet} >= {
        "calibration",
        "overlap",
        "glm",
        "serving",
        "hosted",
    }


def test_a_place_that_cannot_be_written_is_found_out_before_anything_is_measured(tmp_path: Path) -> None:
    assert writable(tmp_path / "a" / "b", tmp_path) == (tmp_path / "a" / "b", [])
    file = tmp_path / "file"
    file.touch()
    out, (note,) = writable(file / "below", tmp_path / "instead")
    assert out == tmp_path / "instead"
    assert "nothing can be written into" in note
    environment, notes = caches(tmp_path, tmp_path)
    assert notes == []
    assert environment.get("TRITON_CACHE_DIR") == os.environ.get("TRITON_CACHE_DIR")
    environment, (note,) = caches(tmp_path, file / "home")
    assert "compiled for this run alone" in note
    assert Path(environment["HOME"]).parent == tmp_path
    assert Path(environment["HOME"]).is_dir()


def test_the_report(tmp_path: Path) -> None:
    spans = [
        {"lane": "compute <alone>", "from_us": 0.0, "to_us": 10.0},
        {"lane": "copies", "from_us": 2.0, "to_us": 8.0},
    ]
    report = {
        "date": "2026-01-01 00:00 UTC",
        "afore": "0.1.0",
        "machine": ["GPU 0: Fake GPU"],
        "packages": {"torch": "2.11", "rich": None},
        "took_s": 12.0,
        "parts": {
            "overlap": {
                **FINE,
                "result": {"together_us": 12.3456, "spans": spans, "rows": [{"a_us": 1.0}, {"a_us": 2.0}]},
            },
            "calibration": {**FINE, "result": {"files": {"gpu.yaml": "name: gpu\n"}}, "beside": "the compiler ran"},
            "serving": {"outcome": "failed", "about": "x", "took_s": 2.0, "why": "none moved", "result": {"pairs": 17}},
            "glm": {"outcome": "failed", "about": "another", "took_s": 2.0, "why": "Xid 31"},
        },
    }
    _, page = write_report(tmp_path, report)
    said = page.read_text()
    assert LIMITS in said
    assert "| rich | not installed |" in said
    assert "- together_us: 12.35" in said
    assert "| a_us |" in said
    assert "Xid 31" in said
    assert "- pairs: 17" in said, "what was found is told of a part that failed, too"
    assert "- beside: the compiler ran" in said
    assert "overlap.svg" in said
    assert "compute &lt;alone&gt;" in (tmp_path / "overlap.svg").read_text()
    assert (tmp_path / "gpu.yaml").read_text() == "name: gpu\n"
    assert json.loads((tmp_path / "gpu_check.json").read_text()) == report


def test_a_disk_that_fills_up_meanwhile_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report goes elsewhere, with the files of parts; where it can go nowhere, that is said and the check goes on."""
    profile = {"calibration": {**FINE, "result": {"files": {"gpu.yaml": "name: gpu\n"}}}}
    content = {"date": "", "afore": "", "machine": [], "packages": {}, "took_s": 0.0, "parts": profile}
    full, elsewhere = Path("/dev/full"), tmp_path / "instead"
    assert gpu_check.keep_report(full, elsewhere, content) == (elsewhere, elsewhere / "gpu_check.md")
    assert (elsewhere / "gpu.yaml").read_text() == "name: gpu\n"
    assert "could not be written into /dev/full" in (elsewhere / "gpu_check.md").read_text()
    assert gpu_check.keep_report(full, full, content)[0] == full
    assert capsys.readouterr().err.count("cannot be written into /dev/full") == 2
    usual = tempfile.TemporaryFile

    def fake(dir: Path) -> Any:
        return usual(dir=dir) if dir != tmp_path else os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")

    monkeypatch.setattr(tempfile, "TemporaryFile", fake)
    out, (note,) = writable(tmp_path, elsewhere)
    assert out == elsewhere, "files can be made there, and not filled"
    assert "No space left" in note


@pytest.mark.slow
def test_the_command_lists_its_parts_and_says_where_there_is_no_gpu() -> None:
    script = [str(ROOT / "tools" / "gpu_check.sh")]
    environment = {**os.environ, "PYTHON": sys.executable}
    listed = subprocess.run([*script, "--dry-run"], env=environment, capture_output=True, text=True, check=False)
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in PARTS)
    if missing_gpu() == "":
        pytest.skip("there is a GPU here")
    refused = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("gpu_check: GPU: ")
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_whole_check_over_a_driver_whose_gpu_torch_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in is found under the real name; a part opens it, and fails where torch has no such GPU: reported, status 1."""
    if missing_gpu() == "":
        pytest.skip("there is a GPU here")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), *filter(None, sys.path)]))
    monkeypatch.setenv("FAKE_GPU", "no-name")
    monkeypatch.setattr(gpu_check, "ROOT", PACKAGE)
    monkeypatch.setattr(gpu_check, "compiling", lambda environment: contextlib.nullcontext(no_wait))
    monkeypatch.setattr(gpu_check, "adopt_orphans", lambda: None)  # or this test run would adopt what others leave
    assert gpu_check.main(["--only", "device", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["parts"]["device"]["outcome"] == "failed"
    assert "built without CUDA" in report["parts"]["device"]["why"]
    page = (tmp_path / "gpu_check.md").read_text()
    assert "GPU 0: name unknown, 1.0 GiB" in page
    assert "the driver did not say everything" in page
    assert "built without CUDA" in (tmp_path / "logs" / "device.log").read_text()


@pytest.mark.slow
def test_a_report_is_written_wherever_the_drivers_library_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One odd answer is no reason to show nothing, and never told as a machine without a GPU."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), *filter(None, sys.path)]))
    monkeypatch.setenv("FAKE_GPU", "no-count")
    monkeypatch.setattr(gpu_check, "driver_loads", lambda: True)
    monkeypatch.setattr(gpu_check, "ROOT", PACKAGE)
    monkeypatch.setattr(gpu_check, "compiling", lambda environment: contextlib.nullcontext(no_wait))
    monkeypatch.setattr(gpu_check, "adopt_orphans", lambda: None)
    assert gpu_check.main(["--only", "device", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert "CUDA_ERROR_UNKNOWN" in report["refused"]
    assert report["parts"]["device"]["outcome"] == "failed"
    assert "no NVIDIA GPU (" not in capsys.readouterr().err
    assert "The GPU could not be asked" in (tmp_path / "gpu_check.md").read_text()


def test_a_machine_whose_driver_was_not_asked_is_described_without_it() -> None:
    lines = describe_machine(Found(0, ()))
    assert not any("driver for CUDA" in line for line in lines)
    driver = Driver(FakeCalls())
    lines = describe_machine(Found(driver.version, describe_gpus(driver), ("no name",)))
    assert "driver for CUDA 13.1" in lines
    assert "the driver did not say everything: no name" in lines
    assert version_of("no-such-package") is None


BLOCKED = (
    "psutil",
    "jsonargparse",
    "rich",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "httpx",
    "matplotlib",
    "ortools",
)
"""Packages of the project, and of its tests, that a bare machine lacks."""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["gpu_check", "gpu_part", "gpu_parts", "gpu_ipc", "calibrate"])
def test_a_bare_machine_has_all_that_the_check_imports(command: str) -> None:
    """Of the packages it has those that the runtime computes with; nothing else is imported before a part is begun."""
    imports = ["afore.tools." + command, "afore.tools.calibrate.gpu", "afore.cluster", "afore.serving.inproc"]
    lacking = [*BLOCKED, "pytest", "pytest_asyncio", "hypothesis", "xdist"]
    script = f"import sys\nfor name in {lacking!r}: sys.modules[name] = None\nimport {', '.join(imports)}"
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
