"""Bounds that options are held to, and how one beyond them is refused."""

from __future__ import annotations

from afore.core.errors import ConfigError

PATIENT_SHARE = 0.2
"""Of a deadline: who has not answered by then is named in the log, while the answer may still come."""
MOST = (1 << 63) - 1
"""Largest whole number that a message between roles can hold."""


def at_least(section: str, low: float, high: float = MOST, /, **values: float | None) -> None:
    """Raises ``ConfigError`` naming ``section.field`` for a value outside low … high; None stands for a default."""
    for name, value in values.items():
        if value is None:
            continue
        if not value >= low:
            raise ConfigError(f"{section}.{name}", f"{value!r} is below {low:g}", f"give {low:g} or more")
        if value > high:
            raise ConfigError(f"{section}.{name}", f"it is above {high:,.15g}", "give less")
