"""How a part of a GPU check ends other than well: what it could not show here, and what it has shown not to hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NotHere(Exception):
    """The machine lacks what the part is about: it is skipped, with the reason."""


class ClaimFailed(Exception):
    """What was to be shown does not hold; ``found`` is reported with it."""

    def __init__(self, why: str, found: Mapping[str, Any]) -> None:
        self.found = dict(found)
        super().__init__(why)
