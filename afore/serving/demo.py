"""The main job: answer prompts through a running cluster, show a few as they grow, sum up what it took."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from afore.core.control import Status
from afore.core.errors import ConfigError, HostError, RequestError, why_not
from afore.core.metrics import FORMULAS, percentiles
from afore.models.bundle import Prompt, bundled_prompts

SHOWN_PER_DOMAIN = 1
SHOWN_MOST = 4
PROMPTS_LIMIT = 64 << 20
"""Longest file of prompts, in bytes."""
LAPTOP = (
    "On one machine these figures show that the mechanism works (loads even out, copies run under earlier targets, tokens stay the"
    " same); they say nothing of throughput on GPUs, where experts are a thousand times larger and workers do not share cores."
)


class TokenLike(Protocol):
    """What ``Cluster.generate`` yields."""

    @property
    def id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def at_ns(self) -> int: ...
    @property
    def finish_reason(self) -> str: ...


class ClusterLike(Protocol):
    """What the demo needs of ``afore.cluster.Cluster``."""

    @property
    def clock(self) -> Any: ...
    def generate(self, prompt: str, *, max_new_tokens: int) -> Any: ...
    async def stats(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class Answer:
    """One prompt's answer as it grows."""

    prompt: Prompt
    submitted_ns: int = 0
    token_ids: list[int] = field(default_factory=list)
    arrivals_ns: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    """Why it was not answered; empty while all is well."""
    finish_reason: str = ""
    done: bool = False


def read_prompts(path: str | None, max_new_tokens: int) -> tuple[Prompt, ...]:
    """The bundled prompts, or those of a JSONL file. Raises ``ConfigError`` naming file and line."""
    if path is None:
        return bundled_prompts()
    try:
        with open(path, "rb") as file:
            raw = file.read(PROMPTS_LIMIT + 1)
        if len(raw) > PROMPTS_LIMIT:
            raise ConfigError(
                "prompts", f"{path} is longer than {PROMPTS_LIMIT >> 20} MiB", "give a shorter JSONL file"
            )
        lines = raw.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompts", f"{path} cannot be read: {why_not(error)}", "give a JSONL file") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError("prompts", f"{where} is not JSON: {error}", "write one object a line") from error
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
            raise ConfigError("prompts", f'{where} has no text under "prompt"', 'write {"prompt": "…"}')
        most = record.get("max_new_tokens", max_new_tokens)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ConfigError("prompts", f"{where}: max_new_tokens is {most!r}", "give a whole number of 1 or more")
        prompts.append(
            Prompt(
                id=str(record.get("id", number)),
                domain=str(record.get("domain", "")),
                prompt=record["prompt"],
                max_new_tokens=most,
            )
        )
    if not prompts:
        raise ConfigError("prompts", f"{path} holds no prompt", 'write one {"prompt": "…"} a line')
    return tuple(prompts)


async def answer_all(cluster: ClusterLike, prompts: Sequence[Prompt], console: Console) -> list[Answer]:
    """Submits every prompt at once and follows them. One that cannot be answered says so (``error``) and holds up no other.

    Raises ``RoleLost``.
    """
    answers = [Answer(prompt) for prompt in prompts]
    shown = _choose(answers)
    live = Live(console=console, refresh_per_second=8, get_renderable=lambda: _picture(shown, answers))
    if console.is_terminal:
        with live:
            await _gather(cluster, answers)
    else:
        await _gather(cluster, answers)
        console.print(_picture(shown, answers))
    return answers


async def answer_one(cluster: ClusterLike, prompt: Prompt) -> Answer:
    """One prompt's answer, whole. Raises ``RequestError``, ``RoleLost``."""
    answer = Answer(prompt)
    await _take(cluster, answer)
    return answer


def limit_note(answer: Answer) -> str:
    """That an answer was cut off, and how to get more of it; empty for one that came to its end."""
    if answer.finish_reason != "length":
        return ""
    return f"(stopped at the limit of {len(answer.token_ids)} tokens; --max-new-tokens raises it)"


async def _gather(cluster: ClusterLike, answers: Sequence[Answer]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(_follow(cluster, answer))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _follow(cluster: ClusterLike, answer: Answer) -> None:
    try:
        await _take(cluster, answer)
    except RequestError as error:
        answer.error = f"{error.problem}; {error.remedy}" if error.remedy else error.problem


async def _take(cluster: ClusterLike, answer: Answer) -> None:
    answer.submitted_ns = cluster.clock.now_ns()
    async for token in cluster.generate(answer.prompt.prompt, max_new_tokens=answer.prompt.max_new_tokens):
        answer.token_ids.append(token.id)
        answer.arrivals_ns.append(token.at_ns)
        answer.text += token.text
        answer.finish_reason = token.finish_reason
    answer.done = True


def _choose(answers: Sequence[Answer]) -> list[Answer]:
    shown: list[Answer] = []
    for answer in answers:
        same = sum(other.prompt.domain == answer.prompt.domain for other in shown)
        if same < SHOWN_PER_DOMAIN and len(shown) < SHOWN_MOST:
            shown.append(answer)
    return shown


def _picture(shown: Sequence[Answer], answers: Sequence[Answer]) -> Group:
    lines = []
    for answer in shown:
        start = " ".join(answer.prompt.prompt.split())
        start = start if len(start) <= 60 else "… " + start[-58:]
        lines.append(
            Text.assemble(
                (f"{answer.prompt.domain or answer.prompt.id:>5} ", "bold cyan"),
                (start + " ", "dim"),
                (" ".join(answer.text.split()), "green" if answer.done else "yellow"),
            )
        )
    done = sum(answer.done for answer in answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    lines.append(Text(f"{done} of {len(answers)} answered, {tokens} tokens", style="bold"))
    return Group(*lines)


def summarise(answers: Sequence[Answer], stats: dict[str, Any], policy: str, topology: str) -> dict[str, Any]:
    """The result of the demo: the keys of ``--json``."""
    first_ns = min(answer.submitted_ns for answer in answers)
    last_ns = max((answer.arrivals_ns[-1] for answer in answers if answer.arrivals_ns), default=first_ns)
    tokens = sum(len(answer.token_ids) for answer in answers)
    ttft_ms = [(a.arrivals_ns[0] - a.submitted_ns) / 1e6 for a in answers if a.arrivals_ns]
    itl_ms = [
        (late - early) / 1e6
        for answer in answers
        for early, late in zip(answer.arrivals_ns, answer.arrivals_ns[1:], strict=False)
    ]
    return {
        "requests": len(answers),
        "completed": sum(answer.done for answer in answers),
        "tokens": tokens,
        "tokens_per_second": tokens / ((last_ns - first_ns) / 1e9) if last_ns > first_ns else None,
        "ttft_ms": percentiles(ttft_ms),
        "itl_ms": percentiles(itl_ms),
        "imbalance": stats["imbalance"],
        "migration": stats["migration"],
        "policy": policy,
        "policy_options": stats.get("policy_options", {}),
        "topology": topology,
        "counters": stats["counters"],
        "answers": [
            {"id": a.prompt.id, "domain": a.prompt.domain, "text": a.text, "token_ids": a.token_ids}
            | ({"error": a.error} if a.error else {})
            for a in answers
        ],
    }


def print_summary(result: dict[str, Any], console: Console) -> None:
    """The table, the formulas, and what such figures mean."""
    imbalance, migration = result["imbalance"], result["migration"]
    table = Table(title=f"policy {result['policy']}, {result['topology']}", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = [
        ("requests answered", f"{result['completed']} of {result['requests']}"),
        ("tokens", f"{result['tokens']}"),
        ("tokens per second", _number(result["tokens_per_second"], 0)),
        ("time to first token p50 / p95 (ms)", _pair(result["ttft_ms"])),
        ("inter-token latency p50 / p95 (ms)", _pair(result["itl_ms"])),
        (
            "token imbalance before → after",
            f"{_number(imbalance['token']['before'], 2)} → {_number(imbalance['token']['after'], 2)}",
        ),
        (
            "tile imbalance before → after (bound)",
            f"{_number(imbalance['tile']['before'], 2)} → {_number(imbalance['tile']['after'], 2)}"
            f" ({_number(imbalance['tile']['bound'], 2)})",
        ),
        ("expert copies, in how many targets", f"{migration['copies']}, {migration['targets']}"),
    ]
    if migration["copies"]:
        rows += [
            ("raw copy time D, mean (ms)", _number(migration["raw_ms_mean"], 3)),
            ("window W, mean (ms)", _number(migration["window_ms_mean"], 3)),
            ("exposed wait O, mean (ms)", _number(migration["exposed_ms_mean"], 3)),
            ("targets with an exposed wait", f"{migration['exposed_targets']}"),
            ("slack W - D, smallest (ms)", _number(migration["slack_ms_min"], 3)),
        ]
    if result["policy_options"]:
        rows.append(
            ("policy options", ", ".join(f"{name} {value}" for name, value in result["policy_options"].items()))
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for name, formula in FORMULAS.items():
        console.print(Text.assemble((f"{name}: ", "bold"), formula), style="dim")
    console.print(
        "time to first token: submission → first token here; inter-token latency: gap between tokens", style="dim"
    )
    console.print(LAPTOP, style="italic")


def check_writable(path: str) -> None:
    """Raises ``ConfigError`` when the result could not be written there, before the work is done."""
    target = Path(path)
    folder = target.resolve().parent
    writable = os.access(target, os.W_OK) if target.exists() else folder.is_dir() and os.access(folder, os.W_OK)
    if target.is_dir() or not writable or (target.is_file() and not target.stat().st_mode & 0o222):
        raise ConfigError(
            "json", f"{path} cannot be written", "give a file that may be written, in a folder that exists"
        )


def write_json(path: str, result: object) -> None:
    """Writes a result; "-" is standard output. A file appears whole or not at all. Raises ``HostError``."""
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")  # a device or a pipe: written to, never replaced
            return
        descriptor, temporary = tempfile.mkstemp(prefix=target.name, dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise HostError(path, f"the result cannot be written: {error.strerror}", "give another file") from error


@contextlib.contextmanager
def loading(console: Console) -> Iterator[Callable[[Status | None], None]]:
    """A progress bar of the weights while roles load (none without a terminal); gives what to call with each status."""
    progress = Progress(
        TextColumn("loading weights"), BarColumn(), TaskProgressColumn(), console=console, transient=True
    )
    task = progress.add_task("loading", total=1.0, visible=False)
    share = 0.0

    def on_status(status: Status | None) -> None:
        nonlocal share
        if status is None:
            if console.is_terminal:
                progress.stop()
        elif status.tensors_total:
            # Roles say one after the other how much they will load: a bar that went back would be taken for a fault.
            share = max(share, status.tensors_loaded / status.tensors_total)
            progress.update(task, completed=share, visible=True)

    if not console.is_terminal:
        yield on_status
        return
    with progress:
        yield on_status


def _number(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:,.{digits}f}"


def _pair(values: dict[str, float | None]) -> str:
    return f"{_number(values['p50'], 1)} / {_number(values['p95'], 1)}"
