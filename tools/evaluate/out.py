"""The directory that an evaluation keeps its results in: made, held by one command at a time, and rid of what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from afore.core.errors import ConfigError, HostError
from afore.scheduler.traces.format import PARTIAL
from afore.tools.bench.files import check_place, sweep

CELLS, DEMAND, MEASURED = "cells", "demand", "measured"
"""Its folders: results by cell; what cells met, as traces; what was measured here."""


@contextlib.contextmanager
def out_directory(directory: Path, files: Sequence[str] = ()) -> Iterator[None]:
    """The directory, made and held. ``files``: names in it that will be written in the end.

    Raises ``HostError`` where it cannot be made, or something is in a file's way; ``ConfigError`` where another command holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Of the directory itself: nothing is left behind, and it ends with the process, however that ends.
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(str(directory), f"cannot be made: {error.strerror}", "give another --out") from error
    try:
        alone = _held(descriptor, directory)
        for name in files:
            check_place(directory / name)
        if alone:
            for folder in (directory, directory / CELLS, directory / MEASURED):
                sweep(folder)
            _sweep_demand(directory / DEMAND)
        yield
    finally:
        os.close(descriptor)


def _held(descriptor: int, directory: Path) -> bool:
    """Whether nobody else can be writing there: a file system without locks does not say."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            "--out", f"another evaluation is writing into {directory}", "wait for its end, or give another directory"
        ) from None
    except OSError:
        return False
    return True


def _sweep_demand(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for path in directory.glob(f"*{PARTIAL}"):
            if path.is_file() and not path.is_symlink():
                path.unlink()
