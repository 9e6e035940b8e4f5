"""The parts of a GPU check, each a process of its own: ``python -m afore.tools.gpu_parts NAME FILE`` writes its result as JSON.

A part raises where something is wrong; what it returns are findings with units in their names.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from afore.tools.calibrate.gpu import COPIES, TILES, calibrate, open_device, versions
from afore.tools.ending import end_with
from afore.tools.gpu_bench import GLM_AIR, Bench, ExpertSize, Layer
from afore.tools.gpu_exact import check_experts, check_partition
from afore.tools.gpu_measure import copy_times, overlap, tile_times
from afore.tools.gpu_serving import run_attention, run_group, run_hosted, run_serving
from afore.workers.cuda_store import SHARED_NBYTES
from afore.workers.device.cuda.driver import IPC_HANDLE_NBYTES, Span, load_driver

SMALL = ExpertSize(name="bundled model", hidden_size=128, expert_size=32, rows=36, dtype=torch.float32)


def run_device() -> dict[str, Any]:
    """Opens the GPU, copies in a batch, and has another process read its memory by CUDA IPC."""
    bench = Bench.open()
    driver, memory = bench.driver, bench.memory
    values = memory.pinned((1 << 20,), np.uint8)
    values[:] = np.random.default_rng(1).integers(0, 256, values.shape)
    at = memory.allocate(SHARED_NBYTES)
    half = values.nbytes // 2
    host = int(values.ctypes.data)
    driver.copy([Span(at, host, half), Span(at + half, host + half, half)], bench.copies)
    bench.finish()
    child = subprocess.run(
        [sys.executable, "-m", "afore.tools.gpu_parts", "ipc-child", driver.export(at).hex()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    expected = str(int(values.astype(np.int64).sum()))
    if child.stdout.strip() != expected:
        raise RuntimeError(f"another process read {child.stdout.strip()!r}, not {expected}: {child.stderr[-2000:]}")
    plain = np.zeros(1 << 20, dtype=np.uint8)
    try:
        driver.register(int(plain.ctypes.data), plain.nbytes, read_only=False)
        driver.unregister(int(plain.ctypes.data))
        pinned = "host memory can be pinned where it lies"
    except Exception as error:
        pinned = f"host memory cannot be pinned where it lies: {error}"
    found = {
        "driver_version": driver.version,
        "stream_priorities": list(driver.priority_range()),
        "copies_in_batches": driver.batches,
        "cuda_ipc": "another process of this machine has read this one's GPU memory",
        "pinned": pinned,
    }
    bench.close()
    return found


def run_ipc_child(exported: str) -> int:
    """Opens another process's megabyte and says the sum of its bytes."""
    driver = load_driver()
    driver.retain_context(0)
    stream = driver.create_stream(0)
    address = driver.open(bytes.fromhex(exported[: 2 * IPC_HANDLE_NBYTES]))
    host = driver.allocate_pinned(1 << 20)
    driver.copy([Span(host, address, 1 << 20)], stream)
    event = driver.create_event()
    driver.record(event, stream)
    driver.synchronise(event)
    import ctypes

    raw = (ctypes.c_uint8 * (1 << 20)).from_address(host)
    print(int(np.ctypeslib.as_array(raw).astype(np.int64).sum()))
    driver.shut(address)
    return 0


def run_kernels() -> dict[str, Any]:
    """Partition and experts on the GPU against the CPU's: exactly, and within tolerances."""
    bench = Bench.open()
    found = {"partition": check_partition(bench), "experts": check_experts(bench)}
    bench.close()
    return found


def run_calibration() -> dict[str, Any]:
    """The profile."""
    bench = Bench.open()
    found = calibrate(bench, GLM_AIR, partial(open_device, 0), tiles=TILES, counts=COPIES, repeats=10)
    bench.close()
    return {**versions(), **found}


def run_overlap() -> dict[str, Any]:
    """Copies beside a row of targets."""
    bench = Bench.open()
    layer = Layer(bench, GLM_AIR, most_pairs=32 * 64)
    found = overlap(layer, 32, 64, 8)
    bench.close()
    return found


def run_glm() -> dict[str, Any]:
    """Tiles and copies of GLM-4.5-Air's experts, and of the bundled model's."""
    bench = Bench.open()
    found: dict[str, Any] = {}
    for size in (GLM_AIR, SMALL):
        layer = Layer(bench, size, most_pairs=64 * 64)
        found[f"{size.name} tiles"] = tile_times(layer, {16: (4, 16, 64), 64: (4, 16, 64)}, repeats=10)
        found[f"{size.name} copies"] = copy_times(layer, (1, 2, 4, 8, 16), layer.experts(64, 64), repeats=10)
    bench.close()
    return found


def run_tests() -> dict[str, Any]:
    """The tests that are marked ``gpu``. Warnings of libraries that the project has not met are none of theirs."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory(prefix="afore-gpu-tests-") as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}"]
        child = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "tests/workers"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise RuntimeError((child.stdout + child.stderr)[-3000:])
        suites = list(ET.parse(report).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}
    if child.returncode != 0:
        raise RuntimeError(f"{counts}\n{child.stdout[-3000:]}")
    return counts


PARTS: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType(
    {
        "device": run_device,
        "kernels": run_kernels,
        "calibration": run_calibration,
        "overlap": run_overlap,
        "glm": run_glm,
        "group": run_group,
        "attention": run_attention,
        "serving": run_serving,
        "hosted": run_hosted,
        "tests": run_tests,
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """One part."""
    name, argument = sys.argv[1:] if argv is None else argv
    if name == "ipc-child":
        return run_ipc_child(argument)
    Path(argument).write_text(json.dumps(PARTS[name]()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    end_with(main)
