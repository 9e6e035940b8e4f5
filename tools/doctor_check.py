"""What every check of the doctor is made of: a finding with its mend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Status = Literal["ok", "warn", "fail"]
MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``mend`` says what to do where ``status`` is not ok."""

    name: str
    status: Status
    found: str
    mend: str = ""


def read_text(path: Path) -> str:
    """What a small file of /proc or /sys says, without the line's end; nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
