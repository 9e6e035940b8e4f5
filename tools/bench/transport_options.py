"""The options of ``bench transport``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from afore.core.link_options import STRATEGIES, Strategy
from afore.tools.bench.parser import Parser
from afore.tools.bench.transport_peers import PEERS

FABRICS: Final = ("loopback", "shm", "tcp", "verbs")
SIZES: Final = "0,8,64,512,4K,32K,256K,1M,8M,64M"
LARGEST: Final = 64 << 20
SPINNING: Final = ("shm", "tcp")
"""Fabrics that have each of ``STRATEGIES``; the others sleep on a descriptor."""
NONE: Final = "none"
EPILOG: Final = """\
Each way has processes of its own (loopback: one), which live through all rounds and sleep while others are measured; rounds
are interleaved. Public peers are measured at 512 bytes, as far as their packages are there: uvloop, ucxx, iceoryx2.

examples:
  python -m afore.tools.bench transport
  python -m afore.tools.bench transport --fabrics shm --sizes 0,512,1M --rounds 20 --plot transport.svg
  python -m afore.tools.bench transport --fabrics shm --sizes 512 --idle fd,spin-then-fd
  python -m afore.tools.bench transport --sizes 512 --oversubscribed --json -

exit status: 0 measured, 1 something failed on the way, 2 the request could not be carried out as given
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """One invocation."""

    fabrics: tuple[str, ...] | None
    """None: all that this machine has."""
    sizes: tuple[int, ...]
    peers: tuple[str, ...] | None
    """None: all that are installed."""
    rounds: int
    count: int
    seconds: float
    """Of one measurement, about; 0: as long as it takes."""
    idle: tuple[Strategy, ...]
    oversubscribed: bool
    json: str | None
    plot: str | None


def parse(argv: Sequence[str]) -> TransportOptions:
    """Options. Raises ``ConfigError`` naming the option."""
    return TransportOptions(**vars(_parser().parse_args(argv)))


def size_text(nbytes: int) -> str:
    """As ``--sizes`` takes it: ``32K``."""
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if nbytes and not nbytes % factor:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def _sizes(text: str) -> tuple[int, ...]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})([KM]?)\s*", part)
        nbytes = int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]] if match else LARGEST + 1
        if nbytes > LARGEST:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is no size: write bytes up to 64M, such as 0,512,4K,1M")
        found.append(nbytes)
    return tuple(sorted(set(found)))


def _chosen(text: str, known: Sequence[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in found:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return found


def _fabrics(text: str) -> tuple[str, ...]:
    return _chosen(text, FABRICS)


def _peers(text: str) -> tuple[str, ...]:
    return () if text == NONE else _chosen(text, tuple(PEERS))


def _idle(text: str) -> tuple[str, ...]:
    return _chosen(text, STRATEGIES)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 1,000,000")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 600:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 600")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m afore.tools.bench transport",
        description="Writes with notification between two processes: latency, rate and CPU, by fabric and size.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--fabrics", type=_fabrics, metavar="F,…", help=f"of {', '.join(FABRICS)} (all that this machine has)")
    add(
        "--sizes", type=_sizes, default=_sizes(SIZES), metavar="N,…", help=f"bytes, K and M for 2^10 and 2^20 ({SIZES})"
    )
    add("--peers", type=_peers, metavar="P,…", help=f"of {', '.join(PEERS)}, or {NONE} (all that are installed)")
    add("--rounds", type=_count, default=10, metavar="N", help="interleaved rounds (10)")
    add("--count", type=_count, default=5000, metavar="N", help="messages of a round, fewer of large ones (5000)")
    add("--seconds", type=_seconds, default=0.5, metavar="S", help="of a measurement, about; 0: no limit (0.5)")
    add(
        "--idle",
        type=_idle,
        default=STRATEGIES[:1],
        metavar="I,…",
        help=f"how readers wait, side by side: of {', '.join(STRATEGIES)} ({STRATEGIES[0]}; {' and '.join(SPINNING)} have both)",
    )
    add("--oversubscribed", action="store_true", help="also four pairs of each at once, 8 processes on 2 cores")
    add("--json", metavar="FILE", help="write everything there; - for standard output, instead of tables")
    add("--plot", metavar="FILE", help="write a picture: latency and throughput over size (png, svg, pdf)")
    return parser
