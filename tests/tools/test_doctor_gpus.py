"""What the doctor says of GPUs, on machines with and without them."""

from __future__ import annotations

from pathlib import Path

from afore.core.errors import HostError
from afore.tools.doctor_gpus import check_gpus
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.probe import Found, describe_gpus
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine


def machine(gpus: int, reachable: set[tuple[int, int]] | None = None) -> Found:
    driver = Driver(FakeCalls(Machine(gpus=gpus, reachable=reachable)))
    return Found(driver.version, describe_gpus(driver))


def none() -> Found:
    raise HostError("GPU", "this machine has no NVIDIA driver", "install it")


def test_none_is_no_mistake(tmp_path: Path) -> None:
    (check,) = check_gpus(none, tmp_path / "version")
    assert check.status == "ok"
    assert "no NVIDIA driver" in check.found


def test_a_driver_that_does_not_work(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.touch()
    (check,) = check_gpus(none, version)
    assert (check.status, check.mend) == ("warn", "install it")


def test_one_gpu_has_no_nccl_to_miss() -> None:
    checks = check_gpus(lambda: machine(1), installed=lambda name: object(), nccl_missing=lambda: "no NCCL")
    assert [check.status for check in checks] == ["ok", "ok", "ok"]
    assert "(ipc)" in checks[2].found


def test_two_that_reach_each_other() -> None:
    checks = check_gpus(lambda: machine(2), installed=lambda name: object(), nccl_missing=lambda: "")
    assert [check.status for check in checks] == ["ok", "ok", "ok", "ok"]
    assert "with a GPU each they exchange them (nccl)" in checks[3].found
    assert "CUDA 13.1, copies in batches" in checks[0].found
    assert checks[2].found == ("GPU 1: Fake GPU, 1.0 GiB, compute capability 9.0, 132 multiprocessors; reaches GPU 0")


def test_what_would_be_slow_or_missing() -> None:
    reachable = {(0, 1), (1, 0)}
    checks = check_gpus(lambda: machine(3, reachable), installed=lambda name: None, nccl_missing=lambda: "no NCCL")
    assert [(check.name, check.status) for check in checks[4:]] == [
        ("gpu kernels", "warn"),
        ("gpu group", "warn"),
        ("gpu peers", "warn"),
    ]
    assert "no NCCL" in checks[5].found
    assert checks[6].found == "GPUs that do not reach each other: 0 and 2, 1 and 2"
