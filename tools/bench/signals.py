"""Ctrl-C ends the measuring, not the program: what was measured so far is still shown."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def until_signalled(work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; none when Ctrl-C or SIGTERM cancelled it (once: a second signal cannot break off the cleaning up)."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    signalled = False

    def stop() -> None:
        nonlocal signalled
        if not signalled:
            signalled = True
            task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    for signum in signals:
        loop.add_signal_handler(signum, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if signalled:
            return None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        raise
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)
