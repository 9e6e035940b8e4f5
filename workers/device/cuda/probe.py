"""Which GPUs there are, asked in a process of its own: ``python -m afore.workers.device.cuda.probe`` prints JSON.

CUDA that was initialised before a fork is of no use to the child, so nobody who forks roles may ask for himself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from afore.core.config import RunConfig
from afore.core.errors import ConfigError, HostError
from afore.workers.device.cuda.driver import Driver, load_driver
from afore.workers.device.cuda.library import NoDriver

R = TypeVar("R")

PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
PROBE_S = 60.0
"""The first use of a driver after a boot takes seconds on machines with many GPUs."""
END_S = 2.0
"""How long a child that was killed has to end."""
TAIL, TAIL_LINES = 400, 3
"""Of what a child said last: letters and lines that an error repeats."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as the driver describes it."""

    ordinal: int
    name: str
    """Empty where the driver does not tell; so are other texts, and numbers are 0."""
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
        said = (
            self.name or "name unknown",
            f"{self.nbytes / 2**30:.1f} GiB" if self.nbytes else "memory unknown",
            f"compute capability {major}.{minor}" if major else "compute capability unknown",
            f"{self.multiprocessors} multiprocessors" if self.multiprocessors else "multiprocessors unknown",
        )
        return f"GPU {self.ordinal}: {', '.join(said)}{peers}"


@dataclass(frozen=True, slots=True)
class Found:
    """The driver and its GPUs. ``driver_version``: 13010 is CUDA 13.1."""

    driver_version: int
    gpus: tuple[Gpu, ...]
    problems: tuple[str, ...] = ()
    """What the driver would not say of them."""


def gpus_on_bus(devices: Path = PCI) -> int | None:
    """NVIDIA GPUs that the machine has, with a driver or without; None where it does not show its devices (some containers)."""
    found, seen = 0, 0
    try:
        for device in devices.iterdir():
            seen += 1
            kind = (device / "class").read_text()
            found += kind.startswith(_DISPLAY) and (device / "vendor").read_text().strip() == _NVIDIA
    except OSError:
        return None
    return found if seen else None


def find_gpus(devices: Path = PCI, *, timeout_s: float = PROBE_S) -> Found:
    """Asks in a child. Raises ``HostError`` that says what is missing (``NoDriver``: the library), and what the bus shows."""
    try:
        return _ask(timeout_s)
    except HostError as error:
        count = gpus_on_bus(devices)
        if count is None:
            raise
        kind = NoDriver if isinstance(error, NoDriver) else HostError
        if count == 0:
            problem = f"{error.problem}, and this machine shows no NVIDIA GPU on its bus"
            remedy = "use --device cpu, or a machine with one" if kind is NoDriver else error.remedy
            raise kind(error.resource, problem, remedy) from error
        has = f"this machine has {count} NVIDIA GPU{'s' if count > 1 else ''}, but {error.problem}"
        raise kind(error.resource, has, error.remedy) from error


def require_gpus(config: RunConfig) -> None:
    """Refuses a configuration that needs GPUs where there are none, before anything is started. Raises ``HostError``."""
    if "cuda" in (config.device.name, config.device.attention):
        find_gpus()


def _ask(timeout_s: float) -> Found:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "afore.workers.device.cuda.probe"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        try:
            status: int | None = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            child.kill()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # the kernel keeps whom a driver holds: nobody waits for that
                child.wait(END_S)
        output.seek(0)
        errors.seek(0)
        answer, said = _last_answer(output.read()), _tail(errors.read())
    if answer is None:
        how = f"does not answer within {timeout_s:.0f} s" if status is None else f"gives no answer: {_ended(status)}"
        raise HostError("GPU", f"the driver {how}{said}", "see nvidia-smi and dmesg")
    if "refused" in answer:
        raise (NoDriver if answer["no_driver"] else HostError)(*answer["refused"])
    return Found(answer["driver_version"], tuple(map(_gpu, answer["gpus"])), tuple(answer["problems"]))


def _last_answer(output: bytes) -> dict[str, Any] | None:
    """The child's answer; libraries have been seen to say something before it, and behind it."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and ("refused" in answer or "gpus" in answer):
                return answer
    return None


def _ended(status: int) -> str:
    """How whoever asked it ended."""
    return f"who asked it was ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _tail(errors: bytes) -> str:
    """The last words of a child, on one line; empty without any."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return f" ({' | '.join(lines[-TAIL_LINES:])[-TAIL:]})" if lines else ""


def describe_gpus(driver: Driver, problems: list[str] | None = None) -> tuple[Gpu, ...]:
    """All GPUs that this process may use.

    ``problems``: takes what the driver would not say; without it, that is raised as ``CudaError``.
    """

    def ask(question: Callable[[], R], unknown: R) -> R:
        try:
            return question()
        except Exception as error:  # an odd answer may fail anywhere on its way through the bindings
            if problems is None:
                raise
            problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
            return unknown

    def describe(ordinal: int) -> Gpu:
        major = ask(lambda: driver.attribute("COMPUTE_CAPABILITY_MAJOR", ordinal), 0)
        return Gpu(
            ordinal,
            ask(lambda: driver.device_name(ordinal), ""),
            ask(lambda: driver.device_uuid(ordinal).hex(), ""),
            ask(lambda: driver.device_nbytes(ordinal), 0),
            (major, ask(lambda: driver.attribute("COMPUTE_CAPABILITY_MINOR", ordinal), 0)),
            ask(lambda: driver.attribute("MULTIPROCESSOR_COUNT", ordinal), 0),
            tuple(
                peer
                for peer in range(count)
                if peer != ordinal and ask(lambda peer=peer: driver.can_reach(ordinal, peer), False)  # type: ignore[misc]
            ),
        )

    count = driver.device_count()
    return tuple(describe(ordinal) for ordinal in range(count))


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


def look(load: Callable[[], Driver] = load_driver) -> dict[str, Any]:
    """What there is, or what refused it: whatever a driver answers, whoever asked is told."""
    problems: list[str] = []
    try:
        driver = load()
        gpus = [dataclasses.asdict(gpu) for gpu in describe_gpus(driver, problems)]
        return {"driver_version": driver.version, "gpus": gpus, "problems": problems}
    except HostError as error:
        return {"refused": [error.resource, error.problem, error.remedy], "no_driver": isinstance(error, NoDriver)}
    except Exception as error:
        problem = f"the driver's answer is of no use: {type(error).__name__}: {' '.join(str(error).split())}"
        return {"refused": ["GPU", problem, "see nvidia-smi and dmesg"], "no_driver": False}


def main() -> int:
    """Prints what there is; returns 0 also where there is nothing, which the answer says."""
    sys.stdout.write(json.dumps(look()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
