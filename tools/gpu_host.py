"""The machine that a GPU check runs on: what it is, what is installed, and where results and compiled kernels can be written."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from afore.workers.device.cuda.probe import Found

COMPILERS = ("cc", "gcc", "clang")
LOADING_S = 20.0
"""For a child that only loads the driver's library."""
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "numpy",
    "numba",
    "msgpack",
    "uvloop",
    "PyYAML",
    "cuda-python",
    "cuda-bindings",
    "pytest",
    "pytest-asyncio",
    "hypothesis",
    "flash-attn",
    "jsonargparse",
    "rich",
    "fastapi",
    "psutil",
)
"""Whose versions are told. What of them a part cannot do without, it says."""
ROOM_NBYTES = 1 << 20
"""What a report takes at most, with its logs."""
CACHES = ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HOME")


def version_of(package: str) -> str | None:
    """The installed version; none where it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_loads() -> bool:
    """Whether the driver's library can be loaded, asked in a child: some libraries do things as they are loaded."""
    script = "from afore.workers.device.cuda.library import library_loads; raise SystemExit(not library_loads())"
    try:
        child = subprocess.run(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOADING_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # something is there that does not come to an end
    return child.returncode != 1


def describe_machine(found: Found) -> list[str]:
    """Lines that name it."""
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [system]
    if found.driver_version:
        lines.append(f"driver for CUDA {found.driver_version // 1000}.{found.driver_version % 1000 // 10}")
    lines += [gpu.describe() for gpu in found.gpus]
    lines += [f"the driver did not say everything: {problem}" for problem in found.problems]
    if not any(map(shutil.which, COMPILERS)):
        lines.append(f"no C compiler ({', '.join(COMPILERS)}): Triton needs one to launch its kernels")
    return lines


def writable(out: Path, instead: Path) -> tuple[Path, list[str]]:
    """``out``, or ``instead`` where nothing can be written there: asked before anything is measured, not after; and a note."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(bytes(ROOM_NBYTES))  # a full disk makes files, and fills none
            file.flush()
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
        for name in CACHES:
            if name == "HOME" or name not in environment:
                environment[name] = str(spare / name.lower())
                (spare / name.lower()).mkdir(exist_ok=True)
        notes.append(
            f"nothing can be written into the home directory ({error}): kernels were compiled for this run alone"
        )
    return environment, notes


def python_path(environment: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment with ``root`` first on the path: parts run from a checkout, wherever they are started."""
    paths = [str(root), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
