"""``tools/gpu_check.sh [--out DIR]``: everything that can be shown of AFORE on one GPU, in under eight minutes.

Each part is a process with a time limit of its own; one that fails or takes too long is reported, and the others go on. Needs no
network, and of the packages only those that the runtime itself imports; what is missing is named in the report. One deadline stands
over all of it, from the first question to the driver to the end of the last process that was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from afore.core.errors import HostError
from afore.core.version import VERSION
from afore.tools.ending import end_with
from afore.tools.gpu_child import END_S, adopt_orphans, run_part
from afore.tools.gpu_host import PACKAGES, caches, describe_machine, driver_loads, python_path, version_of, writable
from afore.tools.gpu_report import LIMITS, write_report
from afore.workers.device.cuda.probe import Found, find_gpus

WHOLE_S = 480.0
"""Eight minutes: when everything has ended."""
TOTAL_S = WHOLE_S - 2 * END_S - 10.0
"""When the last part is killed at the latest. Behind it: its end, that of what it has left, and the report."""
PROBE_S = 45.0
"""For the first question to the driver."""
LEAST_S = 5.0
"""A part that has less is not begun."""
POLICY = "afore"
FINE = ("passed", "skipped")
"""Outcomes that are no failure: shown, or not to be had on this machine, with the reason."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part: what it shows, and how long it may take."""

    about: str
    limit_s: float
    share_s: float
    """What all earlier parts must leave it."""
    quiet: bool = False
    """Whether kernels of the CPU must be compiled by then: it starts roles that use them, or times the host beside them."""


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "device": Part("The GPU opens; copies go in batches.", 45, 15),
        "ipc": Part("Another process reads this one's GPU memory by CUDA IPC.", 45, 10),
        "kernels": Part("Partition and experts equal the CPU's: exactly, and within tolerances.", 90, 20),
        "group": Part(
            "NCCL's calls on the model stream, in a group of one worker: with one GPU there is no other.", 45, 15
        ),
        "attention": Part(
            "Attention and prefill on the GPU, experts on the CPU, one process: tokens are those of transformers, and "
            "the demand that the GPU counts is that of its ids.",
            60,
            20,
        ),
        "serving": Part(
            "The bundled model by 2 attention, 4 FFN and a prefill process that share the GPU by CUDA IPC, rows in its "
            "memory: tokens are those of transformers in float32 while experts move, and pairs run on those that moved.",
            150,
            100,
            quiet=True,
        ),
        "overlap": Part("Copies and grouped products on two streams: together against each alone.", 50, 20, quiet=True),
        "calibration": Part(
            "What a tile, an expert, a copy and the host cost; bell against query; and the profile of it, gpu.yaml.",
            110,
            50,
            quiet=True,
        ),
        "glm": Part(
            "Tiles and copies of GLM-4.5-Air's experts (bfloat16) and of the bundled model's (float32).",
            60,
            25,
            quiet=True,
        ),
        "hosted": Part(
            "The same cluster with attention and prefill on CPUs: rows go up from host memory.", 100, 50, quiet=True
        ),
        "tests": Part("The tests that are marked gpu.", 90, 40),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0 nothing failed, 1 something did, 2 there is no driver to ask."""
    begin = time.monotonic()
    options = _parse(argv)
    chosen = options.only or list(PARTS)
    if options.dry_run:
        for name in chosen:
            print(f"{name:12} at most {PARTS[name].limit_s:3.0f} s   {PARTS[name].about}")
        print(f"all together at most {WHOLE_S:.0f} s. {LIMITS}")
        return 0
    found, refused = Found(0, ()), ""
    try:
        found = find_gpus(timeout_s=PROBE_S)
    except HostError as error:
        refused = str(error)
        if not driver_loads():
            print(f"gpu_check: {refused}", file=sys.stderr)
            return 2
        print(f"gpu_check: {refused}; every part is tried all the same", file=sys.stderr)
    signal.signal(signal.SIGTERM, _terminate)
    adopt_orphans()
    packages = {name: version_of(name) for name in PACKAGES}
    with tempfile.TemporaryDirectory(prefix="afore-gpu-cache-", ignore_cleanup_errors=True) as spare:
        instead = Path(spare).parent / "afore-gpu-check"
        out, notes = writable(Path(options.out), instead)
        environment, more = caches(Path(spare))
        parts: dict[str, dict[str, Any]] = {}

        def report() -> Path:
            nonlocal out
            content = {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
                "afore": VERSION,
                "machine": [*describe_machine(found), *notes, *more],
                "refused": refused,
                "packages": packages,
                "missing": [name for name, version in packages.items() if version is None],
                "limits": LIMITS,
                "parts": parts,
                "took_s": time.monotonic() - begin,
            }
            out, page = keep_report(out, instead, content)
            return page

        page = report()
        with compiling(python_path(environment, ROOT)) as compiled:
            for name, part in run_parts(
                chosen, begin + TOTAL_S, compiled, python_path(environment, ROOT), out / "logs"
            ):
                parts[name] = part
                page = report()  # after each part: whatever ends the check, what was found is there
    bad = [name for name, part in parts.items() if part["outcome"] not in FINE]
    skipped = [f"{name} ({part['why']})" for name, part in parts.items() if part["outcome"] == "skipped"]
    print(f"report: {page}; {LIMITS}")
    for what, names in (("not shown", bad), ("skipped", skipped)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 1 if bad or refused else 0


def keep_report(out: Path, instead: Path, content: dict[str, Any]) -> tuple[Path, Path]:
    """Writes the report into ``out``, or ``instead`` where the disk has filled up meanwhile; where it is, and its page.

    What is measured goes on in any case: the outcomes are printed, too.
    """
    for place in dict.fromkeys((out, instead)):
        try:
            return place, write_report(place, content)[1]
        except (HostError, OSError) as error:
            content["machine"].append(f"the report could not be written into {place}: {error}")
            print(f"gpu_check: the report cannot be written into {place}: {error}", file=sys.stderr, flush=True)
    return out, out / "gpu_check.md"


ROOT = Path(__file__).resolve().parent.parent


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description="Check AFORE on this machine's GPU.")
    parser.add_argument("--out", default="gpu-check", help="directory for the report (default: gpu-check)")
    parser.add_argument("--dry-run", action="store_true", help="list the parts and end")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="run this part alone; may be repeated")
    return parser.parse_args(argv)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Ends what runs: by the way out, which kills it."""
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def compiling(environment: Mapping[str, str] | None = None) -> Iterator[Callable[[float], bool]]:
    """Compiles the roles' CPU kernels beside the first parts: on a bare machine that takes a minute.

    Yields what waits for it, so many seconds, and says whether it is done.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", f"from afore.serving.preload import preload; preload({POLICY!r}, print)"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )

    def wait(limit_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(limit_s)
        return child.returncode is not None

    try:
        yield wait
    finally:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)


def run_parts(
    chosen: Sequence[str],
    until: float,
    compiled: Callable[[float], bool],
    environment: Mapping[str, str] | None = None,
    logs: Path | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs parts one after another until that monotonic second; yields each one's name and what it found.

    Each has what the later ones do not keep for themselves. ``compiled`` waits for the CPU's kernels; a part of which that is said
    waits as long as its own share and the later ones' allow, and what is measured beside the compiler says so.
    """
    for index, name in enumerate(chosen):
        part = PARTS[name]
        kept_s = sum(PARTS[later].share_s for later in chosen[index + 1 :])
        begin = time.monotonic()
        alone = not part.quiet or compiled(max(0.0, until - kept_s - part.share_s - begin))
        limit_s = min(part.limit_s, until - kept_s - time.monotonic())
        if limit_s < LEAST_S:
            outcome: dict[str, Any] = {"outcome": "not run", "why": "no time was left"}
        else:
            command = [sys.executable, "-m", "afore.tools.gpu_part", name]
            outcome = run_part(command, limit_s, environment, log=logs / f"{name}.log" if logs is not None else None)
        if not alone:
            outcome["beside"] = "kernels of the CPU were still being compiled beside it"
        took_s = time.monotonic() - begin
        print(f"{name}: {outcome['outcome']} ({took_s:.1f} s)", flush=True)
        yield name, {"about": part.about, "took_s": took_s, **outcome}


if __name__ == "__main__":
    end_with(main)
