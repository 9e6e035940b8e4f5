"""Options of a run by their names on the command line, for cells that differ from the others in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from afore.core.config import RunConfig
from afore.core.errors import ConfigError

Option = tuple[str, Any]
"""(name as on the command line, such as ``batch.least_microbatches``; its value)"""


def with_options(config: RunConfig, options: Sequence[Option]) -> RunConfig:
    """The configuration with these options. Raises ``ConfigError`` for a name that it does not have, or a value it refuses."""
    for name, value in options:
        config = _replaced(config, name.split("."), value, name)
    return config


def _replaced(part: Any, path: Sequence[str], value: Any, name: str) -> Any:
    if not dataclasses.is_dataclass(part) or path[0] not in {field.name for field in dataclasses.fields(part)}:
        raise ConfigError(name, "there is no such option", "see python -m afore.launch --help")
    if len(path) > 1:
        value = _replaced(getattr(part, path[0]), path[1:], value, name)
    return dataclasses.replace(part, **{path[0]: value})  # type: ignore[type-var]  # an instance
