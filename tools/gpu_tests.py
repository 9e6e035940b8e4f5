"""The tests that are marked ``gpu``, on a machine that may have nothing of a test suite's packages but pytest.

They run under options of their own and without other plugins: those of ``pyproject.toml`` are for what a bare machine lacks.
``tests/gpu_plugin.py`` runs coroutines, and skips what cannot be collected without a package, by that package's name.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afore.tools.gpu_claims import ClaimFailed, NotHere
from afore.tools.gpu_host import python_path

FILES = (
    "tests/workers/device/test_conformance.py",
    "tests/workers/device/cuda/test_kernels.py",
    "tests/workers/test_ffn_cuda.py",
)
"""Those that have any."""
INI = """[pytest]
addopts = --import-mode=importlib --strict-markers -p tests.gpu_plugin -p no:cacheprovider -W default
markers =
    slow: takes more than 0.25 s
    processes: starts real role processes
    gpu: needs an NVIDIA GPU and cuda-python
"""
"""Warnings of libraries that the project has not met are none of the tests'."""
NONE_COLLECTED = 5
"""pytest's status where all that it was asked for is skipped before it is looked at."""
ROOT = Path(__file__).resolve().parent.parent
TAIL = 4000


def run_gpu_tests(
    limit_s: float, *, mark: str = "gpu", files: Sequence[str] = FILES, root: Path = ROOT
) -> dict[str, Any]:
    """Counts, and what was not run and why. Raises ``NotHere`` without pytest, ``ClaimFailed`` where a test fails or none ran."""
    if importlib.util.find_spec("pytest") is None:
        raise NotHere("pytest is not installed: the other parts show what they can without")
    with tempfile.TemporaryDirectory(prefix="afore-gpu-tests-") as folder:
        ini, report = Path(folder) / "pytest.ini", Path(folder) / "report.xml"
        ini.write_text(INI)
        options = ["-q", "-m", mark, "-c", str(ini), f"--rootdir={root}", f"--junitxml={report}"]
        with (Path(folder) / "said").open("w+b") as said:
            child = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *files],
                cwd=root,
                env={**python_path(os.environ, ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            try:
                status: int | None = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                child.kill()
                child.wait(5)
            said.seek(0)
            text = said.read().decode(errors="replace")
        print(text, flush=True)
        found = _counts(report) if report.exists() else {}
    if status is None:
        raise ClaimFailed(f"not done within {limit_s:.0f} s:\n{text[-TAIL:]}", found)
    if status not in (0, NONE_COLLECTED) or not found:
        raise ClaimFailed(f"pytest ended with status {status}:\n{text[-TAIL:]}", found)
    if not found["passed"]:
        raise ClaimFailed("no test ran", found)
    return found


def _reason(skipped: ET.Element) -> str:
    """Why; of a whole module pytest tells it in another place."""
    message = skipped.get("message", "")
    return (
        message if message != "collection skipped" else (skipped.text or "").rpartition("Skipped: ")[2].strip("')\n ")
    )


def _counts(report: Path) -> dict[str, Any]:
    cases = [case for suite in ET.parse(report).getroot().iter("testsuite") for case in suite.iter("testcase")]
    ends = [next((part for part in case if part.tag in ("failure", "error", "skipped")), None) for case in cases]
    tags = Counter("passed" if end is None else end.tag for end in ends)
    reasons = Counter(_reason(end) for end in ends if end is not None and end.tag == "skipped")
    return {
        "passed": tags["passed"],
        "failures": tags["failure"],
        "errors": tags["error"],
        "skipped": tags["skipped"],
        "not_run": [{"cases": count, "why": reason} for reason, count in reasons.items()],
    }
