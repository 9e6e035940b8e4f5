"""The table of benchmarks, and what is common to all of them: errors become one line and an exit status."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from afore.core.errors import AforeError, CheckpointError, ConfigError, HostError
from afore.tools.bench.parser import Parser

BENCHES: Final = {
    "serve": ("afore.tools.bench.serve", "load on a server: latencies, throughput, goodput; also against transformers"),
    "path": ("afore.tools.bench.path", "from demand to plan in the running service, part by part, per policy"),
    "transport": ("afore.tools.bench.transport", "a write with notification: latency, rate, CPU, beside public peers"),
    "virtual": ("afore.tools.bench.virtual", "CPU and memory of the whole runtime in virtual time, per target"),
    "planner": ("afore.tools.bench.planner", "microseconds per plan, beside a C++ build and public planners"),
}
"""Subcommand: the module whose ``main(argv)`` it is (imported only when asked for), and what it measures."""

EPILOG = """\
example:
  python -m afore.tools.bench serve --topology.attention 1 --topology.ffn 2
  python -m afore.tools.bench serve --help

exit status: 0 measured, 1 something failed on the way, 2 the request could not be carried out as given
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="python -m afore.tools.bench",
        description="Benchmarks; each prints the formula and the unit of every figure.",
        epilog="benchmarks:\n"
        + "".join(f"  {name:<12}{what}\n" for name, (_, what) in BENCHES.items())
        + "\n"
        + EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", nargs="?", metavar="|".join(BENCHES), help="which one")
    try:
        # What follows the name belongs to the benchmark, --help too.
        name = parser.parse_args(given[:1]).benchmark
        if name is None:
            raise ConfigError("benchmark", "none is named", f"give one of: {', '.join(BENCHES)}")
        if name not in BENCHES:
            near = difflib.get_close_matches(name, BENCHES, n=1)
            raise ConfigError(name, "no such benchmark", f"did you mean {near[0]}?" if near else "see --help")
        return int(importlib.import_module(BENCHES[name][0]).main(given[1:]))
    except (ConfigError, CheckpointError, HostError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except AforeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
