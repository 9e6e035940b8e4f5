"""The launcher as a command: the demo, orderly and disorderly ends, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afore.core.errors import ConfigError
from afore.launch import LOADING, main
from afore.models.bundle import bundled_model_path
from afore.serving import demo
from afore.serving.supervisor import Supervisor
from tests.serving.launcher import PATIENCE_S, ROOT, Launcher, gone, run
from tests.workers.device.cuda.presence import missing_gpu

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SMALL = ("--topology.attention", "1", "--topology.ffn", "2")
GONE_S = 5.0
PROMPTS = (("short", "Question:"), ("long", "word " * 3000))
KEYS = {
    "requests",
    "completed",
    "tokens",
    "tokens_per_second",
    "ttft_ms",
    "itl_ms",
    "imbalance",
    "migration",
    "policy",
    "topology",
}


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """A test that fails must not leave its processes to the tests after it."""
    yield
    while Launcher.started:
        launcher = Launcher.started.pop()
        if launcher.process.returncode is None:
            launcher.kill_all()
            launcher.process.communicate()


def said(stderr: str) -> list[str]:
    """The lines of standard error, but for the one that says at once what takes so long."""
    return [line for line in stderr.splitlines() if line != LOADING]


def test_demo_prints_the_table_and_writes_the_keys(tmp_path: Path) -> None:
    results = {}
    for policy in ("afore", "static"):
        out = tmp_path / f"{policy}.json"
        launcher = Launcher("--demo", "--json", str(out), "--policy", policy)
        status, stdout, stderr = launcher.end()
        assert status == 0, stderr
        assert stderr.splitlines()[0] == LOADING
        assert launcher.leftovers() == []
        result = results[policy] = json.loads(out.read_text())
        assert set(result) >= KEYS
        assert result["requests"] == result["completed"] == 32
        assert result["tokens"] == sum(len(answer["token_ids"]) for answer in result["answers"])
        assert result["ttft_ms"]["p50"] > 0
        assert result["itl_ms"]["p95"] >= result["itl_ms"]["p50"] > 0
        for text in ("tile imbalance", "max over FFN workers", "nothing of throughput on GPUs"):
            assert text in " ".join(stdout.split())
    afore, static = results["afore"], results["static"]
    assert static["migration"]["copies"] == 0
    assert [a["token_ids"] for a in afore["answers"]] == [a["token_ids"] for a in static["answers"]]
    assert afore["migration"]["copies"] > 0
    tile = afore["imbalance"]["tile"]
    assert tile["bound"] <= tile["after"] < tile["before"]


def test_one_prompt_prints_its_answer_and_no_other_where_processes_wait_otherwise() -> None:
    answers = []
    for strategy in ("fd", "spin-then-fd"):
        asked = ("--prompt", "Question: What is 3 * 4?\nAnswer:", "--max_new_tokens", "8")
        status, stdout, stderr = run(*SMALL, *asked, "--idle.strategy", strategy, "--idle.cpu_share", "1")
        assert status == 0, stderr
        answers.append(stdout.strip().splitlines()[-1])
    assert len(answers[0]) > 0
    assert answers[0] == answers[1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="the printed line is curl's")
def test_it_names_every_role_and_prints_a_command_that_works() -> None:
    launcher = Launcher(*SMALL)
    line = launcher.wait_for("curl http")
    for name in ("scheduler-0", "ffn-0", "ffn-1", "attention-0", "prefill-0", "door-0"):
        assert sum(seen.startswith(f"{name} is ready (pid ") for seen in launcher.seen) == 1
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert json.loads(done.stdout)["choices"][0]["text"]
    launcher.signal(signal.SIGINT)
    assert launcher.end()[0] == 0
    assert launcher.leftovers() == []


def test_a_port_that_is_taken_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, stdout, stderr = run(*SMALL, "--port", str(port))
    assert status == 2
    assert stdout == ""
    assert len(said(stderr)) == 1
    assert "serve.port" in stderr
    assert str(port) in stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["at once", "importing", "starting", "ready", "answering"])
def test_a_signal_at_any_moment_ends_everything(signum: signal.Signals, moment: str) -> None:
    arguments = ["--demo"] if moment == "answering" else []
    launcher = Launcher(*SMALL, *arguments)
    if moment == "importing":
        launcher.wait_for("memory of")
    elif moment == "starting":
        launcher.wait_for("memory of")
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.process.wait(timeout=2.5)
    elif moment in ("ready", "answering"):
        launcher.wait_for("ready after")
    processes = launcher.processes()
    launcher.signal(signum)
    assert gone(processes, GONE_S) == []
    status, stdout, stderr = launcher.end(1.0)
    if moment == "at once" and stderr.startswith("Fatal Python error: init_"):
        return  # the interpreter was not up yet, and says so itself
    assert "Traceback" not in stderr
    assert moment != "ready" or stdout.splitlines()[-1] == "the cluster ended"
    # Before Python has installed the handlers the signal's own default holds.
    assert status == 0 or (moment == "at once" and status == -signum), stderr
    assert launcher.leftovers() == []


def test_without_its_environment_it_says_what_to_do() -> None:
    # -S: an interpreter that has Python's own modules and no others.
    command = [sys.executable, "-S", "-m", "afore.launch", "--demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert "has no module " in done.stderr
    assert ". .venv/bin/activate" in done.stderr
    assert "pip install afore" in done.stderr


def test_after_kill_9_of_everything_the_next_start_sweeps() -> None:
    launcher = Launcher(*SMALL)
    launcher.wait_for("ready after")
    processes = launcher.processes()
    launcher.kill_all()
    assert gone(processes, GONE_S) == []
    launcher.end(1.0)
    assert launcher.leftovers() != []
    assert run(*SMALL, "--prompt", "Question:", "--max_new_tokens", "2")[0] == 0
    assert launcher.leftovers() == []


def test_the_roles_end_when_the_launcher_is_killed() -> None:
    launcher = Launcher(*SMALL)
    launcher.wait_for("ready after")
    processes = launcher.processes()
    launcher.process.kill()
    assert gone(processes, GONE_S) == []
    launcher.end(1.0)


@pytest.mark.parametrize("role", ["ffn-1", "attention-0", "scheduler-0", "prefill-0", "door-0"])
def test_a_killed_role_is_named_and_ends_the_run(role: str) -> None:
    launcher = Launcher(*SMALL, "--log", "error")
    launcher.wait_for("ready after")
    processes = launcher.processes()
    (victim,) = [process for process in launcher.roles() if process.name().endswith(role) or role in process.cmdline()]
    victim.kill()
    status, _, stderr = launcher.end(10.0)
    assert status == 1
    *_, said = stderr.splitlines()
    assert said.startswith(f"afore: {role}: "), stderr
    assert f"killed by SIGKILL (pid {victim.pid}); start the cluster again" in said or role == "door-0"
    assert "/dev/shm" not in said
    assert gone(processes, GONE_S) == []
    assert launcher.leftovers() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topolgy.ffn", "3"], ["topolgy.ffn", "did you mean topology.ffn"]),
        (["--policy", "afor"], ["policy", "afor", "afore"]),
        (["--policy", "no.such.module:Policy"], ["policy", "no.such.module"]),
        (["--topology.attention", "0"], ["topology.attention", "0"]),
        (["--model", "/nonexistent"], ["/nonexistent", "no such directory"]),
        (["--topology.fabric", "loopback"], ["topology.fabric", "shm"]),
        (["--prompts", "/nonexistent.jsonl", "--demo"], ["prompts", "/nonexistent.jsonl"]),
        (["--json", "/nonexistent/out.json", "--demo"], ["json", "/nonexistent/out.json"]),
        (["--config", "/nonexistent.yaml"], ["/nonexistent.yaml"]),
        (["--batch.max_model_len", "99999"], ["batch.max_model_len", "99999"]),
        (["--role", "fn"], ["role", "did you mean ffn"]),
        (["--trace", "/dev/null", "--demo"], ["trace", "/dev/null"]),
        (["--device.name", "emulated"], ["device.name", "virtual time"]),
        (["--device", "cuda", "--device.verify_copies", "true"], ["device.verify_copies", "--device cuda"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_refused_in_one_line(arguments: list[str], words: list[str]) -> None:
    status, stdout, stderr = run(*arguments)
    assert status == 2, stderr
    assert len(said(stderr)) == 1
    assert stdout == ""
    for word in words:
        assert word in stderr


def test_without_a_gpu_nothing_is_started_to_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No fork server, which would compile kernels for minutes on a fresh machine."""
    if missing_gpu() == "":
        pytest.skip("there is a GPU here")

    async def started(self: Supervisor) -> Supervisor:
        raise AssertionError("something was started")

    monkeypatch.setattr(Supervisor, "__aenter__", started)
    for arguments in (
        ["--device", "cuda", "--demo"],
        ["--device.attention", "cuda"],
        ["--device", "cuda", "--role", "ffn"],
    ):
        assert main(arguments) == 2
        said_ = capsys.readouterr()
        assert said_.out == ""
        (line,) = said_.err.splitlines()
        assert line.startswith("afore: GPU: this machine has ")


def test_without_a_gpu_one_line_says_so() -> None:
    if missing_gpu() == "":
        pytest.skip("there is a GPU here")
    status, stdout, stderr = run("--device", "cuda", "--demo")
    assert status == 2, stderr
    (line,) = said(stderr)
    assert line.startswith("afore: GPU: ")
    assert "--device cpu" in line
    assert stdout == ""


@pytest.mark.parametrize("role", ["prefill-0", "attention-0"])
def test_a_role_that_stands_still_is_named_and_ends_the_run(role: str) -> None:
    launcher = Launcher(*SMALL, "--demo", "--times.step_s", "3")
    launcher.wait_for("memory of")
    launcher.wait_for("ready after")
    (victim,) = [process for process in launcher.roles() if process.name() == role]
    victim.suspend()
    status, _, stderr = launcher.end(30.0)
    assert status == 1
    assert f"afore: {role}: " in stderr
    assert launcher.leftovers() == []


def test_a_result_never_replaces_what_is_no_file(tmp_path: Path) -> None:
    device, link, readonly = tmp_path / "full", tmp_path / "link", tmp_path / "readonly.json"
    link.symlink_to(tmp_path / "aim.json")
    readonly.write_text("keep me")
    readonly.chmod(0o400)
    os.mkfifo(device)
    reader = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    demo.write_json(str(device), {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    assert device.is_fifo()
    demo.write_json(str(link), {"a": 1})
    assert link.is_symlink()
    assert json.loads((tmp_path / "aim.json").read_text()) == {"a": 1}
    with pytest.raises(ConfigError, match="cannot be written"):
        demo.check_writable(str(readonly))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aim.json", "full", "link", "readonly.json"]


def test_a_prompt_that_is_too_long_is_refused_in_one_line() -> None:
    status, _, stderr = run(*SMALL, "--prompt", "word " * 3000)
    assert status == 2
    assert len(said(stderr)) == 1
    assert "2048" in stderr


def test_of_several_prompts_only_the_one_that_is_too_long_fails(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"id": name, "prompt": text}) for name, text in PROMPTS))
    status, stdout, stderr = run(*SMALL, "--demo", "--prompts", str(file), "--max-new-tokens", "2")
    assert status == 1
    assert "1 of 2 answered" in stdout
    assert said(stderr)[0].startswith("afore: prompt long: ")
    assert len(said(stderr)) == 1


def test_a_policy_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    source = "from afore.scheduler.policies.static import Static\n\n\nclass Broken(Static):\n"
    source += "    def __init__(self, context):\n        raise KeyError('no such knob')\n"
    (tmp_path / "broken_policy.py").write_text(source)
    launcher = Launcher(*SMALL, "--policy", "broken_policy:Broken", "--demo", cwd=tmp_path)
    status, stdout, stderr = launcher.end()
    assert (status, stdout, len(said(stderr))) == (2, "", 1), stderr
    assert "policy: broken_policy:Broken cannot be made: its constructor raised KeyError: 'no such knob'" in stderr


def test_too_few_open_files_are_refused_in_one_line() -> None:
    limited = f"ulimit -n 64 && exec {sys.executable} -m afore.launch --demo"
    done = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, len(said(done.stderr))) == (2, "", 1), done.stderr
    assert "file descriptors: this shell allows 64 open files" in done.stderr
    assert "ulimit -n" in done.stderr


def broken_checkpoint(directory: Path, how: str) -> Path:
    """The bundled model with one thing wrong."""
    shutil.copytree(bundled_model_path(), directory)
    config = json.loads((directory / "config.json").read_text())
    weights = directory / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "no weights":
        weights.unlink()
    elif how == "family":
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    elif how == "quantised":
        config["quantization_config"] = {"quant_method": "fp8"}
    elif how == "shapes":
        config["moe_intermediate_size"] = 64
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", ["model.safetensors"]),
        ("no weights", ["safetensors"]),
        ("family", ["llama", "glm4_moe"]),
        ("quantised", ["fp8"]),
        ("shapes", ["shape"]),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused_in_one_line(tmp_path: Path, how: str, words: list[str]) -> None:
    model = broken_checkpoint(tmp_path / "model", how)
    launcher = Launcher("--model", str(model), "--demo")
    processes = launcher.processes()
    status, stdout, stderr = launcher.end()
    assert status == 2, stderr
    assert stdout == ""
    assert len(said(stderr)) == 1
    for word in [str(model), *words]:
        assert word in stderr
    assert gone(processes, GONE_S) == []
    assert launcher.leftovers() == []


def test_the_default_topology_stays_below_two_gibibytes() -> None:
    launcher = Launcher()
    launcher.wait_for("ready after")
    pss = sum(process.memory_full_info().pss for process in launcher.processes())
    launcher.signal(signal.SIGTERM)
    assert launcher.end()[0] == 0
    assert pss < 2 * 2**30


@pytest.mark.skipif(os.geteuid() != 0, reason="a private /dev/shm takes a mount namespace, which takes root")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("size=8m", ["/dev/shm", "needs", "8.0 MiB are free", "batch.kv_blocks"]),
        ("size=200m,ro", ["/dev/shm", "Read-only", "remount"]),
    ],
)
def test_no_room_or_no_permission_in_shared_memory_is_refused_in_one_line(options: str, words: list[str]) -> None:
    mounted = f"mount -t tmpfs -o {options} tmpfs /dev/shm && exec {sys.executable} -m afore.launch --demo"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2, done.stderr
    assert len(said(done.stderr)) == 1
    for word in words:
        assert word in done.stderr
