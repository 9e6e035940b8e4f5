"""Fixtures of the workers' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def storm_seeds(request: pytest.FixtureRequest) -> int:
    """How many storms to run: ``--storm-seeds``."""
    seeds: int = request.config.getoption("--storm-seeds")
    return seeds


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread, as every process of the product has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
