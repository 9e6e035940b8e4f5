"""A cluster on two hosts with nothing but a network between them: attention, prefill, engine here, experts, scheduler there."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from tests.serving.launcher import Launcher
from tests.serving.namespaces import Host, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.processes]

STARTED_S = 400.0
PORT = 29600
ASKING = Path(__file__).with_name("asking.py")


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    with two_hosts(request) as both:
        try:
            yield both
        finally:
            while Launcher.started:
                launcher = Launcher.started.pop()
                if launcher.process.returncode is None:
                    launcher.kill_all()
                    launcher.process.communicate()


def ask(host: Host, url: str, prompt: str, count: int) -> str:
    """The model's greedy answer, asked by a client on ``host``."""
    done = subprocess.run(
        host.command(sys.executable, str(ASKING), url, prompt, str(count)), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_hosts_answer_as_the_model_does_and_leave_nothing(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    here, there = hosts
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"attention: 1\nffn: 2\nredundant_slots: 4\nrendezvous: {here.address}:{PORT}\nrendezvous_remote: true\n"
        f"secret_file: {secret}\n"
    )
    common = ("--topology", str(file), "--times.join_s", str(STARTED_S), "--planner.tile_tokens", "1")

    def start(host: Host, role: str) -> Launcher:
        # One kernel runs both hosts: on two machines the node's name is its own.
        return Launcher("--role", role, "--topology.node", host.namespace, *common, prefix=host.command())

    door = start(here, "door,attention,prefill")
    experts = [start(there, "scheduler,ffn"), start(there, "ffn")]
    url = door.wait_for("serving tiny-glm4moe at", STARTED_S).split(" at ")[1].split(";")[0]
    for process in experts:
        process.wait_for("is ready (pid", STARTED_S)
    tokenizer = Tokenizer(bundled_model_path())
    reference = Reference(bundled_model_path())
    for prompt in [prompt.prompt for prompt in bundled_prompts()][:4]:
        expected = tokenizer.decode(reference.generate(tokenizer.encode(prompt), 24))
        assert ask(here, url, prompt, 24) == expected
    door.signal(signal.SIGTERM)
    for process in (door, *experts):
        status, out, err = process.end()
        assert status == 0, err
        assert "the cluster ended" in out
    cluster = f"at_{PORT}"
    assert [name for name in os.listdir("/dev/shm") if cluster in name] == []
