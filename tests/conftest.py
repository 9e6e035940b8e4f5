"""What holds for every test."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest

with contextlib.suppress(ModuleNotFoundError):  # a machine with a GPU may have pytest alone: tests/gpu_plugin.py
    from hypothesis import settings

    # Tests never assert a time: on a shared machine hypothesis' own deadline would, and fail at random.
    settings.register_profile("afore", deadline=None)
    settings.load_profile("afore")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite; they stand here because pytest reads them before it looks into subfolders."""
    parser.addoption(
        "--require",
        action="append",
        default=[],
        help="what this machine must have (namespaces, rdma): tests that need it fail where they would be skipped",
    )
    parser.addoption("--storm-seeds", type=int, default=1000, help="how many seeded storms the slot-safety stress runs")
    parser.addoption(
        "--verbs",
        default="",
        help="bindings (pyverbs,ibverbs): the fabrics' suite runs over this machine's RDMA device, and over nothing else",
    )


# A shell that runs the suite in the background has it ignore Ctrl-C, and every process that it starts: tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread, as every process of the product has."""
    import torch  # seconds, which most tests do not need

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
