"""Fixtures of the workers' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def storm_seeds(request: pytest.FixtureRequest) -> int:
    """How many storms to run: ``--storm-seeds``."""
    seeds: int = request.config.getoption("--storm-seeds")
    return seeds
