"""The process of one part of a GPU check: ``python -m afore.tools.gpu_part NAME FILE UNTIL`` writes what it found as JSON.

``UNTIL`` is a second of the system's monotonic clock; then it says where every thread stands, also while it still imports.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from afore.tools.ending import end_with
from afore.tools.gpu_child import end_with_parent
from afore.tools.gpu_claims import ClaimFailed, NotHere

TIMED = frozenset({"serving", "hosted", "tests"})
"""Parts that are told how long they have, because they wait for processes of their own."""
SPARE_S = 2.0
"""What such a part keeps for ending in order."""


def main(argv: Sequence[str] | None = None) -> int:
    """One part; what it raises is told by the interpreter."""
    name, file, until = sys.argv[1:] if argv is None else argv
    end_with_parent(os.getppid())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    left_s = max(0.1, float(until) - time.monotonic())
    with os.fdopen(os.dup(2), "wb") as said:  # where the report looks, whatever becomes of descriptor 2 meanwhile
        faulthandler.enable(said)
        faulthandler.dump_traceback_later(left_s, file=said)
        try:
            from afore.tools.gpu_parts import PARTS

            write_found(PARTS, name, Path(file), float(until))
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.enable()
    return 0


def write_found(parts: Mapping[str, Callable[..., dict[str, Any]]], name: str, file: Path, until: float) -> None:
    """Runs a part and writes what it found, lacks here, or has shown not to hold; what it raises else is a defect."""
    left_s = max(1.0, until - time.monotonic() - SPARE_S)
    part = partial(parts[name], left_s) if name in TIMED else parts[name]
    try:
        found = part()
    except NotHere as missing:
        found = {"skipped": str(missing)}
    except ClaimFailed as failed:
        found = {**failed.found, "failed": str(failed)}
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(found), encoding="utf-8")
    beside.replace(file)


if __name__ == "__main__":
    end_with(main)
