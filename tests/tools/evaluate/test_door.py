"""What a user may do to an evaluation: wrong files, results that somebody changed, an end in the midst of it."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from afore.core.errors import AforeError, CheckpointError, ConfigError
from afore.models.config import read_spec
from afore.tools.bench.files import check_file
from afore.tools.evaluate.cell import Cell, run_cell
from afore.tools.evaluate.demand import StoredDemand, routing_digest
from afore.tools.evaluate.figure import vary
from afore.tools.evaluate.mechanisms import main as mechanisms
from afore.tools.evaluate.profiles import parse_override, with_overrides
from afore.tools.evaluate.progress import ProgressLine
from afore.tools.evaluate.store import _read, to_bytes
from afore.workers.device.hardware import read_profile

TINY = Cell(policy="static", attention=1, ffn=2, prefill=1, slots=1, layers=1, rows=4, warm=1, steps=1)


@pytest.mark.parametrize(
    "override",
    [
        "shape.experts=0",
        "shape.experts=12.5",
        "shape.experts=1e6",
        "shape.top_k=129",
        "shape.top_k=2.5",
        "shape.layers=0",
        "shape.dense_layers=46",
        "wires.link_gb_per_s=0",
        "chip.tile_tokens=1e300",
        "chip.tflops",
    ],
)
def test_an_override_is_held_to_what_a_profile_is(override: str) -> None:
    with pytest.raises(ConfigError, match=f"--set.*{override.partition('=')[0]}"):
        with_overrides(read_profile(TINY.profile), [parse_override(override)])


@pytest.mark.parametrize("name", [",", "a\0b", "folder", "pipe", "nowhere.npz"])
def test_routing_that_is_no_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="--routing"):
        routing_digest(name if name == "," else str(tmp_path / name))


def test_a_page_that_could_not_be_written_is_refused_before_any_run(tmp_path: Path) -> None:
    check_file("--page", None)
    check_file("--page", str(tmp_path / "new.md"))
    for wrong in (tmp_path, tmp_path / "nowhere" / "new.md"):
        with pytest.raises(ConfigError, match="--page"):
            check_file("--page", str(wrong))


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found = json.loads(to_bytes(run_cell(TINY)))
    assert isinstance(found, dict)
    return found


def test_a_cell_that_fails_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each of its requests fails: none is reported as lost, with a traceback, when the collector comes to it."""
    another = StoredDemand(np.ones((9, 1, 4), np.int32), microbatches=3, top_k=8, source="of 4 experts")
    with pytest.raises(AforeError):
        run_cell(TINY, demand=another)
    gc.collect()
    assert "never retrieved" not in caplog.text


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]
    return [path]


def test_a_result_that_somebody_changed_is_run_again(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / f"{TINY.key()}.json"
    path.write_bytes(to_bytes(result))
    assert _read(tmp_path, TINY, None) == result
    read = {
        "imbalance",
        "copies",
        "tokens_per_s",
        "itl_p50_ms",
        "itl_p95_ms",
        "layers",
        "targets",
        "demand",
        "layers_imbalance",
    }
    for leaf in _leaves({name: result[name] for name in read}):
        for wrong in (None, "x", float("nan")):
            broken = copy.deepcopy(result)
            place = broken
            for part in leaf[:-1]:
                place = place[part]
            place[leaf[-1]] = wrong
            if leaf[0] == "demand" and wrong == "x":
                continue
            path.write_text(json.dumps(broken))
            assert _read(tmp_path, TINY, None) is None, (leaf, wrong)
    for text in ("", "[]", "null", '{"format": 4}', "\0", json.dumps(result)[:-20]):
        path.write_text(text)
        assert _read(tmp_path, TINY, None) is None


def test_each_stage_of_a_search_estimates_anew() -> None:
    out = io.StringIO()
    line = ProgressLine(out, read_profile(TINY.profile))
    for _ in range(2):
        line.to_run([TINY, vary(TINY, seed=1)])
        line.began(TINY, 0, 2)
        line.finished(TINY)
        assert "left" not in out.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [["--layers", "0"], ["--microbatches", "-1"], ["--steps", "x"], ["--slots", "-2"]]
)
def test_mechanisms_refuse_sizes_that_are_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert mechanisms(arguments) == 2
    assert f"mechanisms: {arguments[0].lstrip('-')}: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--layers", "99"], ["--profile", "abacus"], ["--microbatches", "99999"]])
def test_mechanisms_refuse_what_cannot_run_before_anything_does(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mechanisms([*arguments, "--only", "static", "--out", str(tmp_path)]) == 2
    assert "0/" not in capsys.readouterr().err
    assert not (tmp_path / "cells").exists()


@pytest.mark.parametrize("content", ['{"a":' * 100_000, '{"num_hidden_layers": 1000000000, "model_type": "qwen3_moe"}'])
def test_a_model_out_of_all_measure_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_spec(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_when_the_command_is_ended(how: signal.Signals, tmp_path: Path) -> None:
    # Short: a process's socket lies there, whose name may have some hundred characters at most.
    temporary = Path(tempfile.mkdtemp(prefix="door-"))
    sizes = [
        "--layers",
        "2",
        "--rows",
        "200",
        "--steps",
        "50",
        "--jobs",
        "2",
        "--no-pictures",
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "afore.tools.evaluate", "--only", "fig3", "--workloads", "chat", *sizes],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    children: list[psutil.Process] = []
    try:
        assert process.stderr is not None
        while "1/4" not in process.stderr.readline():
            assert process.poll() is None
        ends_s = time.monotonic() + 150
        command = psutil.Process(process.pid)
        while len(children := command.children(recursive=True)) < 4:  # two that run cells, and what started them
            assert time.monotonic() < ends_s
        process.send_signal(how)
        _, errors = process.communicate(timeout=150)
        assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
        if how == signal.SIGKILL:
            assert "Traceback" not in errors
        else:  # no leaked semaphore either, and nothing in the folder for what is temporary
            assert "\n".join(line for line in errors.splitlines() if not line.startswith("[")) == ""
            assert list(temporary.iterdir()) == []
        assert not psutil.wait_procs(children, timeout=150)[1]
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(temporary, ignore_errors=True)
        for one in children:
            if one.is_running():
                one.kill()
