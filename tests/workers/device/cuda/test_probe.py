"""What is said of a machine's GPUs, whatever the driver answers: asked in a real child, over the stand-in under the real name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from afore.core.errors import HostError
from afore.workers.device.cuda.library import NoDriver
from afore.workers.device.cuda.probe import find_gpus, gpus_on_bus, look
from tests.workers.device.cuda.presence import missing_gpu

PACKAGE = Path(__file__).parent / "fake_package"
GPU, SOUND, OTHER = ("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")
Odd = Callable[[str], None]


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Odd:
    """Gives children a driver with something odd about it."""

    def choose(what: str) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE), *filter(None, sys.path)]))
        monkeypatch.setenv("FAKE_GPU", what)

    return choose


def bus(folder: Path, *devices: tuple[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, (vendor, kind) in enumerate(devices):
        (folder / str(number)).mkdir()
        (folder / str(number) / "vendor").write_text(f"{vendor}\n")
        (folder / str(number) / "class").write_text(f"{kind}\n")
    return folder


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    found = bus(tmp_path / "all", GPU, ("0x10de", "0x030000"), SOUND, OTHER)
    assert gpus_on_bus(found) == 2, "an NVIDIA sound device is no GPU, nor is another vendor's"
    assert gpus_on_bus(tmp_path / "none") is None
    assert gpus_on_bus(bus(tmp_path / "empty")) is None, "a container that shows no device at all has seen none"


@pytest.mark.slow
def test_a_gpu_is_found_and_described(odd: Odd) -> None:
    odd("")
    found = find_gpus()
    assert found.problems == ()
    assert found.gpus[0].describe() == "GPU 0: Fake GPU, 1.0 GiB, compute capability 9.0, 132 multiprocessors"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "problem"), [("no-name", "CUDA_ERROR_UNKNOWN"), ("no-uuid", "AttributeError")])
def test_one_odd_answer_is_told_and_hides_nothing_else(what: str, problem: str, odd: Odd) -> None:
    odd(what)
    found = find_gpus()
    assert problem in " ".join(found.problems)
    assert len(found.problems) == 1
    assert "132 multiprocessors" in found.gpus[0].describe()
    assert found.gpus[0].describe().startswith(f"GPU 0: {'name unknown' if what == 'no-name' else 'Fake GPU'}, 1.0 GiB")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no-count", "of no use: CudaError: .*CUDA_ERROR_UNKNOWN"),
        ("none", "the driver shows no GPU"),
        ("crash", r"gives no answer: who asked it was ended by SIGKILL \(NVRM: the GPU has fallen off the bus\)"),
    ],
)
def test_a_driver_that_answers_nothing_of_use(what: str, says: str, odd: Odd, tmp_path: Path) -> None:
    """Never a traceback, never that there is no GPU: the bus is spoken of only where it was seen."""
    odd(what)
    with pytest.raises(HostError, match=says) as caught:
        find_gpus(tmp_path / "hidden")
    assert not isinstance(caught.value, NoDriver)
    assert "bus" not in str(caught.value).replace("off the bus", "")
    with pytest.raises(HostError, match=f"{says}.*, and this machine shows no NVIDIA GPU on its bus"):
        find_gpus(bus(tmp_path / "other", OTHER))
    with pytest.raises(HostError, match=f"^GPU: this machine has 1 NVIDIA GPU, but .*{says}"):
        find_gpus(bus(tmp_path / "one", GPU))


@pytest.mark.slow
def test_a_driver_that_never_answers(odd: Odd) -> None:
    odd("hang")
    with pytest.raises(HostError, match=r"does not answer within 2 s"):
        find_gpus(timeout_s=2)


def test_whatever_fails_is_an_answer() -> None:
    def fail() -> None:
        raise ZeroDivisionError("odd")

    assert look(fail) == {  # type: ignore[arg-type]
        "refused": ["GPU", "the driver's answer is of no use: ZeroDivisionError: odd", "see nvidia-smi and dmesg"],
        "no_driver": False,
    }


@pytest.mark.slow
def test_what_is_said_without_a_driver(tmp_path: Path) -> None:
    if not missing_gpu():
        pytest.skip("there is a GPU here")
    with pytest.raises(HostError, match=r"^GPU: .*, and this machine shows no NVIDIA GPU on its bus; .*--device cpu"):
        find_gpus(bus(tmp_path / "other", OTHER))
    with pytest.raises(HostError, match=r"^GPU: this machine has 1 NVIDIA GPU, but "):
        find_gpus(bus(tmp_path / "one", GPU))
    with pytest.raises(HostError, match=r"^GPU: (this machine has no NVIDIA driver|the package cuda-python)"):
        find_gpus(tmp_path / "hidden")
