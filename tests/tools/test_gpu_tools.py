"""The GPU check and the calibration, before a GPU has seen them: every measurement runs over the strict driver, small."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from afore.core.clock import WallClock
from afore.tools import gpu_check
from afore.tools.calibrate.command import main as calibrate_main
from afore.tools.calibrate.gpu import calibrate
from afore.tools.gpu_bench import Bench, ExpertSize, Layer
from afore.tools.gpu_check import PARTS, RESERVED, TOTAL_S, caches, run_part, run_parts, writable
from afore.tools.gpu_exact import check_experts, check_partition
from afore.tools.gpu_measure import overlap
from afore.tools.gpu_parts import PARTS as RUNNERS
from afore.tools.gpu_report import LIMITS, write_report
from afore.tools.gpu_serving import _group_of_one, decode_with_attention
from afore.workers.device.cuda.device import CompletionName, CudaDevice
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.kernels import torch_implementation
from afore.workers.device.cuda.probe import Found, describe_gpus
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine
from tests.workers.device.cuda.presence import missing_gpu

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ExpertSize(name="tiny", hidden_size=16, expert_size=8, rows=6, dtype=torch.float32)
LATE = {"outcome": "not run", "why": "no time was left"}
FINE = {"outcome": "passed", "about": "a part", "took_s": 1.0}


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def no_wait(limit_s: float) -> None:
    """Nothing is compiled."""


@pytest.fixture
def calls() -> FakeCalls:
    return FakeCalls(Machine())


@pytest.fixture
def bench(calls: FakeCalls) -> Iterator[Bench]:
    one = Bench(Driver(calls), torch_implementation(), on_gpu=False)
    yield one
    one.close()
    assert calls.mistakes == []
    assert set(calls.live.values()) == {0}


@pytest.mark.slow
def test_everything_is_calibrated(bench: Bench) -> None:
    def make(completion: CompletionName) -> CudaDevice:
        return CudaDevice(
            Driver(FakeCalls()),
            WallClock(),
            asyncio.get_running_loop(),
            completion=completion,
            current=lambda handle: contextlib.nullcontext(),
        )

    found = calibrate(bench, TINY, make, tiles={16: (1, 4), 32: (1, 2)}, counts=(1, 2, 3, 8), repeats=2)
    assert [one["tile_tokens"] for one in found["tiles"]] == [16, 32]
    assert set(found["fastest"]) == {"16", "32"}
    assert [copy["experts"] for copy in found["copies"]] == [1, 2, 3], "a worker's rows bound the copies"
    assert found["copies"][1]["mib"] == 2 * TINY.nbytes / 2**20
    assert found["copy"]["copy_gb_per_s"] >= 0
    assert set(found["completion"]) == {"bell", "query"}
    assert set(found["costs"]["tile_us"]) == {"16", "32"}
    json.dumps(found)


def test_copies_and_compute_together_and_alone(bench: Bench, calls: FakeCalls) -> None:
    found = overlap(Layer(bench, TINY, most_pairs=64), 4, 16, 2, targets=3)
    assert found["copies"] == 2
    assert len(found["spans"]) == 4
    waits = [arguments[0] for _, arguments in calls.named("cuStreamWaitEvent")]
    assert waits == [bench.copies], "copies begin with the targets, and wait for nothing else"


@pytest.mark.slow
async def test_a_group_of_one() -> None:
    """The part of the check, over gloo: what NCCL would be called with."""
    found = await _group_of_one(Driver(FakeCalls()), on_gpu=False)
    assert found["workers"] == 1
    assert not distributed.is_initialized()


@pytest.mark.slow
async def test_attention_of_the_bundled_model(one_thread: None) -> None:
    """The part of the check, over the strict driver: tokens are those of transformers."""
    calls = FakeCalls()
    found = await decode_with_attention(Driver(calls), on_gpu=False, prompts=2)
    assert found["exact"] == 2
    assert found["layer_awaits"] > 0
    assert calls.mistakes == []
    assert set(calls.live.values()) == {0}


@pytest.mark.slow
def test_partition_and_experts_are_held_against_the_cpu(bench: Bench) -> None:
    assert check_partition(bench, cases=3, tokens=9, experts=16, top_k=3)["cases"] == 3
    found = check_experts(bench, hidden=32, expert=16, rows=4, tokens=8)
    assert {one["form"] for one in found} == {"silu", "clamped, biases"}
    assert all(one["largest_difference"] <= one["tolerance"] for one in found)


def test_every_part_has_a_runner_and_all_fit_into_eight_minutes() -> None:
    assert set(PARTS) == set(RUNNERS)
    assert TOTAL_S < 480
    assert all(part.limit_s < TOTAL_S / 2 for part in PARTS.values())


@pytest.mark.slow
def test_a_part_that_fails_says_why_and_the_rest_goes_on() -> None:
    python = [sys.executable, "-c"]
    good = run_part([*python, "import sys; open(sys.argv[1], 'w').write('{\"a_us\": 3}')"], 60)
    assert good == {"outcome": "passed", "result": {"a_us": 3}}
    bad = run_part([*python, "raise SystemExit('no kernel image')"], 60)
    assert (bad["outcome"], bad["why"].strip()) == ("failed", "no kernel image")
    silent = run_part([*python, "pass"], 60)
    assert (silent["outcome"], silent["why"]) == ("failed", "exit status 0")


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_its_children() -> None:
    script = (
        "import signal, subprocess; subprocess.Popen(['sleep', '1000']); print('begun', flush=True); signal.pause()"
    )
    late = run_part([sys.executable, "-c", script], 3)
    assert late["outcome"] == "took too long"
    assert "begun" in late["why"]


def test_what_cannot_run_is_not_run() -> None:
    parts = dict(run_parts(["tests"], {"pytest": "8", "pytest-asyncio": None}, time.monotonic() + 100, no_wait))
    assert parts["tests"]["outcome"] == "not run"
    assert "pytest-asyncio, hypothesis, triton" in parts["tests"]["why"]
    late = dict(run_parts(["device"], {}, time.monotonic() - 1, no_wait))
    assert late["device"]["why"] == "no time was left"


def test_earlier_parts_leave_time_to_serving() -> None:
    until = time.monotonic() + RESERVED["serving"] + 1
    parts = run_parts(["device", "serving"], {}, until, no_wait)
    assert next(parts) == ("device", {"about": PARTS["device"].about, "took_s": pytest.approx(0, abs=1), **LATE})


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
    assert "overlap.svg" in said
    assert "compute &lt;alone&gt;" in (tmp_path / "overlap.svg").read_text()
    assert json.loads((tmp_path / "gpu_check.json").read_text()) == report


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
def test_a_whole_check_whose_part_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is said to be there and is not: the part says so, the report is written, the status is 1."""
    if missing_gpu() == "":
        pytest.skip("there is a GPU here")
    driver = Driver(FakeCalls())
    monkeypatch.setattr(gpu_check, "find_gpus", lambda: Found(driver.version, describe_gpus(driver)))
    monkeypatch.setattr(gpu_check, "compiling", lambda environment: contextlib.nullcontext(no_wait))
    assert gpu_check.main(["--only", "device", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["parts"]["device"]["outcome"] == "failed"
    assert report["parts"]["device"]["why"].startswith("GPU: ")
    assert "Fake GPU" in (tmp_path / "gpu_check.md").read_text()


def test_calibration_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if missing_gpu() == "":
        pytest.skip("there is a GPU here")
    assert calibrate_main(["--gpu", "--out", str(tmp_path / "gpu.json")]) == 2
    assert capsys.readouterr().err.startswith("calibrate: GPU: ")
    assert gpu_check.version_of("no-such-package") is None
