"""One version: the package's, the module's, and the one that traces and messages carry."""

from __future__ import annotations

import tomllib
from pathlib import Path

import afore
from afore.core.version import VERSION


def test_the_package_is_built_as_the_version_it_says() -> None:
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["version"] == VERSION == afore.__version__
