"""``python -m afore.tools.bench transport``: what a write with notification costs, by fabric and size, beside public peers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from afore.core.errors import ConfigError, HostError
from afore.core.link_options import STRATEGIES, IdleOptions, Strategy
from afore.tools.bench import transport_report
from afore.tools.bench.ab import turns
from afore.tools.bench.figures_report import conclude
from afore.tools.bench.machine import machine_facts
from afore.tools.bench.plot import check_plot
from afore.tools.bench.signals import until_signalled
from afore.tools.bench.transport_ends import Setting
from afore.tools.bench.transport_figures import (
    FORMULAS,
    against_peers,
    count_of,
    crowd_figures,
    ping_figures,
    stream_figures,
    warmup_of,
)
from afore.tools.bench.transport_options import FABRICS, SPINNING, TransportOptions, parse
from afore.tools.bench.transport_pair import SHARED, Pair, Pings, Stream
from afore.tools.bench.transport_peers import PEERS, installed
from afore.transport.shm import sweep_stale
from afore.transport.shm_segments import ROOT

PEER_BYTES: Final = 512
"""A demand vector's size: what ways are compared at."""
CALIBRATION: Final = 50
"""Messages that say how long one takes."""
CROWD_PAIRS: Final = 4
CROWD_CORES: Final = 2
SPINS: Final = (
    f"spin-then-fd: turns of the event loop, up to {IdleOptions().spin_us:g} µs a wait, then as fd; no budget of CPU"
)
WAITS: Final = {
    "loopback": "one process: two coroutines of one event loop",
    "shm": "fd: an eventfd in the event loop",
    "tcp": "fd: a socket in the event loop",
    "verbs": "fd: a completion channel in the event loop",
}
"""How each fabric learns of a notification."""


@dataclass(slots=True)
class _Way:
    """One way, and what was measured of it."""

    name: str
    """The fabric and, where it is not ``fd``, the idle strategy; or the public peer."""
    arrives: str
    """How a message comes to the code that waits for it."""
    sizes: tuple[int, ...]
    pairs: list[Pair]
    counts: dict[int, int] = field(default_factory=dict)
    """Messages of a measurement, by size."""
    pings: dict[int, list[Pings]] = field(default_factory=dict)
    streams: dict[int, list[Stream]] = field(default_factory=dict)
    crowd: list[list[Pings]] = field(default_factory=list)
    """Of each round, one of each pair."""


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options = parse(argv)
    if options.plot is not None:
        check_plot(options.plot)
    import uvloop

    report: dict[str, Any] = {
        "benchmark": "transport",
        "rounds": 0,
        "ways": {},
        "notes": [],
        "interrupted": False,
        "formulas": dict(FORMULAS),
        "machine": machine_facts(),
        "options": dataclasses.asdict(options),
    }
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(until_signalled(_measure_all(options, report)))
    report["interrupted"] = outcome is None
    report["load_average_after"] = round(os.getloadavg()[0], 2)
    return conclude(
        report, show=transport_report.show, draw=transport_report.draw, json_path=options.json, plot_path=options.plot
    )


async def _measure_all(options: TransportOptions, report: dict[str, Any]) -> bool:
    run = f"bench{os.getpid()}"
    try:
        with tempfile.TemporaryDirectory(prefix="afore-bench-") as folder:
            blank = Setting(way="", largest=0, run=run, secret=secrets.token_hex(16), folder=folder)
            counts = await _alone(options, blank, report)
            if options.oversubscribed:
                await _crowded(options, blank, counts, report)
    finally:
        # A process that was killed leaves what it had in shared memory.
        sweep_stale(ROOT)
    return True


async def _alone(options: TransportOptions, blank: Setting, report: dict[str, Any]) -> dict[str, int]:
    """One pair of each way at work at a time; an interrupted run reports the rounds that all have finished.

    Returns how many messages of ``PEER_BYTES`` each way's measurements had.
    """
    ways: dict[str, _Way] = {}
    try:
        async with contextlib.AsyncExitStack() as stack:
            for way, idle in _chosen(options, report):
                name = _name(way, idle)
                sizes = (PEER_BYTES,) if way in PEERS else tuple(sorted({*options.sizes, PEER_BYTES}))
                setting = dataclasses.replace(blank, way=way, idle=idle, largest=max(sizes), run=_run(blank, name, 0))
                if (pair := await _start(stack, setting, options, report)) is not None:
                    ways[name] = _Way(name, _arrives(way, idle), sizes, [pair])
                    await _calibrate(ways[name], options)
            for number in range(options.rounds):
                for name in turns(list(ways), number):
                    await _round(ways[name])
                shown = ", ".join(
                    f"{name} {np.median(way.pings[PEER_BYTES][-1].one_way_ns) / 1e3:,.1f}" for name, way in ways.items()
                )
                _say(f"round {number + 1} of {options.rounds}: p50 one-way of {PEER_BYTES} bytes, µs: {shown}")
                report["rounds"] = number + 1
    finally:
        _sum_up(ways, report)
    return {name: way.counts[PEER_BYTES] for name, way in ways.items()}


async def _start(
    stack: contextlib.AsyncExitStack, setting: Setting, options: TransportOptions, report: dict[str, Any]
) -> Pair | None:
    """A connected pair; none, and a note, where this machine lacks something and nobody asked for it by name."""
    _say(f"starting {setting.way}")
    try:
        return await stack.enter_async_context(Pair.start(setting))
    except HostError as error:
        if setting.way in (*(options.fabrics or ()), *(options.peers or ())):
            raise
        report["notes"].append(f"left out: {error}")
        return None


def _chosen(options: TransportOptions, report: dict[str, Any]) -> list[tuple[str, Strategy]]:
    """Fabrics, each with the idle strategies that it has, then peers."""
    fabrics = list(options.fabrics or FABRICS)
    if options.fabrics is None and not os.path.isdir("/sys/class/infiniband"):
        fabrics.remove("verbs")
        report["notes"].append("left out: verbs: this machine has no RDMA device")
    for name in options.peers or ():
        if not installed(name):
            raise ConfigError(
                "peers", f"{name} is not installed", f"pip install {PEERS[name].package}, or leave it out"
            )
    peers = PEERS if options.peers is None else options.peers
    absent = [name for name in peers if not installed(name)]
    report["notes"] += [f"left out: {name}: its package {PEERS[name].package} is not installed" for name in absent]
    found: list[tuple[str, Strategy]] = []
    for fabric in fabrics:
        found += [(fabric, idle) for idle in (options.idle if fabric in SPINNING else STRATEGIES[:1])]
    return found + [(name, STRATEGIES[0]) for name in peers if name not in absent]


def _name(way: str, idle: Strategy) -> str:
    return way if idle == STRATEGIES[0] else f"{way} {idle}"


def _arrives(way: str, idle: Strategy) -> str:
    if way in PEERS:
        return PEERS[way].arrives
    return WAITS[way] if idle == STRATEGIES[0] else SPINS


def _run(blank: Setting, name: str, pair: int) -> str:
    return f"{blank.run}_{re.sub('[^a-z0-9]', '_', name)}_{pair}"


async def _calibrate(way: _Way, options: TransportOptions) -> None:
    """How many messages of each size a measurement has: slow ways get fewer, so that rounds are of about equal length."""
    (pair,) = way.pairs
    for nbytes in way.sizes:
        least = count_of(nbytes, CALIBRATION)
        one = await pair.ping(nbytes=nbytes, count=least, warmup=warmup_of(least))
        each_s = float(np.mean(one.round_trip_ns)) / 1e9
        way.counts[nbytes] = count_of(nbytes, options.count, each_s=each_s, seconds=options.seconds)


async def _round(way: _Way) -> None:
    """Every size once. Kept only when all are measured, so that rounds are whole."""
    pings: dict[int, Pings] = {}
    streams: dict[int, Stream] = {}
    (pair,) = way.pairs
    for nbytes in way.sizes:
        count = way.counts[nbytes]
        pings[nbytes] = await pair.ping(nbytes=nbytes, count=count, warmup=warmup_of(count))
        if way.name not in PEERS or PEERS[way.name].streams:
            streams[nbytes] = await pair.stream(nbytes=nbytes, count=count, warmup=warmup_of(count))
    for nbytes in way.sizes:
        way.pings.setdefault(nbytes, []).append(pings[nbytes])
        if nbytes in streams:
            way.streams.setdefault(nbytes, []).append(streams[nbytes])


def _sum_up(ways: dict[str, _Way], report: dict[str, Any]) -> None:
    rounds = report["rounds"]
    if not rounds:
        return
    for name, way in ways.items():
        report["ways"][name] = {
            "peer": name in PEERS,
            "arrives": way.arrives,
            "processes": 1 if name == SHARED else 2,
            "sizes": {
                str(nbytes): {
                    **ping_figures(way.pings[nbytes][:rounds]),
                    "stream": stream_figures(streams[:rounds], nbytes)
                    if (streams := way.streams.get(nbytes))
                    else None,
                }
                for nbytes in way.sizes
            },
        }
    compared = {
        name: [float(np.median(one.one_way_ns)) / 1e3 for one in way.pings[PEER_BYTES][:rounds]]
        for name, way in ways.items()
        if name != SHARED
    }
    report["peer_bytes"] = PEER_BYTES
    report["against_peers"] = against_peers(
        compared, list(PEERS), [name for name, peer in PEERS.items() if not peer.spins]
    )


async def _crowded(
    options: TransportOptions, blank: Setting, counts: Mapping[str, int], report: dict[str, Any]
) -> None:
    """Four pairs of one way at a time, all at work at once on two cores."""
    cores = tuple(sorted(os.sched_getaffinity(0))[:CROWD_CORES])
    ways: dict[str, _Way] = {}
    done = 0
    try:
        async with contextlib.AsyncExitStack() as stack:
            for way, idle in _chosen(options, {"notes": []}):
                name = _name(way, idle)
                if way == SHARED or name not in counts:
                    continue
                pairs = []
                for number in range(CROWD_PAIRS):
                    run = _run(blank, name, number + 1)
                    setting = dataclasses.replace(blank, way=way, idle=idle, largest=PEER_BYTES, run=run, cores=cores)
                    pairs.append(await stack.enter_async_context(Pair.start(setting)))
                ways[name] = _Way(name, _arrives(way, idle), (PEER_BYTES,), pairs)
                _say(f"started {len(pairs)} pairs of {name}")
            for number in range(options.rounds):
                for name in turns(list(ways), number):
                    count = -(-counts[name] // CROWD_PAIRS)
                    measured = [
                        pair.ping(nbytes=PEER_BYTES, count=count, warmup=warmup_of(count)) for pair in ways[name].pairs
                    ]
                    ways[name].crowd.append(list(await asyncio.gather(*measured)))
                _say(f"oversubscribed: round {number + 1} of {options.rounds}")
                done = number + 1
    finally:
        if done:
            report["oversubscribed"] = {
                "processes": 2 * CROWD_PAIRS,
                "cores": len(cores),
                "rounds": done,
                "nbytes": PEER_BYTES,
                "ways": crowd_figures({name: way.crowd[:done] for name, way in ways.items()}),
            }


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
