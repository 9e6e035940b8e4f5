"""The doctor's check of GPUs: what the driver shows, and what FFN workers would need there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

from afore.core.errors import HostError
from afore.tools.doctor_check import Check
from afore.workers.device.cuda.probe import Found, find_gpus

DRIVER: Final = Path("/proc/driver/nvidia/version")
BATCHED: Final = 13000
"""Driver version from which copies are handed over in batches."""


def _nccl_missing() -> str:
    """Only where there are GPUs: it loads torch."""
    from afore.workers.group.collective import nccl_missing

    return nccl_missing()


def _group(count: int, missing: str) -> Check:
    """By which group FFN workers would get their rows."""
    shared = "workers that share a GPU read rows where attention workers have them (ipc)"
    if count < 2:
        return Check("gpu group", "ok", f"{shared}; nccl needs a GPU for each worker")
    if missing:
        mend = "install torch for CUDA; until then each worker reads all rows"
        return Check("gpu group", "warn", f"{shared}; nccl between GPUs is missing: {missing}", mend)
    return Check("gpu group", "ok", f"{shared}; with a GPU each they exchange them (nccl)")


def check_gpus(
    find: Callable[[], Found] = find_gpus,
    driver: Path = DRIVER,
    installed: Callable[[str], object] = importlib.util.find_spec,
    nccl_missing: Callable[[], str] = _nccl_missing,
) -> list[Check]:
    """The GPUs that FFN workers could use. None is no mistake: everything runs on CPUs."""
    try:
        found = find()
    except HostError as error:
        if driver.exists():
            return [Check("gpu", "warn", f"there is an NVIDIA driver, but {error.problem}", error.remedy)]
        return [Check("gpu", "ok", f"none that FFN workers could use ({error.problem}); they run on CPUs")]
    version = f"driver for CUDA {found.driver_version // 1000}.{found.driver_version % 1000 // 10}"
    batches = "copies in batches" if found.driver_version >= BATCHED else "copies one by one"
    checks = [Check("gpu", "ok", f"{version}, {batches}; start with --device cuda --planner.tile_tokens 64")]
    checks += [Check(f"gpu {gpu.ordinal}", "ok", gpu.describe()) for gpu in found.gpus]
    if installed("triton") is None:
        mend = "install torch for CUDA, which brings triton along, or use --device.kernels torch"
        checks.append(Check("gpu kernels", "warn", "triton is not installed", mend))
    checks.append(_group(len(found.gpus), nccl_missing()))
    apart = [
        f"{gpu.ordinal} and {peer.ordinal}"
        for gpu in found.gpus
        for peer in found.gpus
        if gpu.ordinal < peer.ordinal and peer.ordinal not in gpu.reaches
    ]
    if apart:
        mend = "see nvidia-smi topo -p2p r; until then copies between them go through host memory"
        checks.append(Check("gpu peers", "warn", f"GPUs that do not reach each other: {', '.join(apart)}", mend))
    return checks
