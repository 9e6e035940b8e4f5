"""Fixtures of the workers' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def storm_seeds() -> int:
    return 200
