"""What holds for every test."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Tests never assert a time: on a shared machine hypothesis' own deadline would, and fail at random.
settings.register_profile("afore", deadline=None)
settings.load_profile("afore")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite; they stand here because pytest reads them before it looks into subfolders."""
    parser.addoption("--storm-seeds", type=int, default=1000, help="how many seeded storms the slot-safety stress runs")
