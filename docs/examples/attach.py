"""Sends a prompt to a cluster that is running already, such as one whose roles were started by hand.

    python docs/examples/attach.py CLUSTER PROMPT [--stop]

CLUSTER is what was given as ``--cluster``. Without it, roles started by hand have the name ``default`` at the default
rendezvous and ``at_29600`` at port 29600; the door prints it. Other programs ask over HTTP; this is the way through the
library, for a process of the same user on the same machine. ``--stop`` ends the cluster after the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from afore import Cluster, RunConfig
from afore.core.clock import WallClock
from afore.core.errors import AforeError
from afore.serving.client import Client
from afore.serving.spec import HUB_ADDRESS
from afore.transport.shm import ShmConfig, ShmFabric

CONTROL_US = 30e6
SERVING_US = 120e6


@contextlib.asynccontextmanager
async def attached(name: str, clock: WallClock, *, stop: bool) -> AsyncIterator[Client]:
    """A client of the running cluster ``name``, once all of its roles serve."""
    fabric = ShmFabric.open(ShmConfig(run_id=name).run_directory, "client")
    try:
        async with Client.connect(fabric, HUB_ADDRESS, clock, timeout_us=CONTROL_US) as client:
            await client.serving(timeout_us=SERVING_US)
            yield client
            if stop:
                await client.stop("asked to by attach.py")
    finally:
        await fabric.close()


async def main(arguments: argparse.Namespace) -> None:
    clock = WallClock()
    running = attached(arguments.cluster, clock, stop=arguments.stop)
    async with Cluster.over(running, RunConfig(), clock) as cluster:
        async for token in cluster.generate(arguments.prompt, max_new_tokens=24):
            print(token.text, end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Send a prompt to a running cluster of this machine.")
    parser.add_argument("cluster", help="its name, as given to --cluster, or default, or at_PORT")
    parser.add_argument("prompt")
    parser.add_argument("--stop", action="store_true", help="end the cluster afterwards")
    try:
        asyncio.run(main(parser.parse_args()))
    except AforeError as error:
        sys.exit(f"attach: {error}")
