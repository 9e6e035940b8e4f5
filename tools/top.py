"""``python -m afore.tools.top``: a live view of a cluster that runs on this machine.

It joins as one more client and asks for statistics once an interval; everything else it reads from outside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from afore.core.clock import WallClock
from afore.core.errors import AforeError, ConfigError, HostError, PeerLost
from afore.serving.client import HUB, Client
from afore.tools import top_sample, top_view
from afore.tools.bench.machine import report_console
from afore.tools.bench.parser import Parser
from afore.tools.bench.signals import until_signalled
from afore.tools.ending import end_with
from afore.tools.top_links import LinkReader
from afore.transport.shm import ShmFabric
from afore.transport.shm_segments import ROOT

EPILOG = """\
example:
  python -m afore.tools.top
  python -m afore.tools.top --run demo --interval 0.5
  python -m afore.tools.top --once --json | python -m json.tool

exit status: 0 shown (Ctrl-C and the cluster's end too), 1 something failed, 2 there is nothing to show
"""
TIMEOUT_US = 10e6
"""Of each answer of the cluster."""
DIGITS = 6


def main(argv: Sequence[str] | None = None, *, root: str = ROOT) -> int:
    """The command; returns its exit status."""
    try:
        options = _parser().parse_args(argv)
        directory = top_sample.find_run(options.run, root)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_signalled(_watch(directory, options)))
    except (ConfigError, HostError) as error:
        print(f"top: {error}", file=sys.stderr)
        return 2
    except AforeError as error:
        print(f"top: {error}", file=sys.stderr)
        return 1
    return 0


async def _watch(directory: Path, options: argparse.Namespace) -> bool:
    clock = WallClock()
    fabric = ShmFabric.open(directory, top_sample.LABEL)
    try:
        async with Client.connect(fabric, HUB, clock, timeout_us=TIMEOUT_US) as client:
            async with asyncio.timeout(TIMEOUT_US / 1e6):
                await client.known()
            await _show(client, directory, clock, options)
    except PeerLost as lost:
        # It was there when it was looked for: its end is what there is to tell.
        print(f"top: the cluster has ended ({lost})", file=sys.stderr)
    finally:
        await fabric.close()
    return True


async def _show(client: Client, directory: Path, clock: WallClock, options: argparse.Namespace) -> None:
    console = report_console()
    live = None if options.once or options.json or not console.is_terminal else Live(console=console, screen=False)
    name = directory.name.removeprefix("afore-")
    reader = LinkReader(directory)
    before = await top_sample.take(client, directory, reader, clock)
    if live is not None:
        live.start()
    try:
        while True:
            await clock.sleep_us(options.interval * 1e6)
            after = await top_sample.take(client, directory, reader, clock)
            found = top_view.figures(before, after, name)
            _put(found, options, console, live)
            if options.once or after.lost:
                return
            before = after
    finally:
        if live is not None:
            live.stop()


def _put(found: dict[str, Any], options: argparse.Namespace, console: Console, live: Live | None) -> None:
    if options.json:
        print(json.dumps(_rounded(found)), flush=True)
    elif live is not None:
        live.update(top_view.render(found), refresh=True)
    else:
        console.print(top_view.render(found))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def _interval(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not from 0.05 to 3600")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="python -m afore.tools.top",
        description="Live view of a cluster on this machine: requests, plans, imbalance, copies, roles, links.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--run", metavar="NAME", help="the cluster's name, where several run on this machine")
    parser.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="seconds between samples (1)")
    parser.add_argument("--once", action="store_true", help="two samples, one table, and end")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each interval")
    return parser


if __name__ == "__main__":
    end_with(main)
