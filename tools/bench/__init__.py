"""``python -m afore.tools.bench``: benchmarks, one file (or a few) for each subcommand; ``command`` has the table of them."""

from afore.tools.bench.command import main

__all__ = ["main"]
