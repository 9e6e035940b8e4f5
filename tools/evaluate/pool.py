"""Processes that run something for a command, and end with it: after its work, after Ctrl-C or SIGTERM, or when it is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_ENDING = (signal.SIGINT, signal.SIGTERM)


class Pool:
    """At most ``jobs`` processes."""

    def __init__(self, jobs: int) -> None:
        # Not forked: the parent has compiled code and perhaps threads.
        context = multiprocessing.get_context("forkserver")
        # They inherit what is blocked. Ctrl-C at a terminal reaches them too, and is the command's to handle.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._others = set(multiprocessing.active_children())
        self._executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)

    def submit(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """What runs in a process as soon as one is free."""
        with _unbroken():
            return self._executor.submit(do, *args, **kwargs)

    def close(self) -> None:
        """Waits for the end of what runs."""
        self._executor.shutdown()

    def kill(self) -> None:
        """Ends what runs, which is of no use to anybody any more."""
        for child in set(multiprocessing.active_children()) - self._others:
            child.kill()
        self._executor.shutdown(cancel_futures=True)


@contextmanager
def _unbroken() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait: broken off in its start, a process would be one that nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def later(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    before: dict[signal.Signals, Any] = {signum: signal.signal(signum, later) for signum in _ENDING}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        for one in dict.fromkeys(came):
            signal.raise_signal(one)


def _end_with_parent() -> None:
    """A process ends with the command, however that ended: nobody else would ever end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
