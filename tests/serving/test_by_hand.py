"""Roles started by hand from a topology file, one process each, in any order: as a user does, with what goes wrong."""

from __future__ import annotations

import http.server
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from tests.serving.launcher import PATIENCE_S, ROOT, Launcher

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ATTACH = ROOT / "docs" / "examples" / "attach.py"
STARTED_S = 400.0
"""Every process imports torch for itself: on a busy machine of two cores that takes minutes."""
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """A test that fails must not leave its processes to the tests after it."""
    yield
    while Launcher.started:
        launcher = Launcher.started.pop()
        if launcher.process.returncode is None:
            launcher.kill_all()
            launcher.process.communicate()


class Hands:
    """A topology file with a rendezvous of its own, and the roles that are started from it."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.cluster = f"bh{os.getpid()}_{next(_numbers)}"
        self.folder = folder
        self.file = self.write("topology.yaml", "attention: 1\nffn: 2\n")

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(f"{text}rendezvous: 127.0.0.1:{self.port}\n")
        return file

    def start(self, role: str, *more: str, file: Path | None = None) -> Launcher:
        named = ("--cluster", self.cluster) if "door" in role else ()
        patient = ("--times.join_s", str(STARTED_S))
        return Launcher("--role", role, "--topology", str(file or self.file), *named, *patient, *more)

    def left(self) -> list[str]:
        """What stands in /dev/shm, and whether anybody listens."""
        left = sorted(name for name in os.listdir("/dev/shm") if self.cluster in name)
        with socket.socket() as probe:
            return left + (["a listener"] if probe.connect_ex(("127.0.0.1", self.port)) == 0 else [])

    def ask(self, prompt: str) -> str:
        """An answer through the library, which then ends the cluster."""
        done = subprocess.run(
            [sys.executable, str(ATTACH), self.cluster, prompt, "--stop"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def greedy(prompt: str, count: int) -> str:
    """What ``transformers`` says."""
    tokenizer = Tokenizer(bundled_model_path())
    return tokenizer.decode(Reference(bundled_model_path()).generate(tokenizer.encode(prompt), count))


def until_it_says(process: Launcher, words: str) -> None:
    """Reads standard error up to a line with these words."""
    assert process.process.stderr is not None
    lines: list[str] = []
    while not lines or words not in lines[-1]:
        lines.append(process.process.stderr.readline())
        assert lines[-1], lines


@pytest.fixture
def hands(tmp_path: Path) -> Hands:
    return Hands(tmp_path)


@pytest.mark.parametrize(
    "order",
    [
        ("door", "ffn", "scheduler,attention", "ffn,prefill"),
        ("ffn,ffn", "prefill", "attention,scheduler", "door"),
    ],
    ids=["door first", "door last"],
)
def test_in_any_order_they_answer_as_the_model_does_and_end(hands: Hands, order: tuple[str, ...]) -> None:
    prompt = bundled_prompts()[0].prompt
    started = {(role, number): hands.start(role) for number, role in enumerate(order)}
    for (role, _), process in started.items():
        process.wait_for("curl http" if "door" in role else "is ready (pid ", STARTED_S)
    assert hands.ask(prompt).rstrip("\n") == greedy(prompt, 24)
    names = set()
    for process in started.values():
        status, out, err = process.end()
        assert status == 0, err
        assert "the cluster ended" in out
        names |= {line.split()[0] for line in out.splitlines() if "is ready (pid" in line}
    assert names == {"door-0", "scheduler-0", "ffn-0", "ffn-1", "attention-0", "prefill-0"}
    assert hands.left() == []


def test_what_does_not_belong_is_refused_the_dead_are_replaced_and_a_loss_is_named(hands: Hands) -> None:
    door = hands.start("door,scheduler,attention,prefill")
    door.wait_for("rendezvous at", STARTED_S)
    first = hands.start("ffn", "--rank", "1", "--log", "error")
    (pid,) = [p.pid for p in first.processes()[:1]]
    # The hub has it once it is not among the missing any more.
    until_it_says(first, "ffn 1/2")
    another = hands.write("another.yaml", "attention: 1\nffn: 3\n")
    refused = {
        "topology.ffn: this process was given 3": hands.start("ffn", file=another),
        "rank: ffn-1 is taken": hands.start("ffn", "--rank", "1"),
        f"the cluster {hands.cluster!r} (door's pid {door.process.pid}) has that port": hands.start("door"),
    }
    for words, process in refused.items():
        status, _, err = process.end(STARTED_S)
        assert (status, words in err.splitlines()[-1]) == (2, True), err
        assert "Traceback" not in err
    os.kill(pid, signal.SIGKILL)
    first.end()
    replacement = hands.start("ffn", "--rank", "1")
    last = hands.start("ffn")
    door.wait_for("curl http", STARTED_S)
    replacement.wait_for("ffn-1 is ready", STARTED_S)
    last.wait_for("ffn-0 is ready", STARTED_S)
    psutil.Process(replacement.process.pid).kill()
    for process in (door, last):
        status, _, err = process.end()
        assert status == 1
        ended = f"afore: ffn-1: its process ended (pid {replacement.process.pid}); start the cluster again"
        assert err.splitlines()[-1] == ended
        assert "Traceback" not in err
    replacement.end()
    assert [name for name in hands.left() if "ffn-1" not in name and "listener" not in name] == []


def test_ctrl_c_while_waiting_is_quiet_and_a_door_that_never_comes_is_named(hands: Hands) -> None:
    quiet = hands.start("ffn")
    alone = hands.start("scheduler", "--times.join_s", "2")
    until_it_says(quiet, "waiting for the door")
    quiet.signal(signal.SIGINT)
    status, out, err = quiet.end()
    assert (status, out, err) == (0, "", "")
    status, _, err = alone.end()
    assert status == 1
    assert f"afore: peer 127.0.0.1:{hands.port}: no door came there in 2 s; start one (--role door)" in err


def test_a_port_that_something_else_has_is_named_in_one_line(hands: Hands) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", hands.port), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        door, role = hands.start("door"), hands.start("ffn")
        status, _, err = door.end()
        assert status == 2
        assert f"cannot listen at 127.0.0.1:{hands.port}: something that is no AFORE rendezvous" in err.splitlines()[-1]
        status, _, err = role.end()
        assert status == 2
        assert "does not answer as a rendezvous does" in err.splitlines()[-1]
    finally:
        server.shutdown()
        server.server_close()
    assert hands.left() == []
