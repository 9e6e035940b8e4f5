"""``tools/gpu_check.sh [--out DIR]``: everything that can be shown of AFORE on one GPU, in under eight minutes.

Each part is a process with a time limit of its own; one that fails or takes too long is reported, and the others go on. Needs no
network, and of the packages only those that the runtime itself imports; what is missing is named in the report.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from afore.core.errors import HostError
from afore.core.version import VERSION
from afore.tools.ending import end_with
from afore.tools.gpu_report import LIMITS, write_report
from afore.workers.device.cuda.probe import Found, find_gpus

TOTAL_S = 460.0
"""For all parts together: the whole check ends within eight minutes."""
SERVING_S = 60.0
"""What is kept for a part that waits for compiled kernels."""
RESERVED = MappingProxyType({"serving": 110.0})
"""Seconds that earlier parts must leave to this one."""
COMPILERS = ("cc", "gcc", "clang")
LEAST_S = 5.0
"""A part that has less is not begun."""
POLICY = "afore"
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "numpy",
    "numba",
    "msgpack",
    "uvloop",
    "cuda-python",
    "cuda-bindings",
    "pytest",
    "pytest-asyncio",
    "hypothesis",
    "jsonargparse",
    "rich",
    "fastapi",
    "psutil",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One part: what it shows, and how long it may take."""

    about: str
    limit_s: float
    needs: tuple[str, ...] = ()
    """Packages that it cannot do without, beside those of the runtime."""
    compiled: bool = False
    """Whether it starts roles, whose CPU kernels must be compiled by then."""


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "device": Part("The GPU opens; copies go in batches; another process reads its memory by CUDA IPC.", 60),
        "kernels": Part("Partition and experts equal the CPU's: exactly, and within tolerances.", 90, ("triton",)),
        "group": Part(
            "NCCL's calls on the model stream, in a group of one worker: with one GPU there is no other.", 45
        ),
        "attention": Part(
            "Attention and prefill on the GPU, experts on the CPU, one process: tokens are those of transformers, and "
            "the demand that the GPU counts is that of its ids.",
            60,
        ),
        "overlap": Part("Copies and grouped products on two streams: together against each alone.", 50, ("triton",)),
        "calibration": Part("What a tile, a copy and the host cost; bell against query.", 80, ("triton",)),
        "serving": Part(
            "The bundled model by 2 attention, 4 FFN and a prefill process that share the GPU by CUDA IPC, rows in its "
            "memory: tokens are those of transformers in float32 while experts move.",
            150,
            compiled=True,
        ),
        "glm": Part(
            "Tiles and copies of GLM-4.5-Air's experts (bfloat16) and of the bundled model's (float32).",
            60,
            ("triton",),
        ),
        "hosted": Part(
            "The same cluster with attention and prefill on CPUs: rows go up from host memory.",
            100,
            compiled=True,
        ),
        "tests": Part("The tests that are marked gpu.", 90, ("pytest", "pytest-asyncio", "hypothesis", "triton")),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0 all parts passed, 1 one did not, 2 there is no GPU."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description="Check AFORE on this machine's GPU.")
    parser.add_argument("--out", default="gpu-check", help="directory for the report (default: gpu-check)")
    parser.add_argument("--dry-run", action="store_true", help="list the parts and end")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="run this part alone; may be repeated")
    options = parser.parse_args(argv)
    chosen = options.only or list(PARTS)
    if options.dry_run:
        for name in chosen:
            print(f"{name:12} at most {PARTS[name].limit_s:3.0f} s   {PARTS[name].about}")
        print(f"all together at most {TOTAL_S:.0f} s, then the report. {LIMITS}")
        return 0
    try:
        found = find_gpus()
    except HostError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    packages = {name: version_of(name) for name in PACKAGES}
    with tempfile.TemporaryDirectory(prefix="afore-gpu-cache-", ignore_cleanup_errors=True) as spare:
        out, notes = writable(Path(options.out), Path(spare).parent / "afore-gpu-check")
        environment, more = caches(Path(spare))
        notes += more
        parts: dict[str, dict[str, Any]] = {}

        def report() -> Path:
            _, page = write_report(
                out,
                {
                    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
                    "afore": VERSION,
                    "machine": [*describe_machine(found), *notes],
                    "packages": packages,
                    "missing": [name for name, version in packages.items() if version is None],
                    "limits": LIMITS,
                    "parts": parts,
                    "took_s": time.monotonic() - begin,
                },
            )
            return page

        with compiling(environment) as compiled:
            for name, part in run_parts(chosen, packages, begin + TOTAL_S, compiled, environment):
                parts[name] = part
                page = report()  # after each part: whatever ends the check, what was found is there
    print(f"report: {page}; {LIMITS}")
    return 0 if all(part["outcome"] == "passed" for part in parts.values()) else 1


def writable(out: Path, instead: Path) -> tuple[Path, list[str]]:
    """``out``, or ``instead`` where nothing can be written there: asked before anything is measured, not after; and a note."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out, []
    except OSError as error:
        instead.mkdir(parents=True, exist_ok=True)
        return instead, [f"nothing can be written into {out} ({error.strerror}): the report is in {instead}"]


def caches(spare: Path, home: Path | None = None) -> tuple[dict[str, str], list[str]]:
    """The environment of the parts, and notes: compiled kernels go into ``spare`` where their usual places cannot be written."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    notes: list[str] = []
    try:
        at = Path.home() if home is None else home
        at.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=at):
            return environment, notes
    except (OSError, RuntimeError) as error:
        for name in ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            if name == "HOME" or name not in environment:
                environment[name] = str(spare / name.lower())
                (spare / name.lower()).mkdir(exist_ok=True)
        notes.append(
            f"nothing can be written into the home directory ({error}): kernels were compiled for this run alone"
        )
    return environment, notes


@contextlib.contextmanager
def compiling(environment: Mapping[str, str] | None = None) -> Iterator[Callable[[float], None]]:
    """Compiles the roles' CPU kernels beside the first parts: on a bare machine that takes minutes. Yields what waits for it."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"from afore.serving.preload import preload; preload({POLICY!r}, print)"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )

    def wait(limit_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(limit_s)

    try:
        yield wait
    finally:
        child.kill()
        child.wait()


def run_parts(
    chosen: Sequence[str],
    packages: Mapping[str, str | None],
    until: float,
    compiled: Callable[[float], None],
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs parts one after another until that monotonic second; yields each one's name and what it found.

    ``compiled`` waits for kernels.
    """
    for index, name in enumerate(chosen):
        part = PARTS[name]
        if part.compiled:
            compiled(max(0.0, until - time.monotonic() - SERVING_S))
        begin = time.monotonic()
        kept = sum(RESERVED.get(later, 0.0) for later in chosen[index + 1 :])
        limit_s = min(part.limit_s, until - kept - begin)
        lacking = [package for package in part.needs if packages.get(package) is None]
        if lacking:
            outcome = {"outcome": "not run", "why": f"not installed: {', '.join(lacking)}"}
        elif limit_s < LEAST_S:
            outcome = {"outcome": "not run", "why": "no time was left"}
        else:
            command = [sys.executable, "-m", "afore.tools.gpu_parts", name]
            outcome = run_part(command, limit_s, environment)
        took_s = time.monotonic() - begin
        print(f"{name}: {outcome['outcome']} ({took_s:.1f} s)", flush=True)
        yield name, {"about": part.about, "took_s": took_s, **outcome}


def run_part(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs ``command FILE`` in a session of its own, which ends with it; what it wrote into the file, or why it did not."""
    with tempfile.TemporaryDirectory(prefix="afore-gpu-", ignore_cleanup_errors=True) as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said"
        with said.open("wb") as output:
            child = subprocess.Popen(
                [*command, str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
            try:
                status: int | None = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        why = said.read_text(errors="replace")[-4000:]
        if status is None:
            return {"outcome": "took too long", "why": f"more than {limit_s:.0f} s\n{why}"}
        if status != 0 or not result.exists():
            return {"outcome": "failed", "why": why or f"exit status {status}"}
        try:
            return {"outcome": "passed", "result": json.loads(result.read_text())}
        except ValueError as error:  # it was ended while it wrote
            return {"outcome": "failed", "why": f"its result cannot be read: {error}\n{why}"}


def version_of(package: str) -> str | None:
    """The installed version; none where it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine(found: Found) -> list[str]:
    """Lines that name it."""
    driver = f"driver for CUDA {found.driver_version // 1000}.{found.driver_version % 1000 // 10}"
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [system, driver, *[gpu.describe() for gpu in found.gpus]]
    if not any(map(shutil.which, COMPILERS)):
        lines.append(f"no C compiler ({', '.join(COMPILERS)}): Triton needs one to launch its kernels")
    return lines


if __name__ == "__main__":
    end_with(main)
