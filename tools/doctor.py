"""``python -m afore.tools.doctor``: will AFORE run on this machine, and if not, what mends it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from afore.core.errors import ConfigError, HostError
from afore.tools import (
    doctor_devices,
    doctor_fabrics,
    doctor_gpus,
    doctor_machine,
    doctor_rdma,
    doctor_shm,
    doctor_software,
)
from afore.tools.doctor_check import Check, Status
from afore.tools.ending import end_with
from afore.tools.printable import printable

CHECKS: Final[tuple[Callable[[], Check | list[Check]], ...]] = (
    doctor_machine.check_platform,
    doctor_software.check_python,
    doctor_software.check_torch,
    doctor_software.check_numba_cache,
    doctor_software.check_uvloop,
    doctor_machine.check_cores,
    doctor_machine.check_memory,
    doctor_shm.check_shm,
    doctor_shm.check_stale,
    doctor_machine.check_eventfd,
    doctor_machine.check_files,
    doctor_software.check_forkserver,
    doctor_machine.check_clock,
    doctor_devices.check_huge_pages,
    doctor_rdma.check_rdma,
    doctor_rdma.check_bindings,
    doctor_rdma.check_opening,
    doctor_devices.check_peer_memory,
    doctor_devices.check_distance,
    doctor_gpus.check_gpus,
    doctor_fabrics.check_fabrics,
)
DOCTOR_PORT: Final = 29514
"""Where ``--serve`` listens and ``--peer`` looks unless they are told otherwise."""
MOST_SHOWN: Final = 4000
"""Characters of a finding or an error."""
_COLOURS: Final[dict[Status, str]] = {"ok": "green", "warn": "yellow", "fail": "bold red"}

EPILOG = """\
example:
  python -m afore.tools.doctor
  python -m afore.tools.doctor --json | python -m json.tool
  python -m afore.tools.doctor --serve --listen 10.0.0.2:29514 --secret-file secret     on one machine,
  python -m afore.tools.doctor --peer 10.0.0.2 --secret-file secret                     on another

exit status: 0 everything is ok or only a warning, 1 something failed, 2 an option cannot be used
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.doctor",
        description="Checks this machine, or the way to another: ok, warn or fail for each thing, with what mends it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: ok, and checks of name, status, found, mend"
    )
    parser.add_argument(
        "--peer",
        metavar="HOST[:PORT]",
        help=f"connect to the doctor (or the door's rendezvous) there, step by step (port {DOCTOR_PORT})",
    )
    parser.add_argument("--serve", action="store_true", help="be what another machine's --peer connects to")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help=f"where to serve (default: 127.0.0.1:{DOCTOR_PORT}); 0: any free port"
    )
    parser.add_argument(
        "--secret-file", metavar="FILE", help="what both sides know (or AFORE_SECRET); needed beyond this machine"
    )
    options = parser.parse_args(argv)
    try:
        if options.serve and options.peer is not None:
            raise ConfigError("--serve", "it is one side, --peer the other", "give one of them")
        if options.listen is not None and not options.serve:
            raise ConfigError("--listen", "nobody listens without --serve", "give that too, or leave it out")
        if options.serve:
            _serve(options.listen or f"127.0.0.1:{DOCTOR_PORT}", options.secret_file)
            return 0
        checks = examine(CHECKS) if options.peer is None else _examine_peer(options.peer, options.secret_file)
    except (ConfigError, HostError) as error:
        print(f"doctor: {printable(str(error), MOST_SHOWN)}", file=sys.stderr)
        return 2
    healthy = all(check.status != "fail" for check in checks)
    if options.json:
        print(json.dumps({"ok": healthy, "checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        show(checks)
    return 0 if healthy else 1


def _examine_peer(peer: str, secret_file: str | None) -> list[Check]:
    # Only here: the checks of this machine must run where torch or uvloop are broken, to say so.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's store tells each retry with a stack
    import uvloop

    from afore.core.environment import take_secret
    from afore.serving.identity import read_secret
    from afore.tools.doctor_peer import examine_peer, parse_peer

    secret = read_secret(secret_file, take_secret())
    checks: list[Check] = uvloop.run(examine_peer(*parse_peer(peer, DOCTOR_PORT), secret))
    return checks


def _serve(listen: str, secret_file: str | None) -> None:
    import uvloop  # as above

    from afore.core.environment import take_secret
    from afore.serving.identity import read_secret
    from afore.tools.doctor_serve import serve

    uvloop.run(serve(listen, read_secret(secret_file, take_secret()), lambda line: print(line, flush=True)))


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


def _shown(text: str) -> str:
    """It may hold what another machine said."""
    return escape(printable(text, MOST_SHOWN))


def show(checks: Sequence[Check]) -> None:
    """A table, then the mends, one line each."""
    console = Console()
    table = Table("check", "status", "found")
    for check in checks:
        colour = _COLOURS[check.status]
        table.add_row(_shown(check.name), f"[{colour}]{check.status}[/{colour}]", _shown(check.found))
    console.print(table)
    for check in checks:
        if check.status != "ok":
            colour = _COLOURS[check.status]
            console.print(
                f"[{colour}]{check.status}[/{colour}] {_shown(check.name)}: {_shown(check.mend)}", soft_wrap=True
            )
    counts = Counter(check.status for check in checks)
    console.print(f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail")


if __name__ == "__main__":
    end_with(main)
