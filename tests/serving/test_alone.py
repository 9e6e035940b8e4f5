"""A role process in an interpreter of its own: who becomes one, and that it lives and ends as a forked one does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from afore.core.config import DeviceOptions, RunConfig
from afore.serving.alone import is_alone
from afore.serving.spec import ProcessSpec

FORK = """
import json, os, sys
from afore.serving.alone import become_alone
become_alone(json.loads(sys.stdin.read()), int(sys.argv[1]))
"""


def described(directory: Path, *, device: DeviceOptions, role: str = "ffn") -> ProcessSpec:
    config = RunConfig(device=device)
    return ProcessSpec(
        name=f"{role}-0",
        cluster="alone",
        roles=((role, 0),),
        run_directory=str(directory),
        log_level="error",
        config=replace(config, times=replace(config.times, join_s=60.0)),
    )


def test_only_workers_on_gpus_need_it(tmp_path: Path) -> None:
    gpu, cpu = DeviceOptions(name="cuda"), DeviceOptions()
    assert is_alone(described(tmp_path, device=gpu).to_json())
    assert not is_alone(described(tmp_path, device=cpu).to_json())
    assert is_alone(described(tmp_path, device=gpu, role="attention").to_json())
    assert not is_alone(described(tmp_path, device=gpu, role="scheduler").to_json())


@pytest.mark.slow
@pytest.mark.processes
def test_it_has_the_same_number_and_ends_with_its_lifeline(tmp_path: Path) -> None:
    """It waits for a hub that never comes; its description is on no command line."""
    spec = described(tmp_path, device=DeviceOptions(), role="attention")
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", FORK, str(read)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[read]
    ) as child:
        os.close(read)
        assert child.stdin is not None
        child.stdin.write(json.dumps(spec.to_json()).encode())
        child.stdin.close()
        process = psutil.Process(child.pid)
        while process.name() != "attention-0":
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended with {child.wait(0.1)}")
        assert "alone" in process.cmdline()[2]
        assert not any(str(tmp_path) in argument for argument in process.cmdline())
        os.close(write)
        assert child.wait(30) == 0
