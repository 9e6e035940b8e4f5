"""Where tasks wait: what an error about a hang must say. Works for any event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_ASYNCIO = os.path.dirname(asyncio.__file__)
_SHOWN_FRAMES = 4
_SHOWN_TASKS = 40


@dataclass(frozen=True, slots=True)
class PendingTask:
    """A task that is not done, and where it stands."""

    name: str
    where: tuple[str, ...]
    """The chain of awaits, outermost first: ``function (file:line)``."""
    awaits: str
    """The task that it waits for; nothing where it is something else, which the chain then shows."""

    def __str__(self) -> str:
        chain = self.where[-_SHOWN_FRAMES:]
        dots = "… > " if len(chain) < len(self.where) else ""
        return f"{self.name}: {dots}{' > '.join(chain) or 'not started'}" + (
            f", awaits {self.awaits}" if self.awaits else ""
        )


def pending_tasks(loop: asyncio.AbstractEventLoop) -> tuple[PendingTask, ...]:
    """Every task of ``loop`` that is not done, in order of creation where the loop numbers its tasks, else by name."""
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    tasks.sort(key=lambda task: (getattr(task, "birth", 0), task.get_name()))
    return tuple(_describe_task(task) for task in tasks)


def describe(pending: tuple[PendingTask, ...]) -> str:
    """The tasks as indented lines, to be put behind a message."""
    if not pending:
        return ""
    lines = [f"\n  {task}" for task in pending[:_SHOWN_TASKS]]
    if len(pending) > _SHOWN_TASKS:
        lines.append(f"\n  … and {len(pending) - _SHOWN_TASKS} more")
    return f"; {len(pending)} pending task{'s' if len(pending) > 1 else ''}:" + "".join(lines)


def _describe_task(task: asyncio.Task[Any]) -> PendingTask:
    where: list[str] = []
    for frame in _await_chain(task.get_coro()):
        code = frame.f_code
        where.append(f"{code.co_qualname} ({_short(code.co_filename)}:{frame.f_lineno})")
    waiter = getattr(task, "_fut_waiter", None)
    # What a plain future belongs to (an Event, a Queue) is in the frames above it.
    awaits = f"task {waiter.get_name()}" if isinstance(waiter, asyncio.Task) else ""
    return PendingTask(task.get_name(), tuple(where), awaits)


def _await_chain(coro: object) -> Iterator[FrameType]:
    """Frames from the outermost coroutine inwards, through coroutines, generators and async generators."""
    current: object = coro
    while current is not None:
        for frame_name, inner_name in (
            ("cr_frame", "cr_await"),
            ("gi_frame", "gi_yieldfrom"),
            ("ag_frame", "ag_await"),
        ):
            if hasattr(current, frame_name):
                frame = getattr(current, frame_name)
                if frame is not None:
                    yield frame
                current = getattr(current, inner_name)
                break
        else:
            return


def _short(filename: str) -> str:
    if filename.startswith(_ASYNCIO):
        return "asyncio" + filename[len(_ASYNCIO) :]
    return os.sep.join(filename.split(os.sep)[-2:])
