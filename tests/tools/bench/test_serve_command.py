"""The whole command: against a small server that lives, refuses or dies, and with a real cluster of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from afore.tools.bench import main
from tests.tools.bench.servers import CARD, Scripted, Scripts, answer, counts, stream, token

# A probe that the command gives up may be accepted by the tests' server in the very moment in which its loop ends.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 300.0
LISTED = {"/v1/models": answer(CARD), "/health": answer({})}
GOOD = stream(token("a"), token("b"), counts(5, 2))


async def bench(scripts: Scripts, *arguments: str) -> int:
    """The command in a thread of its own loop, beside the server's."""
    async with Scripted({**LISTED, **scripts}).running() as server:
        return await asyncio.to_thread(_main_without_signals, ["serve", "--url", server.url, *arguments])


def _main_without_signals(arguments: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        # Python allows signal handlers in the main thread only; that Ctrl-C works is tested with a process.
        patch.setattr("afore.tools.bench.serve.until_signalled", lambda work: work)
        return main(arguments)


@pytest.mark.slow
async def test_a_run_is_printed_with_its_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "requests.jsonl"
    options = ["--num-prompts", "5", "--concurrency", "2", "--slo", "ttft=30s", "--out", str(out)]
    assert await bench({"/v1/completions": GOOD}, *options) == 0
    shown = capsys.readouterr().out
    for text in ("5 of 5", "TTFT", "TPOT", "goodput", "(E2E - TTFT) / (n - 1)", "machine:", "of one core"):
        assert text in shown
    assert "CPU seconds by role" not in shown  # of a server elsewhere nothing is known
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(5))
    assert all(line["output_tokens"] == 2 and len(line["chunks_ms"]) == 2 for line in lines)


@pytest.mark.slow
async def test_json_holds_everything_but_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench({"/v1/completions": GOOD}, "--num-prompts", "3", "--json", "--api-key", "SECRET") == 0
    shown = capsys.readouterr().out
    assert "SECRET" not in shown
    found = json.loads(shown)
    assert (found["completed"], found["output_tokens"], found["server"]["model"]) == (3, 6, "tiny")
    assert {"machine", "options", "formulas", "ttft_ms", "itl_ms"} <= set(found)
    assert found["options"]["num_prompts"] == 3


@pytest.mark.slow
async def test_failures_are_shown_and_a_run_without_answers_fails(capsys: pytest.CaptureFixture[str]) -> None:
    refused = answer({"error": {"message": "queue is full"}}, "429 Too Many Requests")
    assert await bench({"/v1/completions": refused}, "--num-prompts", "3", "--warmup", "0") == 1
    shown = capsys.readouterr().out
    assert "failed 3 × HTTP 429: queue is full" in shown
    assert "0 of 3" in shown
    assert "TPOT " not in shown.split("TTFT:")[0]  # no line for what was not measured
    assert await bench({"/v1/completions": refused}, "--num-prompts", "3") == 2
    assert "warmup: HTTP 429: queue is full" in capsys.readouterr().err


@pytest.mark.slow
async def test_a_server_that_no_longer_serves_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    broken = {
        "/v1/completions": stream(token("a"), {"error": {"message": "role lost: ffn-1"}}),
        "/health": answer({"error": {"message": "role lost: ffn-1"}}, "503 Service Unavailable"),
    }
    options = ["--num-prompts", "4", "--warmup", "0", "--request-rate", "0.01"]
    assert await bench(broken, *options) == 1
    captured = capsys.readouterr()
    assert "requests unsent" in captured.out
    assert "bench: the server died: http://127.0.0.1:" in captured.err
    assert "role lost: ffn-1" in captured.err


@pytest.mark.slow
async def test_a_trace_is_played_with_its_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,9,3\n2023-11-16 18:15:46.6,9999,3\n"
    )
    async with Scripted(
        {**LISTED, "/tokenize": answer({"tokens": [7, 8]}), "/v1/completions": GOOD}
    ).running() as server:
        arguments = ["serve", "--url", server.url, "--arrivals", str(trace), "--warmup", "0"]
        assert await asyncio.to_thread(_main_without_signals, arguments) == 0
        sent = [body for body in server.bodies if "max_tokens" in body]
    assert sorted((len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) for body in sent) == [
        (9, 3, True),
        (61, 3, True),  # the server's context is 64
    ]
    assert "1 of 2 prompts were longer than the model's context" in capsys.readouterr().out


@pytest.mark.slow
async def test_a_full_disk_costs_the_file_and_not_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench({"/v1/completions": GOOD}, "--num-prompts", "3", "--json", "--out", "/dev/full") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["completed"] == 3
    assert "bench: /dev/full: it cannot be written: No space left on device; give a file where" in shown.err


@pytest.mark.slow
async def test_a_picture_of_no_format_is_refused_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench({}, "--plot", "/tmp/picture.bmp") == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("bench: plot: /tmp/picture.bmp is none of")
    assert "sending" not in shown.err


@pytest.mark.slow
async def test_a_models_name_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"/v1/models": answer({"data": [{"id": "[red]m[/x]\x1b[2J"}]}), "/v1/completions": GOOD}
    assert await bench(listed, "--num-prompts", "1", "--warmup", "0") == 0
    assert "[red]m[/x] [2J" in capsys.readouterr().out


@pytest.mark.slow
async def test_a_prompt_beyond_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,999999999,3\n")
    assert await bench({"/v1/models": answer({"data": [{"id": "m"}]})}, "--arrivals", str(trace)) == 2
    assert "bench: arrivals: a prompt has 999999999 tokens" in capsys.readouterr().err


class Command:
    """``python -m afore.tools.bench …`` in a process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "afore.tools.bench", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        )

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


@pytest.mark.slow
async def test_ctrl_c_prints_what_was_measured_so_far() -> None:
    async with Scripted({**LISTED, "/v1/completions": GOOD}).running() as server:
        options = ["--num-prompts", "9", "--request-rate", "0.001", "--warmup", "0", "--json"]
        command = Command("serve", "--url", server.url, *options)
        async with asyncio.timeout(PATIENCE_S):
            await server.asked.wait()
        command.process.send_signal(signal.SIGINT)
        status, out, err = await asyncio.to_thread(command.end)
    assert status == 0, err
    found = json.loads(out)
    assert found["interrupted"] is True
    assert found["unsent"] == 8
    assert found["completed"] + found["unfinished"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--arrivals", "--prompts"])
async def test_ctrl_c_ends_the_wait_for_a_pipe(option: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = Command("serve", "--url", "http://127.0.0.1:1", option, str(pipe))
    async with asyncio.timeout(PATIENCE_S):
        # Opening waits for the reader.
        descriptor = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
    command.process.send_signal(signal.SIGINT)
    status, out, err = await asyncio.to_thread(command.end)
    os.close(descriptor)
    assert (status, out, err) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(("output", "status"), [(">&-", 0), ("> /dev/full", 1)])
async def test_a_run_without_standard_output_still_writes_its_file(output: str, status: int, tmp_path: Path) -> None:
    out = tmp_path / "requests.jsonl"
    async with Scripted({**LISTED, "/v1/completions": GOOD}).running() as server:
        options = ["serve", "--url", server.url, "--num-prompts", "2", "--json", "--out", str(out)]
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", f'exec "$@" {output}', "sh", sys.executable, "-m", "afore.tools.bench", *options,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE,
        )  # fmt: skip
        _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == status, err.decode()
    assert len(out.read_text().splitlines()) == 2
    assert b"Traceback" not in err
    assert (b"bench: standard output: it cannot be written: No space left" in err) == bool(status)


@pytest.mark.slow
@pytest.mark.processes
def test_a_cluster_of_its_own_with_spans_and_cpu_by_role(tmp_path: Path) -> None:
    shape = ["--topology.attention", "1", "--topology.ffn", "2"]
    options = ["--num-prompts", "6", "--max-tokens", "8", "--ignore-eos", "--spans", "--json"]
    status, out, err = Command("serve", *shape, *options).end()
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    assert (found["completed"], found["output_tokens"]) == (6, 48)
    assert set(found["cpu_by_role"]) == {"attention", "ffn", "prefill", "scheduler", "door"}
    assert found["cpu_by_role"]["ffn"]["processes"] == 2
    # Three MoE layers for every step of a microbatch.
    assert found["spans"]["targets"] % 3 == 0
    assert found["spans"]["targets"] >= 21
    assert sum(row["share"] for row in found["spans"]["parts"]) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.processes
def test_against_transformers_tokens_are_equal_and_ratios_are_there() -> None:
    options = ["--num-prompts", "3", "--max-tokens", "6", "--compare", "1/1/1", "--json"]
    status, out, err = Command("serve", "--against", "transformers", *options).end()
    assert status == 0, err
    found = json.loads(out)
    settings = {(row["implementation"], row["threads"]) for row in found["calibration"]}
    assert settings == {(name, threads) for name in ("eager", "batched_mm", "grouped_mm") for threads in (1, 2)}
    ours = found["contestants"]["afore 1/1/1"]
    assert len(ours["rounds"]) == 5
    assert ours["ratio"]["min"] <= ours["ratio"]["median"] <= ours["ratio"]["max"]
    # Padding may turn a near tie; more than one in three would be a defect.
    assert ours["equal_requests"] >= 2
    assert ours["tokens"] == found["contestants"]["transformers"]["tokens"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_role_of_its_own_cluster_ends_the_run_with_what_came_before() -> None:
    shape = ["--topology.attention", "1", "--topology.ffn", "2"]
    # One request at once, the next one long after: somebody must notice although nothing fails meanwhile.
    command = Command(
        "serve", *shape, "--request-rate", "0.0001", "--num-prompts", "2", "--max-tokens", "4", "--warmup", "1"
    )
    assert command.process.stderr is not None
    while "sending 2 requests" not in (line := command.process.stderr.readline()):
        assert line, "it ended before it sent anything"
    roles = psutil.Process(command.process.pid).children(recursive=True)
    (victim,) = [role for role in roles if role.name().endswith("ffn-1") or "ffn-1" in role.cmdline()]
    victim.kill()
    status, out, err = command.end()
    assert status == 1, err
    assert "requests unsent" in out
    assert "bench: the server died: ffn-1: " in err
    assert psutil.wait_procs(roles, timeout=PATIENCE_S)[1] == []
