"""The strict stand-in's calls for a process of its own: ``FAKE_GPU`` says what is odd about its driver."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_types import CUresult

_calls = FakeCalls()


def _crash(*_: object) -> NoReturn:
    sys.stderr.write("NVRM: the GPU has fallen off the bus\n")
    sys.stderr.flush()
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError


def _hang(*_: object) -> NoReturn:
    sys.stderr.write("waiting for the GPU\n")
    sys.stderr.flush()
    while True:
        signal.pause()


match os.environ.get("FAKE_GPU", ""):
    case "no-name":
        _calls.failing["cuDeviceGetName"] = CUresult.CUDA_ERROR_UNKNOWN
    case "no-count":
        _calls.failing["cuDeviceGetCount"] = CUresult.CUDA_ERROR_UNKNOWN
    case "no-uuid":
        setattr(_calls, "cuDeviceGetUuid", lambda dev: (CUresult.CUDA_SUCCESS, None))  # noqa: B010
    case "none":
        _calls.machine.gpus = 0
    case "crash":
        setattr(_calls, "cuInit", _crash)  # noqa: B010
    case "hang":
        setattr(_calls, "cuInit", _hang)  # noqa: B010


def __getattr__(name: str) -> Any:
    return getattr(_calls, name)
