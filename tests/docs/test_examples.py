"""The examples and the README's script, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from afore.models.bundle import bundled_model_path
from tests.docs.pages import ROOT, Page
from tests.serving.launcher import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PATIENCE_S = 180.0
EXAMPLES = ROOT / "docs" / "examples"
ANSWER = "The number of people in the first and second is 3 *"
"""Greedy decoding of the bundled model; ``transformers`` gives the same."""


def run(script: Path, *arguments: str) -> str:
    """Standard output of a script that ends well and complains of nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def ratios(line: str) -> tuple[float, ...]:
    return tuple(float(number) for number in re.findall(r"\d+\.\d+", line))


def test_quickstart_streams_an_answer_and_its_plans() -> None:
    *lines, answer, imbalance, copies = run(EXAMPLES / "quickstart.py").splitlines()
    tokens = [line for line in lines if line.startswith("token ")]
    plans = [line for line in lines if line.startswith("plan ")]
    assert len(tokens) == 12
    assert answer == f"answer: {ANSWER}"
    assert plans
    assert all(re.search(r"most loaded worker \d+ → \d+ tiles \(bound \d+\); expert \d+ → ffn-[01]", p) for p in plans)
    before, after, bound = ratios(imbalance)
    assert bound <= after < before
    assert int(copies.split()[-1]) >= len(plans)
    # Plans are seen while the answer grows, not after it.
    assert lines.index(plans[0]) < lines.index(tokens[-1])


def test_a_policy_of_ones_own_moves_experts_in_real_processes() -> None:
    *processes, totals, imbalance, pairs = run(EXAMPLES / "custom_policy.py").splitlines()
    spans = {line.split()[0]: dict(re.findall(r"(\w+) (\d+)", line.partition(" ")[2])) for line in processes}
    assert set(spans) == {"attention-0", "ffn-0", "ffn-1", "ffn-2", "prefill-0", "scheduler-0"}
    assert int(spans["scheduler-0"]["plan"]) > 0
    assert "copy" not in spans["ffn-2"]  # it has no redundant slots
    assert re.fullmatch(r"policy relieve-busiest: 128 tokens, [1-9]\d* expert copies", totals)
    before, after = ratios(imbalance)
    assert after < before
    on_replicas, of_all = (int(number) for number in re.findall(r"\d+", pairs))
    assert 0 < on_replicas < of_all


def test_the_readme_script_runs(tmp_path: Path) -> None:
    (source,) = Page("README.md").code("python")
    script = tmp_path / "script.py"
    script.write_text(source)
    out = run(script)
    assert ANSWER.split(" is ")[0] in out
    assert "'tile': {'before': " in out


def test_attach_reaches_a_running_cluster_and_ends_it() -> None:
    launcher = Launcher("--topology.attention", "1", "--topology.ffn", "2")
    launcher.wait_for("ready after")
    out = run(EXAMPLES / "attach.py", launcher.cluster, "Question: What is 3 * 4?\nAnswer:", "--stop")
    assert ANSWER in out
    status, _, stderr = launcher.end(20.0)
    assert status == 1, stderr  # the launcher did not end it
    assert launcher.leftovers() == []


def test_examples_need_no_path_of_this_machine() -> None:
    for example in EXAMPLES.glob("*.py"):
        text = example.read_text()
        assert not re.search(r"(?<!\w)/(home|root|tmp|work|usr)/", text), example
    assert bundled_model_path().is_dir()
