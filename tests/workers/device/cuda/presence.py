"""Whether this machine has what a test of the GPU needs; a test is skipped with the reason."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from afore.core.errors import HostError
from afore.workers.device.cuda.probe import find_gpus


@cache
def missing_gpu() -> str:
    """Why there is no GPU to test with; empty where there is one."""
    try:
        find_gpus()
    except HostError as error:
        return str(error)
    import torch

    return "" if torch.cuda.is_available() else "this torch was built without CUDA"


def need_gpu() -> None:
    """Skips the test without a GPU."""
    if reason := missing_gpu():
        pytest.skip(reason)


def need(*modules: str) -> None:
    """Skips the test where one of the modules is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
