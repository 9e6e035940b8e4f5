"""``python -m afore.tools.doctor``: will AFORE run on this machine, and if not, what mends it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from afore.tools import doctor_checks
from afore.tools.doctor_checks import Check, Status
from afore.tools.ending import end_with

CHECKS: Final[tuple[Callable[[], Check | list[Check]], ...]] = (
    doctor_checks.check_platform,
    doctor_checks.check_python,
    doctor_checks.check_torch,
    doctor_checks.check_numba_cache,
    doctor_checks.check_uvloop,
    doctor_checks.check_cores,
    doctor_checks.check_memory,
    doctor_checks.check_shm,
    doctor_checks.check_stale,
    doctor_checks.check_eventfd,
    doctor_checks.check_files,
    doctor_checks.check_forkserver,
    doctor_checks.check_clock,
    doctor_checks.check_fabrics,
)
_COLOURS: Final[dict[Status, str]] = {"ok": "green", "warn": "yellow", "fail": "bold red"}

EPILOG = """\
example:
  python -m afore.tools.doctor
  python -m afore.tools.doctor --json | python -m json.tool

exit status: 0 everything is ok or only a warning, 1 something failed
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.doctor",
        description="Checks this machine: ok, warn or fail for each thing that AFORE needs, with what mends it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: ok, and checks of name, status, found, mend"
    )
    options = parser.parse_args(argv)
    checks = examine(CHECKS)
    healthy = all(check.status != "fail" for check in checks)
    if options.json:
        print(json.dumps({"ok": healthy, "checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        show(checks)
    return 0 if healthy else 1


def examine(checks: Sequence[Callable[[], Check | list[Check]]]) -> list[Check]:
    """Runs every check. One that fails by itself is reported as failed, and the others still run."""
    found: list[Check] = []
    for check in checks:
        try:
            result = check()
        except Exception as error:
            name = getattr(check, "__name__", "check").removeprefix("check_")
            result = Check(
                name, "fail", f"could not be checked: {type(error).__name__}: {error}", "report this as a defect"
            )
        found += result if isinstance(result, list) else [result]
    return found


def show(checks: Sequence[Check]) -> None:
    """A table, then the mends, one line each."""
    console = Console()
    table = Table("check", "status", "found")
    for check in checks:
        colour = _COLOURS[check.status]
        table.add_row(escape(check.name), f"[{colour}]{check.status}[/{colour}]", escape(check.found))
    console.print(table)
    for check in checks:
        if check.status != "ok":
            colour = _COLOURS[check.status]
            console.print(
                f"[{colour}]{check.status}[/{colour}] {escape(check.name)}: {escape(check.mend)}", soft_wrap=True
            )
    counts = Counter(check.status for check in checks)
    console.print(f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail")


if __name__ == "__main__":
    end_with(main)
