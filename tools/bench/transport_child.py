"""A process that ``bench transport`` measures: one JSON command a line on stdin, one answer a line on stdout.

It has one side of a pair, or both (``loopback``, whose endpoints share a process). While nothing is asked of it, it sleeps.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import time
from array import array
from collections.abc import Mapping
from typing import Any

from afore.core.errors import AforeError
from afore.tools.bench.transport_ends import LEAD, End, Setting, fabric_ends
from afore.tools.bench.transport_peers import PEERS, peer_ends

Times = dict[str, "array[int]"]
"""Nanoseconds of the machine's one monotonic clock, by what happened then."""


async def ping(end: End, count: int) -> Times:
    """``count`` times a message and its answer: when each was handed over, when its answer was there."""
    sent, back = array("q"), array("q")
    now, send, receive = time.monotonic_ns, end.send, end.receive
    for number in range(count):
        sent.append(now())
        await send(number)
        await receive()
        back.append(now())
    return {"sent": sent, "back": back}


async def pong(end: End, count: int) -> Times:
    """Answers ``count`` messages: when each was there."""
    got = array("q")
    now, send, receive = time.monotonic_ns, end.send, end.receive
    for number in range(count):
        await receive()
        got.append(now())
        await send(number)
    return {"got": got}


async def pour(end: End, count: int) -> Times:
    """``count`` messages without waiting for an answer to any but the last: when it began."""
    began = time.monotonic_ns()
    for number in range(count):
        await end.send(number)
    await end.receive()
    return {"began": array("q", [began])}


async def drink(end: End, count: int) -> Times:
    """Takes ``count`` messages, then answers: when the last was there."""
    left = count
    while left > 0:
        left -= await end.receive()
    ended = time.monotonic_ns()
    await end.send(0)
    return {"ended": array("q", [ended])}


LOOPS = {"ping": (ping, pong), "stream": (pour, drink)}
"""What each measurement is for the side that leads and for the one that follows."""


async def measure(ends: Mapping[str, End], what: str, *, nbytes: int, count: int, warmup: int) -> dict[str, Any]:
    """One measurement of this process's sides: times, and CPU seconds of the process (user and system)."""
    for end in ends.values():
        end.prepare(nbytes)
    lead, follow = LOOPS[what]

    async def all_sides(times: int) -> list[Times]:
        return await asyncio.gather(*[(lead if side == LEAD else follow)(end, times) for side, end in ends.items()])

    if warmup:
        await all_sides(warmup)
    began_s = time.process_time()
    found = await all_sides(count)
    cpu_s = time.process_time() - began_s
    return {
        "cpu_s": cpu_s,
        "times": {name: base64.b64encode(values).decode() for times in found for name, values in times.items()},
    }


async def serve(setting: Setting, sides: tuple[str, ...], answers: Any) -> None:
    """Opens, meets, measures until stdin ends; errors are answers."""
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)

    def answer(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    ends: dict[str, End] = {}
    try:
        offered = {}
        for side, end in (peer_ends if setting.way in PEERS else fabric_ends)(setting, sides).items():
            offered[side] = await end.open()
            ends[side] = end
        answer({"offers": offered})
        offers = json.loads(await commands.readline() or "{}")
        if offers:
            for side, end in ends.items():
                await end.meet(next(offer for other, offer in offers.items() if other != side))
            answer({"met": True})
        while line := await commands.readline():
            answer(await measure(ends, **json.loads(line)))
    except (AforeError, TimeoutError) as error:
        answer({"error": type(error).__name__, "text": str(error)})
    finally:
        for end in ends.values():
            await end.close()


def main() -> None:
    """``transport_child SETTING SIDE…``: the setting as JSON."""
    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Answers go where the parent reads; what libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    fields = json.loads(sys.argv[1])
    setting = Setting(**{**fields, "cores": tuple(fields["cores"])})
    if setting.cores:
        os.sched_setaffinity(0, setting.cores)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(setting, tuple(sys.argv[2:]), answers))


if __name__ == "__main__":
    main()
