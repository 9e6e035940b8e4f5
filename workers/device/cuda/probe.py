"""Which GPUs there are, asked in a process of its own: ``python -m afore.workers.device.cuda.probe`` prints JSON.

CUDA that was initialised before a fork is of no use to the child, so nobody who forks roles may ask for himself.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afore.core.config import RunConfig
from afore.core.errors import ConfigError, HostError
from afore.workers.device.cuda.driver import Driver, load_driver

PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
PROBE_S = 60.0
"""The first use of a driver after a boot takes seconds on machines with many GPUs."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as the driver describes it."""

    ordinal: int
    name: str
    uuid: str
    nbytes: int
    capability: tuple[int, int]
    multiprocessors: int
    reaches: tuple[int, ...]
    """Other GPUs whose memory it can read directly."""

    def describe(self) -> str:
        """One line."""
        peers = f"; reaches GPU {', '.join(map(str, self.reaches))}" if self.reaches else ""
        major, minor = self.capability
        return (
            f"GPU {self.ordinal}: {self.name}, {self.nbytes / 2**30:.1f} GiB, compute capability {major}.{minor}, "
            f"{self.multiprocessors} multiprocessors{peers}"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The driver and its GPUs. ``driver_version``: 13010 is CUDA 13.1."""

    driver_version: int
    gpus: tuple[Gpu, ...]


def gpus_on_bus(devices: Path = PCI) -> int | None:
    """NVIDIA GPUs that the machine has, with a driver or without; None where it does not show its devices (some containers)."""
    found = 0
    try:
        for device in devices.iterdir():
            kind = (device / "class").read_text()
            found += kind.startswith(_DISPLAY) and (device / "vendor").read_text().strip() == _NVIDIA
    except OSError:
        return None
    return found


def find_gpus(devices: Path = PCI) -> Found:
    """Asks in a child. Raises ``HostError`` that says what is missing, and whether the machine has a GPU at all."""
    try:
        return _ask()
    except HostError as error:
        count = gpus_on_bus(devices)
        if count is None:
            raise
        if count == 0:
            problem = f"this machine has no NVIDIA GPU ({error.problem})"
            raise HostError(error.resource, problem, "use --device cpu, or a machine with one") from error
        has = f"this machine has {count} NVIDIA GPU{'s' if count > 1 else ''}, but {error.problem}"
        raise HostError(error.resource, has, error.remedy) from error


def require_gpus(config: RunConfig) -> None:
    """Refuses a configuration that needs GPUs where there are none, before anything is started. Raises ``HostError``."""
    if "cuda" in (config.device.name, config.device.attention):
        find_gpus()


def _ask() -> Found:
    if importlib.util.find_spec("cuda") is None:
        raise HostError(
            "GPU", "the package cuda-python is not installed", "pip install 'afore[cuda]', or use --device cpu"
        )
    try:
        child = subprocess.run(
            [sys.executable, "-m", "afore.workers.device.cuda.probe"],
            capture_output=True,
            timeout=PROBE_S,
            check=False,
        )
        answer = json.loads(child.stdout.splitlines()[-1])  # libraries have been seen to say something first
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise HostError(
            "GPU", f"the driver does not answer ({type(error).__name__})", "see nvidia-smi and dmesg"
        ) from error
    if "refused" in answer:
        raise HostError(*answer["refused"])
    return Found(answer["driver_version"], tuple(_gpu(values) for values in answer["gpus"]))


def describe_gpus(driver: Driver) -> tuple[Gpu, ...]:
    """All GPUs that this process may use. Raises ``CudaError``."""
    count = driver.device_count()
    return tuple(
        Gpu(
            ordinal,
            driver.device_name(ordinal),
            driver.device_uuid(ordinal).hex(),
            driver.device_nbytes(ordinal),
            (
                driver.attribute("COMPUTE_CAPABILITY_MAJOR", ordinal),
                driver.attribute("COMPUTE_CAPABILITY_MINOR", ordinal),
            ),
            driver.attribute("MULTIPROCESSOR_COUNT", ordinal),
            tuple(peer for peer in range(count) if peer != ordinal and driver.can_reach(ordinal, peer)),
        )
        for ordinal in range(count)
    )


def gpu_of(chosen: tuple[int, ...], rank: int, count: int) -> int:
    """The GPU of FFN worker ``rank``: workers take the ``chosen`` ones in turn, or all that are visible. Raises ``ConfigError``."""
    gpus = chosen or tuple(range(count))
    ordinal = gpus[rank % len(gpus)]
    if not 0 <= ordinal < count:
        raise ConfigError("device.gpus", f"there is no GPU {ordinal}: {count} are visible", "see nvidia-smi -L")
    return ordinal


def _gpu(values: dict[str, Any]) -> Gpu:
    major, minor = values.pop("capability")
    return Gpu(**values | {"capability": (major, minor), "reaches": tuple(values["reaches"])})


def main() -> int:
    """Prints what there is; returns 0 also where there is nothing, which the answer says."""
    import dataclasses

    try:
        driver = load_driver()
        answer: dict[str, Any] = {
            "driver_version": driver.version,
            "gpus": [dataclasses.asdict(gpu) for gpu in describe_gpus(driver)],
        }
    except HostError as error:
        answer = {"refused": [error.resource, error.problem, error.remedy]}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
