"""The options of ``bench path``. What describes a cluster (``--model``, ``--planner.tile_tokens``) is the launcher's."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.serving.options import LaunchOptions
from afore.serving.options import parse as parse_launch
from afore.tools.bench.parser import Parser

POLICIES: Final = "static,afore,afore-plus"
EPILOG: Final = """\
A cluster of processes for each policy, all with spans, and one more without them; rounds are interleaved. Options of
python -m afore.launch that describe a cluster are taken too: --model DIR --config FILE --planner.tile_tokens 8

examples:
  python -m afore.tools.bench path                                       1 attention worker, 2 FFN workers, 2 microbatches
  python -m afore.tools.bench path --topology 1/2/2,2/4/2 --rounds 20
  python -m afore.tools.bench path --policies afore --plot path.svg --json path.json

exit status: 0 measured, 1 something failed on the way, 2 the request could not be carried out as given
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """One invocation."""

    topology: tuple[tuple[int, int, int], ...]
    """(A, N, M) of each."""
    policies: tuple[str, ...]
    rounds: int
    num_prompts: int
    prompts: str | None
    max_tokens: int | None
    observed_cost: bool
    """Also run a cluster without spans."""
    json: str | None
    plot: str | None


def parse(argv: Sequence[str]) -> tuple[PathOptions, RunConfig]:
    """Options, and the cluster to start. Raises ``ConfigError`` naming the option."""
    given, rest = _parser().parse_known_args(argv)
    launch, config = parse_launch(rest)
    for field in fields(LaunchOptions):
        if field.name != "log" and getattr(launch, field.name) != field.default:
            raise ConfigError(field.name, "it is not for a benchmark", "leave it out")
    if config.trace is not None:
        raise ConfigError("trace", "every cluster of this benchmark has its own", "leave it out")
    return PathOptions(**vars(given)), config


def _topologies(text: str) -> tuple[tuple[int, int, int], ...]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)/([1-9]\d*)/([1-9]\d*)\s*", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is no topology: write A/N/M, such as 1/2/2,2/4/2")
        found.append((int(match[1]), int(match[2]), int(match[3])))
    return tuple(dict.fromkeys(found))


def _names(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return found


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m afore.tools.bench path",
        description="From demand to plan in the running service: how long each part takes, from the spans of all roles.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--topology",
        type=_topologies,
        default=((1, 2, 2),),
        metavar="A/N/M,…",
        help="attention, FFN, microbatches (1/2/2)",
    )
    add("--policies", type=_names, default=_names(POLICIES), metavar="P,…", help=f"({POLICIES})")
    add("--rounds", type=_count, default=10, metavar="N", help="interleaved rounds (10)")
    add("--num-prompts", type=_count, default=32, metavar="N", help="requests of a round, all at once (32)")
    add("--prompts", metavar="FILE", help="JSONL or text, one prompt a line (default: the bundled ones)")
    add("--max-tokens", type=_count, metavar="N", help="most tokens of every answer (default: what prompts say)")
    add(
        "--no-observed-cost",
        dest="observed_cost",
        action="store_false",
        help="leave out the cluster without spans, which shows what recording costs",
    )  # fmt: skip
    add("--json", metavar="FILE", help="write everything there; - for standard output, instead of tables")
    add("--plot", metavar="FILE", help="write a picture (png, svg, pdf)")
    return parser
