"""Public expert-load balancers for comparison: one file each out of their wheels, loaded without their packages.

They plan from a window of past load and may move every expert; here they get the target's own demand, so that what is compared is
the algorithm at its best. Their replicas of an expert share its tokens evenly.
"""

from __future__ import annotations

import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.scheduler.plan import PlannerConfig

DOWNLOAD_TIMEOUT_S: Final = 600
TARGETS: Final = 40
"""They take milliseconds, so fewer targets do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    package: str
    files: tuple[str, ...]
    """Where the algorithm has been in the wheel, newest first."""
    function: str
    """Dotted, in its module."""
    about_mb: int
    """Size of a recent wheel."""


_SOURCES: Final = {
    "sglang": _Source(
        package="sglang",
        files=("sglang/srt/eplb/eplb_algorithms/deepseek.py", "sglang/srt/managers/deepseek_eplb.py"),
        function="rebalance_experts",
        about_mb=40,
    ),
    "vllm": _Source(
        package="vllm",
        files=("vllm/distributed/eplb/policy/default.py", "vllm/distributed/eplb/rebalance_algo.py"),
        function="DefaultEplbPolicy.rebalance_experts",
        about_mb=340,
    ),
}


@dataclass(frozen=True, slots=True)
class PublicPlanner:
    """One of them, ready to be called."""

    name: str
    function: Callable[..., Any]

    def measure(self, demand_TE: NDArray[np.int64], config: PlannerConfig) -> dict[str, Any]:
        """Latency and resulting balance on a spread of the targets."""
        import torch

        E, N, M = config.num_experts, config.num_workers, config.tile_tokens
        replicas = -(-(E + N * int(config.slots_N.max())) // N) * N
        picked = demand_TE[np.linspace(0, len(demand_TE) - 1, min(TARGETS, len(demand_TE))).astype(int)]
        more = {"enable_hierarchical": False} if "enable_hierarchical" in signature(self.function).parameters else {}
        took_us, most, bounds, total = [], [], [], []
        for demand_E in picked:
            weight = torch.from_numpy(demand_E[None].astype(np.float32))
            before = time.perf_counter_ns()
            answer = self.function(weight, replicas, 1, 1, N, **more)
            took_us.append((time.perf_counter_ns() - before) / 1e3)
            tiles = int((-(-demand_E // M)).sum())
            most.append(_most_tiles(np.asarray(answer[0]).reshape(-1), demand_E, N, M))
            total.append(tiles)
            bounds.append(-(-tiles // N))
        loads, means = np.array(most), np.array(total) / N
        return {
            "median_us": float(np.median(took_us)),
            "p99_us": float(np.percentile(took_us, 99)),
            "tile_imbalance": float((loads / means).mean()),
            "at_bound": float((loads <= np.array(bounds)).mean()),
            "gap_to_bound": float((loads / np.array(bounds) - 1).mean()),
        }


def _most_tiles(expert_of: NDArray[np.integer[Any]], demand_E: NDArray[np.int64], N: int, M: int) -> int:
    """Tiles of the most loaded worker when an expert's replicas share its tokens evenly, remainders by replica order."""
    copies_E = np.bincount(expert_of, minlength=len(demand_E))
    seen_E = np.zeros(len(demand_E), np.int64)
    loads_N = np.zeros(N, np.int64)
    per_worker = len(expert_of) // N
    for place, expert in enumerate(expert_of.tolist()):
        whole, rest = divmod(int(demand_E[expert]), int(copies_E[expert]))
        tokens = whole + (seen_E[expert] < rest)
        seen_E[expert] += 1
        loads_N[place // per_worker] += -(-tokens // M)
    return int(loads_N.max())


def check_public(names: str) -> None:
    """Raises ``ConfigError`` for a name that is none of theirs."""
    for name in filter(None, names.split(",")):
        if name not in _SOURCES:
            raise ConfigError("--public", f"{name!r} is not known", f"choose from {', '.join(_SOURCES)}")


def find_public(names: str, folder: Path, notes: list[str]) -> list[PublicPlanner]:
    """Those of ``names`` (comma-separated) that could be had; a note for each, or why it could not.

    A wheel that lies in ``folder`` is taken; one that does not is downloaded into it.
    """
    found = []
    for name in dict.fromkeys(filter(None, names.split(","))):
        source = _SOURCES[name]
        try:
            wheel = _wheel(source, folder)
            planner = _load(name, source, wheel)
        except Exception as error:  # others' packages and others' code: whatever goes wrong there costs this row only
            notes.append(f"{name}'s planner could not be had: {type(error).__name__}: {str(error)[:200]}")
        else:
            notes.append(f"{planner.name}: out of {wheel.name} ({wheel.stat().st_size / 1e6:.0f} MB)")
            found.append(planner)
    return found


def measure_public(
    planners: Sequence[PublicPlanner], demand_TE: NDArray[np.int64], config: PlannerConfig, notes: list[str]
) -> dict[str, Any]:
    """Each one's figures; a note where one cannot plan this setting."""
    found = {}
    for planner in planners:
        try:
            found[planner.name] = planner.measure(demand_TE, config)
        except Exception as error:  # as above
            where = f"EP {config.num_workers}, R {int(config.slots_N.max())}"
            notes.append(f"{planner.name} did not plan {where}: {type(error).__name__}: {str(error)[:200]}")
    return found


def _wheel(source: _Source, folder: Path) -> Path:
    """The newest wheel of the package in ``folder``, downloaded if none is there."""
    pattern = f"{source.package}-*.whl"
    if not any(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        print(f"bench: downloading {source.package} (about {source.about_mb} MB) …", file=sys.stderr, flush=True)
        command = (
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"),
            *("--dest", str(folder), source.package),
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip download failed")
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def _load(name: str, source: _Source, wheel: Path) -> PublicPlanner:
    with zipfile.ZipFile(wheel) as archive:
        present = set(archive.namelist())
        path = next((file for file in source.files if file in present), None)
        if path is None:
            raise LookupError(f"{wheel.name} has its planner somewhere else")
        text = archive.read(path).decode()
    module = types.ModuleType(path.removesuffix(".py").replace("/", "."))
    module.__dict__["__file__"] = f"{wheel.name}/{path}"
    module.__dict__["__package__"] = module.__name__.rpartition(".")[0]
    with _stand_ins(source.package):
        exec(compile(text, f"{wheel.name}/{path}", "exec"), module.__dict__)
    function: Any = module
    for part in source.function.split("."):
        if not hasattr(function, part) and part != source.function.split(".")[-1]:
            continue
        function = getattr(function, part)
    version = wheel.name.split("-")[1]
    return PublicPlanner(f"{name} {version} EPLB", function)


class _stand_ins:
    """While it is entered, imports of a package that is not installed give empty objects: the algorithm needs none of it."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in [n for n in sys.modules if n.split(".")[0] == self._package]:
            if isinstance(sys.modules[name], _Empty):
                del sys.modules[name]

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        from importlib.machinery import ModuleSpec

        if name.split(".")[0] != self._package:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


class _Empty(types.ModuleType):
    """A module in which every name is ``object`` (a base class, an annotation) or answers False when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NOTHING if name[:1].islower() else object


def _NOTHING(*_args: object, **_kwargs: object) -> bool:
    return False
